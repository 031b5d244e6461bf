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

// Copies the first `bytes` of 16 or of 8, and writes zeros for the rest.
__device__ __forceinline__ void copy_16(uint32_t dst, const void* src, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_8(uint32_t dst, const void* src, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// kHead is the number of rows of an octet of V in shared memory; the head size may be smaller. kShift is log2 of the
// block size if the head size is kHead, which removes address arithmetic; 0 supports any block size.
template <int kHead, int kKeys, bool kFloat8, int kShift = 0>
class KvLoader {
  static constexpr int kUnits = kKeys / 16, kItem = kFloat8 ? 1 : 2, kUnroll = kShift > 0 ? kHead : 4;

 public:
  // The tile is in shared memory, and is read there again and again, because registers are scarce.
  __device__ KvLoader(const Args& a, const Tile& tile) : a_(a), tile_(tile) {}

  // Reads the block table one step ahead of the copies, so that the copies do not wait for it.
  __device__ void look_up_keys(int key) { key_block_ = look_up(key + my_token()); }
  __device__ void look_up_values(int key) { value_block_ = look_up(key + 8 * my_octet()); }

  // Where this thread's part of a step is in the pool, and how many bytes of each 16 (of 8 for FP8 values) to copy.
  struct Source {
    const char* at;
    int bytes;
  };

  // Both return the source of the step at `key`. They are called after its lookup.
  __device__ Source keys_at(int key) const {
    const char* source = head() + thread() / kKeys * (16 << block_shift());
    if (key_block_ < 0) return {source, 0};
    return {source + key_block_ * a_.block_bytes + ((key + my_token()) & block_mask()) * 16, 16};
  }

  __device__ Source values_at(int key) const {
    const int position = key + 8 * my_octet();
    const char* source = head() + first_dimension() * (kItem << block_shift());
    if (value_block_ < 0) return {source, 0};
    source += value_block_ * a_.block_bytes + a_.value_offset + (position & block_mask()) * kItem;
    // The context may end in this octet.
    return {source, min(8, tile_.context_len - position) * kItem};
  }

  // Whether no row multiplies this thread's values, because the tile has few keys.
  __device__ bool skips_values(int key) const {
    return tile_.has_few_keys() && key + 8 * my_octet() >= tile_.first_key + kFewKeys;
  }

  __device__ void load_keys(uint32_t dst, const Source& source) const {
    if (source.bytes == 0) return;
    const int first = thread() / kKeys, piece_bytes = 16 << block_shift();
    dst += (first * kKeys + my_token()) * 16;
    constexpr int kStep = kLoadThreads / kKeys;
#pragma unroll(kUnroll)
    for (int i = 0; i < kHead * kItem / 16; i += kStep) {
      if (kShift == 0 && first + i >= a_.head_size * kItem / 16) break;
      copy_16(dst + i * kKeys * 16, source.at + i * piece_bytes, 16);
    }
  }

  __device__ void load_values(uint32_t dst, const Source& source) const {
    constexpr int kOctetBytes = 8 * kItem, kDims = kLoadThreads / 2 / kUnits;
    static_assert(kDims % 8 == 0, "all octets that a thread copies have the same swap");
    const int first = first_dimension(), row_bytes = kItem << block_shift();
    dst += (my_octet() / 2 * kHead + first) * (2 * kOctetBytes);
    dst += (my_octet() % 2 ^ (kFloat8 ? 0 : first / 4 % 2)) * kOctetBytes;
#pragma unroll(kUnroll)
    for (int i = 0; i < kHead; i += kDims) {
      if (kShift == 0 && first + i >= a_.head_size) break;
      if constexpr (kFloat8) {
        copy_8(dst + i * (2 * kOctetBytes), source.at + i * row_bytes, source.bytes);
      } else {
        copy_16(dst + i * (2 * kOctetBytes), source.at + i * row_bytes, source.bytes);
      }
    }
  }

 private:
  // A thread copies all or some pieces of one token of K, and rows of one octet of tokens of V.
  static __device__ int thread() { return ptx::opaque(static_cast<int>(threadIdx.x)); }
  static __device__ int my_token() { return thread() % kKeys; }
  static __device__ int my_octet() { return thread() / 8 % kUnits * 2 + thread() % 2; }
  static __device__ int first_dimension() { return thread() / 2 % 4 + thread() / (8 * kUnits) * 4; }
  __device__ int block_shift() const { return kShift > 0 ? kShift : a_.block_shift; }
  __device__ int block_mask() const { return (1 << block_shift()) - 1; }

  __device__ const char* head() const { return a_.pool + tile_.kv_head * a_.head_bytes; }

  // From the start of the first block that is read.
  __device__ int look_up(int position) const {
    const int block = position >> block_shift();
    return block >= tile_.begin >> block_shift() && position < tile_.end ? tile_.table(a_)[block] : -1;
  }

  const Args& a_;
  const Tile& tile_;
  int key_block_ = -1;
  int value_block_ = -1;
};

}  // namespace extend
}  // namespace kvservice
