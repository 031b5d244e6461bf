// How the two sides of a lane wait for each other: by looking again for a while, then asleep on a futex.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace kvservice {

// No sleep is longer, whatever is asked for: the other side may tamper with the words that wake.
constexpr auto kLongestSleep = std::chrono::milliseconds(100);

// `spin_us`, or 0 where this process may use one processor only: there, looking keeps the other side from working.
// Throws ArgumentError unless it is finite, not negative and below a second.
std::chrono::nanoseconds spin_time(double spin_us);

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// True as soon as `done()` holds, false when it did not within `time`.
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

// Waits for a ring of the bell, for at most `time` and kLongestSleep; not at all if `done()` holds by now. The
// handshake is that of ring.h. Returns false when a signal ended it.
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

// After a store that the other side may be waiting for.
void wake_if_asleep(const std::atomic<uint32_t>& sleeps, std::atomic<uint32_t>& bell);

void ring(std::atomic<uint32_t>& bell);

}  // namespace kvservice
