#include "cpu/simd_portable.h"
// The instruction set is included first: the templates below are compiled for it, in this file's own namespace.
#include "cpu/attention_rows.h"

namespace kvservice {

const CpuKernels& portable_kernels() {
  static constexpr CpuKernels kernels = {
      "portable",
      {vector_kernel<float>(), vector_kernel<fp16>(), vector_kernel<bf16>()},
      {store_row<float>, store_row<fp16>, store_row<bf16>},
  };
  return kernels;
}

}  // namespace kvservice
