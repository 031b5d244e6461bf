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

  explicit SharedLease(std::atomic<uint32_t>& word) : word_(word) {}

  bool exists() const { return counts(word_.load(std::memory_order_seq_cst)); }

  // Returns the word before, for undo(); kFull if there are too many.
  uint32_t take() {
    uint32_t word = word_.load(std::memory_order_relaxed);
    do {
      if (counts(word) && (word & kCountMask) == kCountMask) return kFull;
    } while (!word_.compare_exchange_weak(word, taken(word), std::memory_order_seq_cst));
    return word;
  }

  // Takes a lease back that was taken just now. Nothing has changed then, unless others have taken or ended theirs
  // meanwhile: what looked like a block's record may have become the bytes of another block.
  void undo(uint32_t before) {
    const uint32_t now = word_.load(std::memory_order_relaxed);
    uint32_t own = now;
    if ((now & kCountMask) == (taken(before) & kCountMask) &&
        word_.compare_exchange_strong(own, before, std::memory_order_seq_cst)) {
      return;
    }
    release();
  }

  // Returns false if it has ended.
  bool renew() {
    uint32_t word = word_.load(std::memory_order_relaxed);
    do {
      if (!counts(word)) return false;
    } while (!word_.compare_exchange_weak(word, made(word & kCountMask, latest(word)), std::memory_order_seq_cst));
    return true;
  }

  void release() {
    uint32_t word = word_.load(std::memory_order_relaxed), after = 0;
    do {
      if ((word & kCountMask) == 0) return;
      after = (word & kCountMask) == 1 ? 0 : word - 1;
    } while (!word_.compare_exchange_weak(word, after, std::memory_order_seq_cst));
  }

  static constexpr uint32_t kFull = 0xFF;  // no word of leases

 private:
  static constexpr uint32_t kCountMask = 0xFF, kTimeMask = 0xFFFFFF;
  // Times may be later than a clock that was read before: by up to a second.
  static constexpr uint32_t kAhead = 1000 >> 4;

  // The time of all processes of the host. It is read after the word that it is compared with.
  static uint32_t now() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<uint32_t>((time.tv_sec * 1000 + time.tv_nsec / 1'000'000) >> 4) & kTimeMask;
  }

  static uint32_t made(uint32_t count, uint32_t time) { return time << 8 | count; }

  static bool counts(uint32_t word) {
    return (word & kCountMask) != 0 && ((now() - (word >> 8) + kAhead) & kTimeMask) < (kLifetimeMs >> 4) + kAhead;
  }

  static uint32_t taken(uint32_t word) {
    return counts(word) ? made((word & kCountMask) + 1, latest(word)) : made(1, now());
  }

  // Now, or the time of leases that count, if that is later.
  static uint32_t latest(uint32_t word) {
    const uint32_t time = now(), before = word >> 8;
    return ((before - time) & kTimeMask) <= kAhead ? before : time;
  }

  std::atomic<uint32_t>& word_;
};

}  // namespace kvservice
