#include "cuda/extend_wgmma_kernel.cuh"

namespace kvservice {
namespace extend {

bool launch_wgmma_float8(const Args& args, cudaStream_t stream, int64_t tiles) {
  return launch_wgmma_of<half, true>(args, stream, tiles);
}

}  // namespace extend
}  // namespace kvservice
