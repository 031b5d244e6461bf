#include "cuda/extend_short.cuh"

namespace kvservice {
namespace extend {

bool launch_short_float8(const Args& args, cudaStream_t stream, int64_t tiles) {
  return launch_short_of<half, true>(args, stream, tiles);
}

}  // namespace extend
}  // namespace kvservice
