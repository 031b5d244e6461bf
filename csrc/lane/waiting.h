// How the two sides of a lane wait for each other: they spin for a while, then sleep on a futex.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace kvservice {

// The upper bound of every sleep, because the other side may tamper with the words that wake.
constexpr auto kLongestSleep = std::chrono::milliseconds(100);

// Returns `spin_us`, or 0 if this process is limited to one processor, where spinning keeps the other side from
// running. Throws ArgumentError unless it is finite, not negative and below a second.
std::chrono::nanoseconds spin_time(double spin_us);

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// Returns true as soon as `done()` holds, false if it does not hold within `time`.
template <class Done>
bool spin_until(std::chrono::nanoseconds time, const Done& done) {
  if (done()) return true;
  if (time.count() == 0) return false;
  const auto deadline = std::chrono::steady_clock::now() + time;
  do {
    for (int i = 0; i < 16; ++i) {
      relax();
      if (done()) return true;
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

// Waits for the bell to ring, for at most `time` and kLongestSleep; returns at once if `done()` holds. The protocol is
// that of ring.h. Returns false if a signal ended the wait.
bool sleep_on(std::atomic<uint32_t>& bell, uint32_t seen, std::chrono::nanoseconds time);

template <class Done>
bool sleep_until(std::atomic<uint32_t>& sleeps, std::atomic<uint32_t>& bell, std::chrono::nanoseconds time,
                 const Done& done) {
  sleeps.store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const uint32_t seen = bell.load(std::memory_order_acquire);
  const bool slept = done() || sleep_on(bell, seen, time);
  sleeps.store(0, std::memory_order_relaxed);
  return slept;
}

// Called after a store that the other side may wait for.
void wake_if_asleep(const std::atomic<uint32_t>& sleeps, std::atomic<uint32_t>& bell);

void ring(std::atomic<uint32_t>& bell);

}  // namespace kvservice
