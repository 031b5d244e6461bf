// The interface between the driver (attention.cpp) and the kernels. There is one set of kernels per instruction set.
#pragma once

#include "attention.h"

namespace kvservice {

// Some rows of one sequence, for some KV heads, against a range of its keys. A row is one (query token, query head)
// pair of a head's group: row = token * group_size + head in group. The result is an unnormalised softmax, so that
// pieces over different keys can be merged. `heads` are the KV heads of the piece:
//   max [heads, rows]              largest logit, -inf if no key is visible
//   sum [heads, rows]              sum of exp(logit - max)
//   acc [heads, rows, head_size]   sum of exp(logit - max) * value
struct AttentionPiece {
  const AttentionParams* params;
  const int32_t* table;
  int64_t first_token;  // of the sequence, in query
  int64_t query_len;
  int64_t context_len;
  int64_t head_begin;  // KV heads
  int64_t head_end;
  int64_t row_begin;
  int64_t row_end;
  int64_t key_begin;
  int64_t key_end;
  float* max;
  float* sum;
  float* acc;

  int64_t heads() const { return head_end - head_begin; }
  int64_t rows() const { return row_end - row_begin; }

  // Returns the index of a row of the piece's first KV head in the query's [num_tokens, num_heads]. The row of the next
  // KV head is group_size further.
  int64_t query_row(int64_t row) const {
    const int64_t group = params->group_size();
    return (first_token + row / group) * params->num_heads + head_begin * group + row % group;
  }
};

struct AttentionKernel {
  // Takes up to max_rows rows. `scratch` has scratch_bytes(head_size, heads * rows) bytes, 64-byte aligned.
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
const CpuKernels& amx_bf16_kernels();
#endif

// Returns the best set that this processor supports, or the set named by KVSERVICE_CPU_ISA. Throws ArgumentError if
// that name is unknown or not supported here.
const CpuKernels& cpu_kernels();

}  // namespace kvservice
