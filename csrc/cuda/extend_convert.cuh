// Keys and values of FP8 pools for wgmma: loaded into registers and converted to float16.
//
// Their layout in shared memory is that of extend_load.cuh; values past the context are zero here too.
#pragma once

#include "cuda/extend_load.cuh"

namespace kvservice {
namespace extend {

template <bool kE4M3>
__device__ __forceinline__ uint4 fp8_to_halves(uint32_t first, uint32_t second) {
  uint4 out;
  if constexpr (kE4M3) {
    ptx::e4m3_to_half(first, out.x, out.y);
    ptx::e4m3_to_half(second, out.z, out.w);
  } else {
    ptx::e5m2_to_half(first, out.x, out.y);
    ptx::e5m2_to_half(second, out.z, out.w);
  }
  return out;
}

// Runs on kLoadThreads threads. Each handles 16 bytes of the pool at a time: 16 dimensions of a key, or 16 tokens of a
// dimension.
template <int kHead, int kKeys>
class KvConverter {
  static constexpr int kUnits = kKeys / 16, kLoads = kHead * kKeys / 16 / kLoadThreads;
  static constexpr int kPieceStep = kLoadThreads / kKeys, kDimStep = kLoadThreads / kUnits;
  static_assert(kDimStep % 8 == 0, "all octets that a thread converts have the same swap");

 public:
  // 1 if keys and values can be in flight at the same time, that is, if there are registers for both.
  static constexpr int kOverlaps = kHead > 128 ? 0 : 1;

  // The tile is in shared memory, and is read there again and again, because registers are scarce.
  __device__ KvConverter(const Args& a, const Tile& tile) : a_(a), tile_(tile) {}

  // Reads the block table for the step at `key`, one step ahead of the fetch, so that the fetch does not wait for it.
  __device__ void look_up(int key) {
    key_block_ = block_of(key + token());
    next_values_[0] = block_of(key + 16 * unit());
    next_values_[1] = a_.block_shift == 3 ? block_of(key + 16 * unit() + 8) : next_values_[0];
  }

  __device__ void fetch_keys(int key) {
    const bool load = key_block_ >= 0;
    const char* source = head();
    if (load) source += key_block_ * a_.block_bytes + ((key + token()) & block_mask()) * 16;
    const int piece_bytes = 16 << a_.block_shift;
    source += first_piece() * piece_bytes;
    const int pieces = load ? a_.head_size / 16 - first_piece() : 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      loaded_[0][i] = i * kPieceStep < pieces ? ptx::load_once_16(source) : make_uint4(0, 0, 0, 0);
      source += kPieceStep * piece_bytes;
    }
    value_blocks_[0] = next_values_[0];
    value_blocks_[1] = next_values_[1];
  }

  __device__ void fetch_values(int key) {
    if (a_.block_shift == 3) {
      fetch_octets<0>(value_blocks_[0], key);
      fetch_octets<1>(value_blocks_[1], key);
      return;
    }
    const char* source = values_at(value_blocks_[0], key + 16 * unit());
    const int dims = value_blocks_[0] >= 0 ? a_.head_size - first_dim() : 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      loaded_[kOverlaps][i] = i * kDimStep < dims ? ptx::load_once_16(source) : make_uint4(0, 0, 0, 0);
      source += kDimStep << a_.block_shift;
    }
  }

  __device__ void put_keys(uint32_t dst) const {
    if (a_.pool_dtype == DType::kFloat8E4M3) {
      put_keys_as<true>(dst);
    } else {
      put_keys_as<false>(dst);
    }
  }

  __device__ void put_values(uint32_t dst, int key) {
    const int count = tile_.context_len - key - 16 * unit();
    if (count < 16) {
#pragma unroll
      for (uint4& value : loaded_[kOverlaps]) keep_first(value, count);
    }
    if (a_.pool_dtype == DType::kFloat8E4M3) {
      put_values_as<true>(dst);
    } else {
      put_values_as<false>(dst);
    }
  }

 private:
  // A thread converts pieces of one token of K, and some dimensions of 16 tokens of V.
  static __device__ int thread() { return ptx::opaque(static_cast<int>(threadIdx.x)); }
  static __device__ int token() { return thread() % kKeys; }
  static __device__ int first_piece() { return thread() / kKeys; }
  static __device__ int unit() { return thread() / 8 % kUnits; }
  static __device__ int first_dim() { return thread() % 8 + thread() / (8 * kUnits) * 8; }

  __device__ const char* head() const { return a_.pool + tile_.kv_head * a_.head_bytes; }
  __device__ int block_mask() const { return (1 << a_.block_shift) - 1; }

  __device__ int block_of(int position) const {
    const int block = position >> a_.block_shift;
    return block >= tile_.begin >> a_.block_shift && position < tile_.end ? tile_.table(a_)[block] : -1;
  }

  __device__ const char* values_at(int block, int position) const {
    if (block < 0) return head();
    return head() + block * a_.block_bytes + a_.value_offset + (first_dim() << a_.block_shift) +
           (position & block_mask());
  }

  // Blocks of 8 tokens: a block holds half of a 16-byte load.
  template <int kOctet>
  __device__ void fetch_octets(int block, int key) {
    const char* source = values_at(block, key + 16 * unit() + 8 * kOctet);
    const int dims = block >= 0 ? a_.head_size - first_dim() : 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      uint2 words = {0, 0};
      if (i * kDimStep < dims) words = *reinterpret_cast<const uint2*>(source + i * kDimStep * 8);
      uint4& to = loaded_[kOverlaps][i];
      (kOctet == 0 ? to.x : to.z) = words.x;
      (kOctet == 0 ? to.y : to.w) = words.y;
    }
  }

  // Keeps the first `count` of 16 bytes and zeroes the rest.
  static __device__ void keep_first(uint4& bytes, int count) {
    uint32_t* words[4] = {&bytes.x, &bytes.y, &bytes.z, &bytes.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int left = min(4, max(0, count - 4 * i));
      if (left < 4) *words[i] &= (1U << (8 * left)) - 1;
    }
  }

  template <bool kE4M3>
  __device__ void put_keys_as(uint32_t dst) const {
    dst += (2 * first_piece() * kKeys + token()) * 16;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint32_t at = dst + 2 * i * kPieceStep * kKeys * 16;
      ptx::store_shared_16(at, fp8_to_halves<kE4M3>(loaded_[0][i].x, loaded_[0][i].y));
      ptx::store_shared_16(at + kKeys * 16, fp8_to_halves<kE4M3>(loaded_[0][i].z, loaded_[0][i].w));
    }
  }

  template <bool kE4M3>
  __device__ void put_values_as(uint32_t dst) const {
    const uint32_t swap = first_dim() / 4 % 2 * 16;
    dst += (unit() * kHead + first_dim()) * 32;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint32_t at = dst + i * kDimStep * 32;
      ptx::store_shared_16(at + swap, fp8_to_halves<kE4M3>(loaded_[kOverlaps][i].x, loaded_[kOverlaps][i].y));
      ptx::store_shared_16(at + (swap ^ 16), fp8_to_halves<kE4M3>(loaded_[kOverlaps][i].z, loaded_[kOverlaps][i].w));
    }
  }

  const Args& a_;
  const Tile& tile_;
  int key_block_ = -1;
  int value_blocks_[2] = {-1, -1};
  int next_values_[2] = {-1, -1};
  uint4 loaded_[kOverlaps + 1][kLoads];  // keys, and values behind them or in their place
};

}  // namespace extend
}  // namespace kvservice
