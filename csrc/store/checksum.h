// The checksum of a block, computed while the block is copied.
//
// Pad the block with zeros to a multiple of 32 bytes, and read it as T stripes of eight 32-bit little-endian words
// w[t][j]. For each lane j, modulo 2^64:
//
//   sum[j]      = w[0][j] + w[1][j] + ... + w[T-1][j]
//   weighted[j] = T * w[0][j] + (T-1) * w[1][j] + ... + 1 * w[T-1][j]
//
// With mix() below and h = the size of the block in bytes: for j = 0 .. 7, h = mix(h ^ sum[j]), then
// h = mix(h ^ weighted[j]). The last h is the checksum.
//
// A changed word changes sum[j]. Two different words that are exchanged change weighted[j] if they are in the same
// lane: their distance times their difference is not 0 modulo 2^64, because the words have 32 bits and the sums 64. So
// each change of a byte, each exchange of words and each wrong length changes an input of mix(), and is missed with a
// probability of about 2^-64. It protects against faults, not against forgery.
//
// The sums of a lane are additions of 64-bit numbers only, which every vector unit has, so that the loop runs at the
// speed of memory.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "store/streaming.h"

namespace kvservice {

class Checksum {
 public:
  static constexpr int64_t kStripeBytes = 32;

  // Copies whole stripes and adds them. Streaming stores need a processor that has them, and an aligned target. The
  // caller fences them.
  void copy_stripes(char* to, const char* from, int64_t num_stripes, bool streams) {
    const bool aligned = reinterpret_cast<uintptr_t>(to) % kHalf == 0;
    if (streams && aligned) return copy<true>(to, from, num_stripes);
    copy<false>(to, from, num_stripes);
  }

  // Adds whole stripes.
  void add_stripes(const char* from, int64_t num_stripes) {
    Sums sums = sums_;
    for (int64_t at = 0; at < num_stripes * kStripeBytes; at += kStripeBytes) {
      sums.add(load(from + at), load(from + at + kHalf));
    }
    sums_ = sums;
  }

  // Adds the last bytes of the block, less than a stripe.
  void add_rest(const char* from, int64_t num_bytes) {
    if (num_bytes == 0) return;
    char padded[kStripeBytes] = {};
    std::memcpy(padded, from, static_cast<size_t>(num_bytes));
    add_stripes(padded, 1);
  }

  uint64_t value(int64_t block_bytes) const {
    auto h = static_cast<uint64_t>(block_bytes);
    for (int pair = 0; pair < 4; ++pair) {
      const int half = pair / 2, i = pair % 2;
      for (const Vector* sum : {sums_.even, sums_.even_weighted, sums_.odd, sums_.odd_weighted}) {
        h = mix(h ^ sum[half][i]);
      }
    }
    return h;
  }

 private:
  static constexpr int64_t kHalf = kStripeBytes / 2;
  // Two pairs of words: the even word of a pair is the low half. Every processor has vectors of this size.
  using Vector = uint64_t __attribute__((vector_size(kHalf)));

  struct Sums {
    Vector even[2]{}, even_weighted[2]{}, odd[2]{}, odd_weighted[2]{};

    void add(Vector first, Vector second) {
      even[0] += first & 0xFFFFFFFFU;
      even[1] += second & 0xFFFFFFFFU;
      odd[0] += first >> 32;
      odd[1] += second >> 32;
      for (int i = 0; i < 2; ++i) {
        even_weighted[i] += even[i];
        odd_weighted[i] += odd[i];
      }
    }
  };

  template <bool kStreams>
  void copy(char* to, const char* from, int64_t num_stripes) {
    Sums sums = sums_;  // in registers
    for (int64_t at = 0; at < num_stripes * kStripeBytes; at += kStripeBytes) {
      const Vector first = load(from + at), second = load(from + at + kHalf);
      store<kStreams>(to + at, first);
      store<kStreams>(to + at + kHalf, second);
      sums.add(first, second);
    }
    sums_ = sums;
  }

  template <bool kStreams>
  static void store(char* to, Vector vector) {
#ifdef __SSE2__
    if (kStreams) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to), reinterpret_cast<__m128i>(vector));
      return;
    }
#endif
    std::memcpy(to, &vector, sizeof(vector));
  }

  static Vector load(const char* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof(vector));
    return vector;
  }

  // The finalizer of SplitMix64, a bijection.
  static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
    return x ^ (x >> 31);
  }

  Sums sums_;
};

}  // namespace kvservice
