#include "cuda/extend_short.cuh"

namespace kvservice {
namespace extend {

bool launch_short_bfloat16(const Args& args, cudaStream_t stream, int64_t tiles) {
  return launch_short_of<__nv_bfloat16, false>(args, stream, tiles);
}

}  // namespace extend
}  // namespace kvservice
