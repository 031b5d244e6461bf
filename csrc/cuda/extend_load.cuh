// Copies of keys and values of a tile from the pool to shared memory, kKeys tokens a step, by kLoadThreads threads.
//
// In shared memory ldmatrix and wgmma read both without conflicts:
//   K [head_size/8][kKeys][8]   V [kKeys/16][head_size][16]   (the last index: dimensions of K, tokens of V)
// The two octets of 16 tokens of V are swapped in every second four dimensions, wgmma's swizzle of 32 bytes. So what
// eight lanes copy, 128 bytes, stays together on both sides: otherwise the second-level cache gets a request for each
// 16 bytes, and these are what it runs out of first. Of an 8-bit pool K is [head_size/16][kKeys][16] and nothing is
// swapped; both are still to be converted.
//
// Values past the context are zero in shared memory, for zero times what else their memory holds can be NaN. Of keys
// anything may remain: logits are replaced where nothing is to be seen.
#pragma once

#include "cuda/extend_schedule.cuh"

namespace kvservice {
namespace extend {

constexpr int kLoadThreads = 128;

__device__ __forceinline__ void copy_16_or_zeros(uint32_t dst, const void* src, bool copy) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(copy ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copy_8_or_zeros(uint32_t dst, const void* src, bool copy) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(dst), "l"(src), "r"(copy ? 8 : 0) : "memory");
}

// kHead: rows of an octet of V in shared memory, of which the head size may be fewer. kShift: log2 of the block size of
// heads of that size, with which addresses take no arithmetic; or 0, for any.
template <int kHead, int kKeys, bool kFloat8, int kShift = 0>
class KeyLoader {
  static constexpr int kUnits = kKeys / 16, kItem = kFloat8 ? 1 : 2, kUnroll = kShift > 0 ? kHead : 4;

 public:
  // The keys [begin, end) of the tile are seen by some of its rows.
  __device__ KeyLoader(const Args& a, const Tile& tile, int begin, int end, int thread)
      : a_(a),
        table_(tile.table(a)),
        head_(a.pool + tile.kv_head * a.head_bytes),
        context_len_(tile.context_len),
        begin_(begin >> a.block_shift << a.block_shift),
        end_(end),
        thread_(thread) {}

  // Reads the block table one step ahead of the copies, which so do not wait for it.
  __device__ void look_up_keys(int key) { key_block_ = look_up(key + my_token()); }
  __device__ void look_up_values(int key) { value_block_ = look_up(key + 8 * my_octet()); }

  // Starts the copies of the step at `key`, which has been looked up.
  __device__ void fill_keys(uint32_t dst, int key) const {
    const bool copy = key_block_ >= 0;
    const char* source = head_;
    if (copy) source += key_block_ * a_.block_bytes + ((key + my_token()) & block_mask()) * 16;
    const int first = thread_ / kKeys, piece_bytes = 16 << block_shift();
    source += first * piece_bytes;
    dst += (first * kKeys + my_token()) * 16;
    constexpr int kStep = kLoadThreads / kKeys;
#pragma unroll(kUnroll)
    for (int i = 0; i < kHead * kItem / 16; i += kStep) {
      if (kShift == 0 && first + i >= a_.head_size * kItem / 16) break;
      copy_16_or_zeros(dst + i * kKeys * 16, source + i * piece_bytes, copy);
    }
  }

  __device__ void fill_values(uint32_t dst, int key) const {
    constexpr int kOctetBytes = 8 * kItem, kDims = kLoadThreads / 2 / kUnits;
    static_assert(kDims % 8 == 0, "octets are swapped alike in all that a thread copies");
    const int position = key + 8 * my_octet();
    const bool copy = value_block_ >= 0;
    const char* source = head_;
    if (copy) source += value_block_ * a_.block_bytes + a_.value_offset + (position & block_mask()) * kItem;
    const int first = thread_ / 2 % 4 + thread_ / (8 * kUnits) * 4, row_bytes = kItem << block_shift();
    source += first * row_bytes;
    dst += (my_octet() / 2 * kHead + first) * (2 * kOctetBytes);
    dst += (my_octet() % 2 ^ (kFloat8 ? 0 : first / 4 % 2)) * kOctetBytes;
    const int count = context_len_ - position;
    if (copy && count < 8) {
      for (int dim = first; dim < a_.head_size; dim += kDims) {
        store_values(dst, source, count * kItem);
        source += row_bytes * kDims;
        dst += kDims * (2 * kOctetBytes);
      }
      __threadfence_block();
      return;
    }
#pragma unroll(kUnroll)
    for (int i = 0; i < kHead; i += kDims) {
      if (kShift == 0 && first + i >= a_.head_size) break;
      if constexpr (kFloat8) {
        copy_8_or_zeros(dst + i * (2 * kOctetBytes), source + i * row_bytes, copy);
      } else {
        copy_16_or_zeros(dst + i * (2 * kOctetBytes), source + i * row_bytes, copy);
      }
    }
  }

 private:
  // Of K a thread copies all pieces of one token or some, of V rows of one octet of tokens.
  __device__ int my_token() const { return thread_ % kKeys; }
  __device__ int my_octet() const { return thread_ / 8 % kUnits * 2 + thread_ % 2; }
  __device__ int block_shift() const { return kShift > 0 ? kShift : a_.block_shift; }
  __device__ int block_mask() const { return (1 << block_shift()) - 1; }

  __device__ int look_up(int position) const {
    return position >= begin_ && position < end_ ? table_[position >> block_shift()] : -1;
  }

  // The context ends in this octet: its first `bytes`, then zeros.
  static __device__ void store_values(uint32_t dst, const char* source, int bytes) {
#pragma unroll
    for (int i = 0; i < 2 * kItem; ++i) {
      const int left = min(4, max(0, bytes - 4 * i));
      const uint32_t mask = left == 4 ? ~0U : (1U << (8 * left)) - 1;
      const uint32_t word = reinterpret_cast<const uint32_t*>(source)[i] & mask;
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(dst + 4 * i), "r"(word) : "memory");
    }
  }

  const Args& a_;
  const int32_t* table_;
  const char* head_;
  const int context_len_;
  const int begin_;  // where the first block begins that is read
  const int end_;
  const int thread_;
  int key_block_ = -1;
  int value_block_ = -1;
};

}  // namespace extend
}  // namespace kvservice
