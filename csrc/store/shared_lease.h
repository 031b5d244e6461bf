// Leases that clients take without the daemon, by a word in the record of a block:
//
//   bits 0-7    how many there are
//   bits 8-31   when one was last taken or renewed, in units of 16 ms
//
// Some time after that none counts any more: their owners may have been killed. A client takes a lease, and then looks
// whether the block is still there; the daemon takes the version of a block away, and then looks whether there is a
// lease. So one of them sees the other.
#pragma once

#include <time.h>

#include <atomic>
#include <cstdint>

namespace kvservice {

class SharedLease {
 public:
  static constexpr int64_t kLifetimeMs = 10'000;

  // The time of all processes of the host, in units of a lease.
  static uint32_t now() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<uint32_t>((time.tv_sec * 1000 + time.tv_nsec / 1'000'000) >> 4) & kTimeMask;
  }

  explicit SharedLease(std::atomic<uint32_t>& word) : word_(word) {}

  bool exists(uint32_t now) const { return counts(word_.load(std::memory_order_seq_cst), now); }

  // Returns false if there are too many.
  bool take(uint32_t now) {
    uint32_t word = word_.load(std::memory_order_relaxed);
    do {
      if (counts(word, now) && (word & kCountMask) == kCountMask) return false;
    } while (!word_.compare_exchange_weak(word, made(counts(word, now) ? (word & kCountMask) + 1 : 1, now),
                                          std::memory_order_seq_cst));
    return true;
  }

  // Returns false if it has ended.
  bool renew(uint32_t now) {
    uint32_t word = word_.load(std::memory_order_relaxed);
    do {
      if (!counts(word, now)) return false;
    } while (!word_.compare_exchange_weak(word, made(word & kCountMask, now), std::memory_order_seq_cst));
    return true;
  }

  void release() {
    uint32_t word = word_.load(std::memory_order_relaxed), after = 0;
    do {
      if ((word & kCountMask) == 0) return;
      after = (word & kCountMask) == 1 ? 0 : word - 1;
    } while (!word_.compare_exchange_weak(word, after, std::memory_order_seq_cst));
  }

 private:
  static constexpr uint32_t kCountMask = 0xFF, kTimeMask = 0xFFFFFF;

  static uint32_t made(uint32_t count, uint32_t now) { return now << 8 | count; }

  static bool counts(uint32_t word, uint32_t now) {
    return (word & kCountMask) != 0 && ((now - (word >> 8)) & kTimeMask) < kLifetimeMs >> 4;
  }

  std::atomic<uint32_t>& word_;
};

}  // namespace kvservice
