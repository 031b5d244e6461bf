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

  // Now, in the units of the word, of all processes of the host. A call for many blocks reads it once.
  static uint32_t clock() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<uint32_t>((time.tv_sec * 1000 + time.tv_nsec / 1'000'000) >> 4) & kTimeMask;
  }

  // Whether so much time has passed since `before` that leases taken or renewed with it may have ended too early.
  static bool is_long_ago(uint32_t before) { return ((clock() - before) & kTimeMask) > kAhead; }

  bool exists() const {
    const uint32_t word = word_.load(std::memory_order_seq_cst);
    return counts(word, clock());
  }

  // `now` is what clock() has returned. Returns the word before, for undo(); kFull if there are too many.
  uint32_t take(uint32_t now) {
    uint32_t word = word_.load(std::memory_order_relaxed);
    do {
      if (counts(word, now) && (word & kCountMask) == kCountMask) return kFull;
    } while (!word_.compare_exchange_weak(word, taken(word, now), std::memory_order_seq_cst));
    return word;
  }

  // Takes a lease back that was taken just now. Nothing has changed then, unless others have taken or ended theirs
  // meanwhile: what looked like a block's record may have become the bytes of another block.
  void undo(uint32_t before, uint32_t now) {
    uint32_t own = word_.load(std::memory_order_relaxed);
    if ((own & kCountMask) == (taken(before, now) & kCountMask) &&
        word_.compare_exchange_strong(own, before, std::memory_order_seq_cst)) {
      return;
    }
    release();
  }

  // Returns false if it has ended.
  bool renew(uint32_t now) {
    uint32_t word = word_.load(std::memory_order_relaxed);
    do {
      if (!counts(word, now)) return false;
    } while (!word_.compare_exchange_weak(word, made(word & kCountMask, latest(word, now)), std::memory_order_seq_cst));
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

  static uint32_t made(uint32_t count, uint32_t time) { return time << 8 | count; }

  static bool counts(uint32_t word, uint32_t now) {
    return (word & kCountMask) != 0 && ((now - (word >> 8) + kAhead) & kTimeMask) < (kLifetimeMs >> 4) + kAhead;
  }

  static uint32_t taken(uint32_t word, uint32_t now) {
    return counts(word, now) ? made((word & kCountMask) + 1, latest(word, now)) : made(1, now);
  }

  // Now, or the time of leases that count, if that is later.
  static uint32_t latest(uint32_t word, uint32_t now) {
    const uint32_t before = word >> 8;
    return ((before - now) & kTimeMask) <= kAhead ? before : now;
  }

  std::atomic<uint32_t>& word_;
};

}  // namespace kvservice
