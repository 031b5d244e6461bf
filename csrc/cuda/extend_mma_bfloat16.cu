#include "cuda/extend_mma.cuh"

namespace kvservice {
namespace extend {

void launch_mma_bfloat16(const Args& args, cudaStream_t stream, int64_t tiles) {
  launch_mma_of<__nv_bfloat16, false>(args, stream, tiles);
}

}  // namespace extend
}  // namespace kvservice
