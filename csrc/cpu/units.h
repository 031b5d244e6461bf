// Units of sixteen tokens of one KV head, in the layout that the kernels read.
#pragma once

#include "cpu/attention_kernel.h"
#include "cpu/operands.h"

namespace kvservice {
namespace {

// K: piece c of token t is at k + c * k_stride + 16 * t bytes. V: dimension d of token t is v[d * v_stride + t].
template <class T>
struct Unit {
  const char* k;
  int64_t k_stride;
  const T* v;
  int64_t v_stride;
};

// Copies the tokens [begin, end) of the unit that starts at position `start` and zeroes the others: their slots may
// hold any bits, and zero times NaN is NaN.
template <class T>
Unit<T> pack_unit(const AttentionPiece& piece, int64_t kv_head, int64_t start, int64_t begin, int64_t end,
                  char* spare) {
  const PoolView& pool = piece.params->pool;
  const int64_t size = pool.head_size, block_size = pool.block_size;
  constexpr int64_t x = KeyOps<T>::kPiece;
  char* k_out = spare;
  T* v_out = reinterpret_cast<T*>(spare + size * kUnit * sizeof(T));
  __builtin_memset(spare, 0, 2 * size * kUnit * sizeof(T));
  for (int64_t pos = begin, length; pos < end; pos += length) {
    const int64_t offset = pos % block_size, left = block_size - offset;
    length = left < end - pos ? left : end - pos;
    const int64_t block = piece.table[pos / block_size], t = pos - start;
    const char* k = pool.key(block, piece.params->layer, kv_head) + offset * 16;
    const T* v = reinterpret_cast<const T*>(pool.value(block, piece.params->layer, kv_head)) + offset;
    for (int64_t c = 0; c < size / x; ++c) {
      __builtin_memcpy(k_out + (c * kUnit + t) * 16, k + c * block_size * 16, length * 16);
    }
    for (int64_t d = 0; d < size; ++d) {
      for (int64_t i = 0; i < length; ++i) v_out[d * kUnit + t + i] = v[d * block_size + i];
    }
  }
  return {k_out, kUnit * 16, v_out, kUnit};
}

// Copies a whole unit from blocks of `BlockSize` tokens. The size of each copy is a compile-time constant.
template <class T, int BlockSize>
Unit<T> pack_blocks(const AttentionPiece& piece, int64_t kv_head, int64_t start, char* spare) {
  const PoolView& pool = piece.params->pool;
  const int64_t size = pool.head_size;
  constexpr int64_t x = KeyOps<T>::kPiece;
  T* v_out = reinterpret_cast<T*>(spare + size * kUnit * sizeof(T));
  for (int64_t t = 0; t < kUnit; t += BlockSize) {
    const int64_t block = piece.table[(start + t) / BlockSize];
    const char* k = pool.key(block, piece.params->layer, kv_head);
    const T* v = reinterpret_cast<const T*>(pool.value(block, piece.params->layer, kv_head));
    for (int64_t c = 0; c < size / x; ++c)
      __builtin_memcpy(spare + (c * kUnit + t) * 16, k + c * BlockSize * 16, BlockSize * 16);
    for (int64_t d = 0; d < size; ++d)
      __builtin_memcpy(v_out + d * kUnit + t, v + d * BlockSize, BlockSize * sizeof(T));
  }
  return {spare, kUnit * 16, v_out, kUnit};
}

// Returns the unit that starts at position `start`, a multiple of 16, of which the piece may read [key_begin, key_end).
// The unit is used in place if it is within one block; otherwise it is packed into `spare` (2 * head_size * 16
// elements).
template <class T>
Unit<T> find_unit(const AttentionPiece& piece, int64_t kv_head, int64_t start, char* spare) {
  const PoolView& pool = piece.params->pool;
  const int64_t begin = start > piece.key_begin ? start : piece.key_begin;
  const int64_t end = start + kUnit < piece.key_end ? start + kUnit : piece.key_end;
  if (end - begin == kUnit) {
    switch (pool.block_size) {
      case 1:
        return pack_blocks<T, 1>(piece, kv_head, start, spare);
      case 2:
        return pack_blocks<T, 2>(piece, kv_head, start, spare);
      case 4:
        return pack_blocks<T, 4>(piece, kv_head, start, spare);
      case 8:
        return pack_blocks<T, 8>(piece, kv_head, start, spare);
    }
  }
  if (pool.block_size < kUnit || end - begin < kUnit) return pack_unit<T>(piece, kv_head, start, begin, end, spare);
  const int64_t block = piece.table[start / pool.block_size], offset = start % pool.block_size;
  const char* v = pool.value(block, piece.params->layer, kv_head);
  return {pool.key(block, piece.params->layer, kv_head) + offset * 16, pool.block_size * 16,
          reinterpret_cast<const T*>(v) + offset, pool.block_size};
}

}  // namespace
}  // namespace kvservice
