// The Hopper extend kernel and its launch.
#pragma once

#include "cuda/extend_wgmma_consumer.cuh"
#include "cuda/extend_wgmma_producer.cuh"
#include "cuda/launch.h"

namespace kvservice {
namespace extend {

#ifdef KVSERVICE_WGMMA

template <int kHead>
__device__ void prepare(const Args& a, char* shared, SharedStorage<kHead>* storage) {
  if (a.head_size < kHead) {
    for (int i = threadIdx.x * 16; i < WgmmaShape<kHead>::kSharedBytes; i += kWgmmaThreads * 16) {
      *reinterpret_cast<uint4*>(shared + i) = make_uint4(0, 0, 0, 0);
    }
    ptx::fence_proxy_async();
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < WgmmaShape<kHead>::kQueryStages; ++i) {
      // The copies of all producer threads, and one arrival for the published tile.
      ptx::mbarrier_init(ptx::shared_address(&storage->query_full[i]), kLoadThreads + 1);
      ptx::mbarrier_init(ptx::shared_address(&storage->query_empty[i]), kConsumerWarps);
    }
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&storage->keys_full[i]), kLoadThreads);
      ptx::mbarrier_init(ptx::shared_address(&storage->values_full[i]), kLoadThreads);
      ptx::mbarrier_init(ptx::shared_address(&storage->keys_empty[i]), kConsumerWarps);
      ptx::mbarrier_init(ptx::shared_address(&storage->values_empty[i]), kConsumerWarps);
    }
  }
  ptx::wait_for_previous();
  __syncthreads();
}

#endif  // KVSERVICE_WGMMA

#ifdef KVSERVICE_WGMMA
#define KVSERVICE_WGMMA_BOUNDS __launch_bounds__(kWgmmaThreads, 1)
#else
// The host recognizes by these bounds that there is no code for the device.
#define KVSERVICE_WGMMA_BOUNDS __launch_bounds__(32)
#endif

template <typename T, int kHead, bool kFloat8>
__global__ void KVSERVICE_WGMMA_BOUNDS extend_wgmma(const __grid_constant__ Args a) {
#ifdef KVSERVICE_WGMMA
  extern __shared__ __align__(1024) char shared[];
  __shared__ SharedStorage<kHead> storage;
  prepare<kHead>(a, shared, &storage);
  if (threadIdx.x < kWarpgroupThreads) {
    ptx::warpgroup_reg_dealloc<kProducerRegisters<kHead, kFloat8>>();
    WgmmaProducer<kHead, kFloat8>(a, shared, &storage).run();
  } else {
    ptx::warpgroup_reg_alloc<kConsumerRegisters<kHead, kFloat8>>();
    WgmmaConsumer<T, kHead, kFloat8>(a, shared, &storage).run();
  }
#endif
}

template <typename T, int kHead, bool kFloat8>
bool launch_wgmma_as(const Args& args, cudaStream_t stream, int64_t tiles) {
  using Shape = WgmmaShape<kHead>;
  const auto kernel = extend_wgmma<T, kHead, kFloat8>;
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes(extend_wgmma)");
  if (attributes.maxThreadsPerBlock < kWgmmaThreads) return false;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes),
             "cudaFuncSetAttribute(extend_wgmma)");
  const auto resident = static_cast<int64_t>(current_device_properties().num_sms);
  // Only the device knows the number of chunks.
  const int64_t blocks = args.max_partials == 0 && tiles < resident ? tiles : resident;
  launch_early("extend_wgmma", kernel, {blocks, kWgmmaThreads, Shape::kSharedBytes}, stream, args);
  return true;
}

template <typename T, bool kFloat8>
bool launch_wgmma_of(const Args& args, cudaStream_t stream, int64_t tiles) {
  if (args.head_size <= 64) return launch_wgmma_as<T, 64, kFloat8>(args, stream, tiles);
  if (args.head_size <= 128) return launch_wgmma_as<T, 128, kFloat8>(args, stream, tiles);
  return launch_wgmma_as<T, 256, kFloat8>(args, stream, tiles);
}

}  // namespace extend
}  // namespace kvservice
