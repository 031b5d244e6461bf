// The instantiations of the decode kernel. Each pair of types has its own file, so that they compile in parallel.
#pragma once

#include <algorithm>

#include "cuda/decode.cuh"
#include "cuda/launch.h"

namespace kvservice::decode {

// One instantiation, with its types erased.
struct Variant {
  int columns;
  int round_tokens;
  int blocks_per_sm;
  int stages_offset;  // bytes of shared memory before the stages
  int partial_floats;
  void (*launch)(const Params& params, int blocks, int shared_bytes, cudaStream_t stream);
  int (*max_clusters)(int shared_bytes, int cluster);  // that fit on the current device at once
};

// Returns null if there is no such variant.
const Variant* half_variant(int head_size, int columns);
const Variant* bfloat16_variant(int head_size, int columns);
const Variant* e4m3_variant(int head_size, int columns);
const Variant* e5m2_variant(int head_size, int columns);

constexpr int kMaxDevices = 64;

// Prepares the kernel on the current device.
template <typename T, Cache kCache, int kHead, int kColumns>
auto prepared_kernel() {
  const auto kernel = decode_kernel<T, kCache, kHead, kColumns>;
  static bool prepared[kMaxDevices];
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  if (!prepared[device]) {
    const int most = current_device_properties().max_shared_bytes_per_block;
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most), "decode attention");
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100), "decode attention");
    // Without it, the largest clusters do not fit.
    clear_error(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    prepared[device] = true;
  }
  return kernel;
}

template <typename T, Cache kCache, int kHead, int kColumns>
int max_clusters(int shared_bytes, int cluster) {
  const auto* kernel = reinterpret_cast<const void*>(prepared_kernel<T, kCache, kHead, kColumns>());
  return max_active_clusters(kernel, block_threads(kColumns), shared_bytes, cluster);
}

template <typename T, Cache kCache, int kHead, int kColumns>
void launch(const Params& params, int blocks, int shared_bytes, cudaStream_t stream) {
  launch_early("decode attention", prepared_kernel<T, kCache, kHead, kColumns>(),
               {blocks, block_threads(kColumns), shared_bytes, std::max(params.cluster, 1)}, stream, params);
}

template <typename T, Cache kCache, int kHead, int kColumns>
const Variant* make_variant() {
  using K = Kernel<T, kCache, kHead, kColumns>;
  static const Variant variant = {kColumns,
                                  K::kRoundTokens,
                                  blocks_per_sm(kCache, kHead, kColumns),
                                  K::kStagesOffset,
                                  Partial<kHead, kColumns>::kFloats,
                                  launch<T, kCache, kHead, kColumns>,
                                  max_clusters<T, kCache, kHead, kColumns>};
  return &variant;
}

template <typename T, Cache kCache, int kHead>
const Variant* with_columns(int columns) {
  if (columns == 8) return make_variant<T, kCache, kHead, 8>();
  if (columns == 16) return make_variant<T, kCache, kHead, 16>();
  if constexpr (kHead <= 128) {
    if (columns == 32) return make_variant<T, kCache, kHead, 32>();
  }
  return nullptr;
}

template <typename T, Cache kCache>
const Variant* find_variant(int head_size, int columns) {
  switch (head_size) {
    case 64:
      return with_columns<T, kCache, 64>(columns);
    case 80:
      return with_columns<T, kCache, 80>(columns);
    case 96:
      return with_columns<T, kCache, 96>(columns);
    case 112:
      return with_columns<T, kCache, 112>(columns);
    case 128:
      return with_columns<T, kCache, 128>(columns);
    case 192:
      return with_columns<T, kCache, 192>(columns);
    case 256:
      return with_columns<T, kCache, 256>(columns);
    default:
      return nullptr;
  }
}

}  // namespace kvservice::decode
