#include "kv_slots.h"

#include <cstring>
#include <string>

#include "cpu/parallel.h"
#include "errors.h"

namespace kvservice {
namespace {

// Below this many bytes, waking another thread costs more than it saves.
constexpr int64_t kInlineBytes = 64 * 1024;

// Calls body(kv_head) for every head. Heads never share a cache line of the pool, so they are the unit of parallel
// work. The tokens of one head are processed in order.
template <class Body>
void for_each_head(const KvSlotsParams& p, const Body& body) {
  const int64_t bytes = 2 * p.num_tokens * p.pool.num_kv_heads * p.pool.head_size * item_size(p.pool.dtype);
  if (bytes <= kInlineBytes) {
    for (int64_t head = 0; head < p.pool.num_kv_heads; ++head) body(head);
  } else {
    parallel_for(p.pool.num_kv_heads, body);
  }
}

// Returns the number of tokens, from `first` on, with consecutive slots within one block.
int64_t range_length(const KvSlotsParams& p, int64_t first) {
  const int64_t in_block = p.pool.block_size - p.slots[first] % p.pool.block_size;
  int64_t length = 1;
  while (length < in_block && first + length < p.num_tokens && p.slots[first + length] == p.slots[first] + length) {
    ++length;
  }
  return length;
}

template <class T>
void write_head(const KvSlotsParams& p, int64_t head) {
  constexpr int64_t x = kKeyPieceBytes / static_cast<int64_t>(sizeof(T));
  const int64_t size = p.pool.head_size, block_size = p.pool.block_size;
  const int64_t token_stride = p.pool.num_kv_heads * size;
  for (int64_t first = 0, length; first < p.num_tokens; first += length) {
    length = range_length(p, first);
    const int64_t block = p.slots[first] / block_size, offset = p.slots[first] % block_size;
    const T* key = reinterpret_cast<const T*>(p.key) + first * token_stride + head * size;
    const T* value = reinterpret_cast<const T*>(p.value) + first * token_stride + head * size;
    T* key_out = reinterpret_cast<T*>(p.pool.key(block, p.layer, head)) + offset * x;
    T* value_out = reinterpret_cast<T*>(p.pool.value(block, p.layer, head)) + offset;
    for (int64_t t = 0; t < length; ++t) {
      for (int64_t d = 0; d < size; d += x) {
        std::memcpy(key_out + d * block_size + t * x, key + t * token_stride + d, kKeyPieceBytes);
      }
    }
    for (int64_t d = 0; d < size; ++d) {
      for (int64_t t = 0; t < length; ++t) value_out[d * block_size + t] = value[t * token_stride + d];
    }
  }
}

template <class T>
void read_head(const KvSlotsParams& p, int64_t head) {
  constexpr int64_t x = kKeyPieceBytes / static_cast<int64_t>(sizeof(T));
  const int64_t size = p.pool.head_size, block_size = p.pool.block_size;
  const int64_t token_stride = p.pool.num_kv_heads * size;
  for (int64_t first = 0, length; first < p.num_tokens; first += length) {
    length = range_length(p, first);
    const int64_t block = p.slots[first] / block_size, offset = p.slots[first] % block_size;
    T* key = reinterpret_cast<T*>(p.key) + first * token_stride + head * size;
    T* value = reinterpret_cast<T*>(p.value) + first * token_stride + head * size;
    const T* key_in = reinterpret_cast<const T*>(p.pool.key(block, p.layer, head)) + offset * x;
    const T* value_in = reinterpret_cast<const T*>(p.pool.value(block, p.layer, head)) + offset;
    for (int64_t t = 0; t < length; ++t) {
      for (int64_t d = 0; d < size; d += x) {
        std::memcpy(key + t * token_stride + d, key_in + d * block_size + t * x, kKeyPieceBytes);
      }
    }
    for (int64_t d = 0; d < size; ++d) {
      for (int64_t t = 0; t < length; ++t) value[t * token_stride + d] = value_in[d * block_size + t];
    }
  }
}

}  // namespace

void check_slots(const KvSlotsParams& p, const char* field) {
  const int64_t num_slots = p.pool.num_blocks * p.pool.block_size;
  for (int64_t i = 0; i < p.num_tokens; ++i) {
    if (p.slots[i] < 0 || p.slots[i] >= num_slots) {
      throw ArgumentError(field, "slot " + std::to_string(p.slots[i]) + " at index " + std::to_string(i) +
                                     " is outside a pool of " + std::to_string(num_slots) + " slots");
    }
  }
}

void write_kv_cpu(const KvSlotsParams& p) {
  if (item_size(p.pool.dtype) == 4) {
    for_each_head(p, [&](int64_t head) { write_head<uint32_t>(p, head); });
  } else {
    for_each_head(p, [&](int64_t head) { write_head<uint16_t>(p, head); });
  }
}

void read_kv_cpu(const KvSlotsParams& p) {
  if (item_size(p.pool.dtype) == 4) {
    for_each_head(p, [&](int64_t head) { read_head<uint32_t>(p, head); });
  } else {
    for_each_head(p, [&](int64_t head) { read_head<uint16_t>(p, head); });
  }
}

}  // namespace kvservice
