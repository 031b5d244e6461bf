#include "kv_slots.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "cpu/parallel.h"
#include "errors.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

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

#ifdef __SSE2__
inline __m128i interleave_low(__m128i a, __m128i b, uint16_t /*element*/) { return _mm_unpacklo_epi16(a, b); }
inline __m128i interleave_high(__m128i a, __m128i b, uint16_t /*element*/) { return _mm_unpackhi_epi16(a, b); }
inline __m128i interleave_low(__m128i a, __m128i b, uint32_t /*element*/) { return _mm_unpacklo_epi32(a, b); }
inline __m128i interleave_high(__m128i a, __m128i b, uint32_t /*element*/) { return _mm_unpackhi_epi32(a, b); }

// Transposes a square of elements in registers, a register for each row. Interleaving the rows of the upper half with
// those of the lower half rotates the bits of (row, column) by one; after as many rounds as a row number has bits, the
// two have changed places.
template <class T>
void transpose_square(T* to, int64_t to_pitch, const T* from, int64_t from_pitch) {
  constexpr int kRows = sizeof(__m128i) / sizeof(T);
  __m128i rows[kRows], mixed[kRows];
  for (int i = 0; i < kRows; ++i) rows[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * from_pitch));
  for (int round = 1; round < kRows; round *= 2) {
    for (int i = 0; i < kRows / 2; ++i) {
      mixed[2 * i] = interleave_low(rows[i], rows[i + kRows / 2], T{});
      mixed[2 * i + 1] = interleave_high(rows[i], rows[i + kRows / 2], T{});
    }
    std::copy(mixed, mixed + kRows, rows);
  }
  for (int i = 0; i < kRows; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * to_pitch), rows[i]);
}
#endif

// to[column][row] = from[row][column]
template <class T>
void transpose(T* to, int64_t to_pitch, const T* from, int64_t from_pitch, int64_t num_rows, int64_t num_columns) {
  int64_t square_rows = 0, square_columns = 0;
#ifdef __SSE2__
  constexpr int64_t kSide = sizeof(__m128i) / sizeof(T);
  square_rows = num_rows / kSide * kSide;
  square_columns = num_columns / kSide * kSide;
  for (int64_t row = 0; row < square_rows; row += kSide) {
    for (int64_t column = 0; column < square_columns; column += kSide) {
      transpose_square(to + column * to_pitch + row, to_pitch, from + row * from_pitch + column, from_pitch);
    }
  }
#endif
  for (int64_t column = 0; column < num_columns; ++column) {
    for (int64_t row = column < square_columns ? square_rows : 0; row < num_rows; ++row) {
      to[column * to_pitch + row] = from[row * from_pitch + column];
    }
  }
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
    transpose(value_out, block_size, value, token_stride, length, size);
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
    transpose(value, token_stride, value_in, block_size, size, length);
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
