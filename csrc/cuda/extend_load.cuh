// Copies keys and values of a tile from the pool to shared memory, kKeys tokens per step, with kLoadThreads threads.
//
// In shared memory, ldmatrix and wgmma read both without bank conflicts:
//   K [head_size/8][kKeys][8]   V [kKeys/16][head_size][16]   (last index: dimensions of K, tokens of V)
// The two octets of 16 tokens of V are swapped in every second group of four dimensions, which is wgmma's 32-byte
// swizzle. The 128 bytes that eight lanes copy are therefore contiguous on both sides. Otherwise L2 receives one
// request per 16 bytes, and the request rate is its first limit. For an FP8 pool, K is [head_size/16][kKeys][16] and
// nothing is swapped; both are converted afterwards.
//
// Values past the context are zero in shared memory, because their slots may hold NaN and zero times NaN is NaN. Keys
// may hold anything: the mask replaces their logits.
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

// kHead is the number of rows of an octet of V in shared memory; the head size may be smaller. kShift is log2 of the
// block size if the head size is kHead, which removes address arithmetic; 0 supports any block size.
template <int kHead, int kKeys, bool kFloat8, int kShift = 0>
class KvLoader {
  static constexpr int kUnits = kKeys / 16, kItem = kFloat8 ? 1 : 2, kUnroll = kShift > 0 ? kHead : 4;

 public:
  // Some rows of the tile see the keys [begin, end).
  __device__ KvLoader(const Args& a, const Tile& tile, int begin, int end, int thread)
      : a_(a),
        table_(tile.table(a)),
        head_(a.pool + tile.kv_head * a.head_bytes),
        context_len_(tile.context_len),
        begin_(begin >> a.block_shift << a.block_shift),
        end_(end),
        thread_(thread) {}

  // Reads the block table one step ahead of the copies, so that the copies do not wait for it.
  __device__ void look_up_keys(int key) { key_block_ = look_up(key + my_token()); }
  __device__ void look_up_values(int key) { value_block_ = look_up(key + 8 * my_octet()); }

  // Starts the copies of the step at `key`, after its lookup.
  __device__ void load_keys(uint32_t dst, int key) const {
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

  __device__ void load_values(uint32_t dst, int key) const {
    constexpr int kOctetBytes = 8 * kItem, kDims = kLoadThreads / 2 / kUnits;
    static_assert(kDims % 8 == 0, "all octets that a thread copies have the same swap");
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
  // A thread copies all or some pieces of one token of K, and rows of one octet of tokens of V.
  __device__ int my_token() const { return thread_ % kKeys; }
  __device__ int my_octet() const { return thread_ / 8 % kUnits * 2 + thread_ % 2; }
  __device__ int block_shift() const { return kShift > 0 ? kShift : a_.block_shift; }
  __device__ int block_mask() const { return (1 << block_shift()) - 1; }

  __device__ int look_up(int position) const {
    return position >= begin_ && position < end_ ? table_[position >> block_shift()] : -1;
  }

  // The context ends in this octet: stores its first `bytes`, then zeros.
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
  const int begin_;  // start of the first block that is read
  const int end_;
  const int thread_;
  int key_block_ = -1;
  int value_block_ = -1;
};

}  // namespace extend
}  // namespace kvservice
