#include "cpu/simd_avx512.h"
// The instruction set is included first: the templates below are compiled for it, in this file's own namespace.
#include "cpu/attention_amx_few.h"
#include "cpu/attention_rows.h"

namespace kvservice {

const CpuKernels& amx_bf16_kernels() {
  static constexpr CpuKernels kernels = {
      "amx_bf16",
      {vector_kernel<float>(), vector_kernel<fp16>(), amx_kernel()},
      {store_row<float>, store_row<fp16>, store_row<bf16>},
  };
  return kernels;
}

}  // namespace kvservice
