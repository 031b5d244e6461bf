// The interface of the executors of lane calls.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention.h"
#include "kv_slots.h"
#include "lane/session.h"

namespace kvservice {

// The model shape that calls are checked against.
struct LaneShape {
  int64_t num_layers = 0;
  int64_t num_kv_heads = 0;
  int64_t head_size = 0;
  int64_t block_size = 0;
  int64_t item_size = 0;      // bytes per element of the tensors
  bool block_sparse = false;  // whether block-sparse patterns are supported
};

// A checked call. The tensors are inside their regions. Regions, step and the step's device arrays stay valid until
// attend() returns. The client may write to the tensors at any time.
struct LaneCall {
  const LaneStep* step = nullptr;
  int64_t layer = 0;
  int64_t num_heads = 0;
  AttentionOptions options;
  char* query = nullptr;
  char* key = nullptr;
  char* value = nullptr;
  char* output = nullptr;
  float* lse = nullptr;                 // or null
  const float* alibi_slopes = nullptr;  // or null; the daemon's own copy, in host memory
  LaneMemoryKind kinds[5] = {};         // of query, key, value, output and lse
};

// Parameters of the kernels for a call. `tables` are those of the call's step, in the memory that the kernels read.
inline KvSlotsParams kv_slots_params(const LaneCall& call, const PoolView& pool, DType dtype,
                                     const LaneTables& tables) {
  KvSlotsParams p;
  p.pool = pool;
  p.dtype = dtype;
  p.layer = call.layer;
  p.num_tokens = call.step->num_tokens;
  p.slots = tables.slot_mapping;
  p.key = call.key;
  p.value = call.value;
  return p;
}

inline AttentionParams attention_params(const LaneCall& call, const PoolView& pool, DType dtype,
                                        const LaneTables& tables) {
  AttentionParams p;
  p.pool = pool;
  p.dtype = dtype;
  p.layer = call.layer;
  p.num_tokens = call.step->num_tokens;
  p.num_seqs = call.step->num_seqs;
  p.num_heads = call.num_heads;
  p.max_blocks = call.step->max_blocks;
  p.max_query_len = tables.max_query_len;
  p.num_common_blocks = tables.num_common_blocks;
  p.query = call.query;
  p.query_lens = tables.query_lens;
  p.block_tables = tables.block_tables;
  p.context_lens = tables.context_lens;
  p.alibi_slopes = call.alibi_slopes;
  p.sparse = call.options.sparse;
  p.scale = call.options.scale;
  p.soft_cap = call.options.soft_cap;
  p.sliding_window = call.options.sliding_window;
  p.out = call.output;
  p.lse = call.lse;
  return p;
}

// An executor may serve several lanes, each from its own thread.
class LaneExecutor {
 public:
  virtual ~LaneExecutor() = default;
  virtual const LaneShape& shape() const = 0;

  // Writes the keys and values and attends. Returns when the output is complete. Calls of several threads run in turns,
  // first come, first served, but may pass much larger ones. Throws ArgumentError if nothing was written; any other
  // exception is a fault.
  virtual void attend(const LaneCall& call) = 0;

  // Copies from a region into the daemon's own memory.
  virtual void copy_in(void* to, const char* from, int64_t num_bytes) {
    std::memcpy(to, from, static_cast<size_t>(num_bytes));
  }
};

}  // namespace kvservice
