// The extend kernel for Hopper, and its launch.
#pragma once

#include "cuda/extend_wgmma_compute.cuh"
#include "cuda/extend_wgmma_load.cuh"

namespace kvservice {
namespace extend {

#ifdef KVSERVICE_WGMMA

template <int kHead>
__device__ void prepare(const Args& a, char* shared, Signals<WgmmaShape<kHead>::kKeys>* signals) {
  if (a.head_size < kHead) {
    for (int i = threadIdx.x * 16; i < WgmmaShape<kHead>::kSharedBytes; i += kWgmmaThreads * 16) {
      *reinterpret_cast<uint4*>(shared + i) = make_uint4(0, 0, 0, 0);
    }
    ptx::fence_for_wgmma();
  }
  if (threadIdx.x == 0) {
    // All loading threads' copies, and one thread's word that the tile is described.
    ptx::mbarrier_init(ptx::shared_address(&signals->query_full), kLoadThreads + 1);
    ptx::mbarrier_init(ptx::shared_address(&signals->query_empty), kComputeWarps);
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&signals->keys_full[i]), kLoadThreads);
      ptx::mbarrier_init(ptx::shared_address(&signals->values_full[i]), kLoadThreads);
      ptx::mbarrier_init(ptx::shared_address(&signals->keys_empty[i]), kComputeWarps);
      ptx::mbarrier_init(ptx::shared_address(&signals->values_empty[i]), kComputeWarps);
    }
  }
  __syncthreads();
}

#endif  // KVSERVICE_WGMMA

#ifdef KVSERVICE_WGMMA
#define KVSERVICE_WGMMA_BOUNDS __launch_bounds__(kWgmmaThreads, 1)
#else
// By which the host recognizes that there is no code here.
#define KVSERVICE_WGMMA_BOUNDS __launch_bounds__(32)
#endif

template <typename T, int kHead, bool kFloat8>
__global__ void KVSERVICE_WGMMA_BOUNDS extend_wgmma(const __grid_constant__ Args a) {
#ifdef KVSERVICE_WGMMA
  extern __shared__ __align__(1024) char shared[];
  __shared__ Signals<WgmmaShape<kHead>::kKeys> signals;
  prepare<kHead>(a, shared, &signals);
  if (threadIdx.x < kGroupThreads) {
    ptx::give_registers<kLoadRegisters<kHead, kFloat8>>();
    WgmmaLoader<kHead, kFloat8>(a, shared, &signals).run();
  } else {
    ptx::keep_registers<kComputeRegisters<kHead, kFloat8>>();
    WgmmaCompute<T, kHead, kFloat8>(a, shared, &signals).run();
  }
#endif
}

template <typename T, int kHead, bool kFloat8>
bool launch_wgmma_as(const Args& args, cudaStream_t stream, int64_t tiles) {
  using Shape = WgmmaShape<kHead>;
  const auto kernel = extend_wgmma<T, kHead, kFloat8>;
  cudaFuncAttributes facts;
  check_cuda(cudaFuncGetAttributes(&facts, kernel), "cudaFuncGetAttributes(extend_wgmma)");
  if (facts.maxThreadsPerBlock < kWgmmaThreads) return false;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes),
             "cudaFuncSetAttribute(extend_wgmma)");
  const auto resident = static_cast<int64_t>(current_device_facts().num_multiprocessors);
  // How many chunks the tiles have is known on the device only.
  const auto blocks = static_cast<unsigned>(args.max_partials == 0 && tiles < resident ? tiles : resident);
  kernel<<<blocks, kWgmmaThreads, Shape::kSharedBytes, stream>>>(args);
  check_launch("extend_wgmma");
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
