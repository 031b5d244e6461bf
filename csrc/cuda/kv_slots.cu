// Keys and values by slot: scattered into the pool, with conversion to FP8 if the pool is FP8, and gathered back.
//
//   slots       [num_tokens]
//   key, value  [num_tokens, num_kv_heads, head_size]
//   pool        K of one (block, layer, head): [head_size/x][block_size][x], V: [head_size][block_size]
//
// A warp moves a patch of a few tokens (kv_slots_warp.cuh). Adjacent warps have adjacent parts of the tokens' rows.
#include "cuda/kv_slots.h"

#include "cuda/kv_slots_warp.cuh"
#include "cuda/launch.h"
#include "errors.h"

namespace kvservice {
namespace {

using slots::E4M3;
using slots::E5M2;
using slots::Patch;

constexpr int kWarps = 4;  // of a thread block, at most
// Up to this number, every patch has a thread block of its own, so that the patches of a decode use all SMs.
constexpr int64_t kFewPatches = 1024;
constexpr int kHeadSizeMax = 256;
constexpr int64_t kVectorBytes = sizeof(uint4);

struct Grid {
  unsigned num_patches;
  unsigned patches_of_head;    // of its row
  unsigned patches_of_tokens;  // over all heads
  unsigned copy_blocks;        // the first thread blocks run the fused copy
};

int64_t divide_up(int64_t number, int64_t by) { return (number + by - 1) / by; }

// One vector per thread, so that all loads over the host link are in flight at once.
__device__ void fused_copy(const FusedCopy& copy) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < copy.bytes / kVectorBytes) static_cast<uint4*>(copy.to)[i] = static_cast<const uint4*>(copy.from)[i];
}

template <bool kWrite, class P, class T>
__global__ void __launch_bounds__(kWarps * 32)
    move_slots(const __grid_constant__ KvSlotsParams p, const __grid_constant__ slots::Layer layer,
               const __grid_constant__ Grid grid, const __grid_constant__ FusedCopy copy) {
  ptx::wait_for_previous();
  ptx::start_next();
  if (blockIdx.x < grid.copy_blocks) return fused_copy(copy);
  const unsigned warp = threadIdx.x / 32, index = (blockIdx.x - grid.copy_blocks) * (blockDim.x / 32) + warp;
  if (index >= grid.num_patches) return;
  const unsigned tokens = index / grid.patches_of_tokens, part = index - tokens * grid.patches_of_tokens;
  const unsigned head = part / grid.patches_of_head, column = part - head * grid.patches_of_head;
  __shared__ alignas(16) uint32_t shared[kWarps][Patch<P, T>::kSharedWords];
  const Patch<P, T> patch(p, layer, shared[warp], int64_t{tokens} * slots::kTokens, static_cast<int>(head),
                          static_cast<int>(column) * slots::kPieces);
  if constexpr (kWrite) {
    patch.write();
  } else {
    patch.read();
  }
}

template <bool kWrite, class P, class T>
void launch(const KvSlotsParams& p, const FusedCopy& copy, cudaStream_t stream) {
  const int64_t row_bytes = p.pool.head_size * static_cast<int64_t>(sizeof(T));
  const int64_t patches_of_head = divide_up(row_bytes, slots::kPieces * kVectorBytes);
  const int64_t patches_of_tokens = patches_of_head * p.pool.num_kv_heads;
  const int64_t num_patches = divide_up(p.num_tokens, slots::kTokens) * patches_of_tokens;
  require(num_patches <= INT32_MAX - kWarps, "num_tokens", "is too large");
  const int64_t threads = (num_patches <= kFewPatches ? 1 : kWarps) * 32;
  const int64_t copy_blocks = divide_up(copy.bytes, threads * kVectorBytes);
  const Grid grid{static_cast<unsigned>(num_patches), static_cast<unsigned>(patches_of_head),
                  static_cast<unsigned>(patches_of_tokens), static_cast<unsigned>(copy_blocks)};
  const int64_t blocks = copy_blocks + divide_up(num_patches * 32, threads);
  launch_early(kWrite ? "write_kv" : "read_kv", move_slots<kWrite, P, T>, {blocks, static_cast<int>(threads)}, stream,
               p, slots::layer_of(p.pool, p.layer), grid, copy);
}

template <bool kWrite, class P>
void launch_converting(const KvSlotsParams& p, const FusedCopy& copy, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kFloat32:
      return launch<kWrite, P, float>(p, copy, stream);
    case DType::kFloat16:
      return launch<kWrite, P, __half>(p, copy, stream);
    default:
      return launch<kWrite, P, __nv_bfloat16>(p, copy, stream);
  }
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

void check(const KvSlotsParams& p) {
  const PoolView& pool = p.pool;
  require(pool.num_blocks > 0 && pool.num_layers > 0, "pool", "is empty");
  require(pool.num_kv_heads > 0 && pool.num_kv_heads < (1 << 16), "pool", "number of KV heads is not in [1, 65535]");
  require(
      pool.head_size > 0 && pool.head_size <= kHeadSizeMax && pool.head_size % (is_float8(pool.dtype) ? 16 : 8) == 0,
      "pool", "head size is not a multiple of 8 (of 16 in an FP8 pool) up to 256");
  require(pool.block_size > 0 && pool.block_size <= 256 && (pool.block_size & (pool.block_size - 1)) == 0, "pool",
          "block size is not a power of two up to 256");
  require(p.layer >= 0 && p.layer < pool.num_layers, "layer", "is outside the pool");
  require(!is_float8(p.dtype), "key", "has an FP8 dtype");
  require(is_float8(pool.dtype) || p.dtype == pool.dtype, "key", "does not have the pool's dtype");
  require(p.num_tokens >= 0, "num_tokens", "is negative");
  require(is_aligned(pool.data), "pool", "is not aligned to 16 bytes");
  require(is_aligned(p.key), "key", "is not aligned to 16 bytes");
  require(is_aligned(p.value), "value", "is not aligned to 16 bytes");
}

template <bool kWrite>
void move(const KvSlotsParams& p, const FusedCopy& copy, cudaStream_t stream) {
  check(p);
  require(copy.bytes >= 0 && copy.bytes <= kFusedCopyBytesMax && copy.bytes % kVectorBytes == 0, "copy",
          "is not a multiple of 16 bytes up to 1 MiB");
  if (p.num_tokens == 0) return;  // then there is nothing to copy alongside either
  switch (p.pool.dtype) {
    case DType::kFloat32:
      return launch<kWrite, uint32_t, uint32_t>(p, copy, stream);
    case DType::kFloat8E4M3:
      return launch_converting<kWrite, E4M3>(p, copy, stream);
    case DType::kFloat8E5M2:
      return launch_converting<kWrite, E5M2>(p, copy, stream);
    default:
      return launch<kWrite, uint16_t, uint16_t>(p, copy, stream);
  }
}

}  // namespace

void write_kv_cuda(const KvSlotsParams& params, cudaStream_t stream) { move<true>(params, {}, stream); }

void write_kv_cuda(const KvSlotsParams& params, const FusedCopy& copy, cudaStream_t stream) {
  move<true>(params, copy, stream);
}

void read_kv_cuda(const KvSlotsParams& params, cudaStream_t stream) { move<false>(params, {}, stream); }

}  // namespace kvservice
