#include "cuda/extend_wgmma_kernel.cuh"

namespace kvservice {
namespace extend {

bool launch_wgmma_bfloat16(const Args& args, cudaStream_t stream, int64_t tiles) {
  return launch_wgmma_of<__nv_bfloat16, false>(args, stream, tiles);
}

}  // namespace extend
}  // namespace kvservice
