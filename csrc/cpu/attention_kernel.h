// Between the driver (attention.cpp) and the kernels, of which there is one set for each instruction set.
#pragma once

#include "attention.h"

namespace kvservice {

// Some rows of one sequence and KV head against a range of its keys. A row is one (query token, query head) pair of
// the head's group: row = token * group_size + head in group. The result is a softmax without its division, so that
// pieces over different keys can be put together:
//   max [rows]              largest logit, -inf where no key was visible
//   sum [rows]              sum of exp(logit - max)
//   acc [rows, head_size]   sum of exp(logit - max) * value
struct AttentionPiece {
  const AttentionParams* params;
  const int32_t* table;
  int64_t first_token;  // of the sequence, in query
  int64_t query_len;
  int64_t context_len;
  int64_t kv_head;
  int64_t row_begin;
  int64_t row_end;
  int64_t key_begin;
  int64_t key_end;
  float* max;
  float* sum;
  float* acc;
};

struct AttentionKernel {
  // Takes up to kMaxRows rows. `scratch` holds scratch_bytes(head_size, rows), 64-byte aligned.
  void (*attend)(const AttentionPiece& piece, char* scratch);
  int64_t (*scratch_bytes)(int64_t head_size, int64_t rows);
  int64_t max_rows;
};

struct CpuKernels {
  const char* isa;
  AttentionKernel attention[kNumDTypes];  // by DType
  // out[i] = acc[i] * factor, rounded to the dtype.
  void (*store_row[kNumDTypes])(void* out, const float* acc, float factor, int64_t count);
};

const CpuKernels& portable_kernels();
#ifdef KVSERVICE_X86
const CpuKernels& avx2_kernels();
const CpuKernels& avx512_kernels();
const CpuKernels& avx512_bf16_kernels();
#endif

// The best set this processor has, or the one named by KVSERVICE_CPU_ISA. Throws ArgumentError for a name that is
// unknown or not supported here.
const CpuKernels& cpu_kernels();

}  // namespace kvservice
