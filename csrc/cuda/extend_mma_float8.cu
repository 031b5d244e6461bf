#include "cuda/extend_mma.cuh"

namespace kvservice {
namespace extend {

void launch_mma_float8(const Args& args, cudaStream_t stream, int64_t tiles) {
  launch_mma_of<half, true>(args, stream, tiles);
}

}  // namespace extend
}  // namespace kvservice
