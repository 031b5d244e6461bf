// What computes the calls of lanes.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention.h"
#include "lane/session.h"

namespace kvservice {

// What calls are checked against.
struct LaneShape {
  int64_t num_layers = 0;
  int64_t num_kv_heads = 0;
  int64_t head_size = 0;
  int64_t item_size = 0;      // bytes of an element of the tensors
  bool block_sparse = false;  // whether the executor knows such patterns
};

// One call, checked: the tensors lie inside their regions, which stay until the output is there. The step stays until
// attend() returns, its arrays on a device until the device has got there. The client may write into the tensors
// meanwhile.
struct LaneCall {
  const LaneStep* step = nullptr;
  int64_t layer = 0;
  int64_t num_heads = 0;
  float scale = 1.0F;
  float soft_cap = 0.0F;
  int64_t sliding_window = 0;
  BlockSparse sparse;
  char* query = nullptr;
  char* key = nullptr;
  char* value = nullptr;
  char* output = nullptr;
  float* lse = nullptr;                 // or null
  const float* alibi_slopes = nullptr;  // or null; the daemon's own copy, in host memory
  LaneMemoryKind kinds[5] = {};         // of what query, key, value, output and lse lie in
  void* event = nullptr;                // or null; of the executor's kind, for a call that is not waited for
};

// One may serve several lanes, each from its own thread.
class LaneExecutor {
 public:
  virtual ~LaneExecutor() = default;
  virtual const LaneShape& shape() const = 0;

  // Writes the keys and values, attends, and returns when the output is there, or, if the call has an event, when that
  // is recorded behind it. Calls of several threads take turns, first come, first served. Throws ArgumentError where
  // nothing was written; anything else is a fault.
  virtual void attend(const LaneCall& call) = 0;

  // Until the calls are done that attend() did not wait for.
  virtual void finish() {}

  // From a region into the daemon's own memory.
  virtual void copy_in(void* to, const char* from, int64_t num_bytes) {
    std::memcpy(to, from, static_cast<size_t>(num_bytes));
  }
};

}  // namespace kvservice
