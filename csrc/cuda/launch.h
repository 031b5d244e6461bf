// Launches of kernels whose thread blocks may start while the kernel before them on the stream still runs
// (programmatic dependent launch).
#pragma once

#include "cuda/runtime.h"

namespace kvservice {

struct LaunchShape {
  int64_t blocks;
  int threads;
  int shared_bytes = 0;
  int cluster = 1;  // thread blocks of each cluster, on Hopper and later
};

// Launches a kernel that calls ptx::wait_for_previous() before it reads or writes global memory.
template <typename... Parameters>
void launch_early(const char* name, void (*kernel)(Parameters...), const LaunchShape& shape, cudaStream_t stream,
                  const Parameters&... parameters) {
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = {static_cast<unsigned>(shape.blocks), 1, 1};
  config.blockDim = {static_cast<unsigned>(shape.threads), 1, 1};
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = !has_hopper_code(reinterpret_cast<const void*>(kernel)) ? 0 : shape.cluster == 1 ? 1 : 2;
  check_cuda(cudaLaunchKernelEx(&config, kernel, parameters...), name);
}

}  // namespace kvservice
