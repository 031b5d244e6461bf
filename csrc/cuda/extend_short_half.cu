#include "cuda/extend_short.cuh"

namespace kvservice {
namespace extend {

bool launch_short_half(const Args& args, cudaStream_t stream, int64_t tiles) {
  return launch_short_of<half, false>(args, stream, tiles);
}

}  // namespace extend
}  // namespace kvservice
