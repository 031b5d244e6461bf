#include "cuda/extend_mma.cuh"

namespace kvservice {
namespace extend {

void launch_mma_half(const Args& args, cudaStream_t stream, int64_t tiles) {
  launch_mma_of<half, false>(args, stream, tiles);
}

}  // namespace extend
}  // namespace kvservice
