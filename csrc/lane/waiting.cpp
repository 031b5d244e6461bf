#include "lane/waiting.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>

#include "errors.h"

namespace kvservice {
namespace {

bool may_use_one_processor_only() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) == 1;
}

// Not a private futex: the two processes map the word at different addresses.
long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

}  // namespace

std::chrono::nanoseconds spin_time(double spin_us) {
  require(std::isfinite(spin_us) && spin_us >= 0.0 && spin_us < 1e6, "spin_us",
          "must be at least 0 and below a million");
  if (may_use_one_processor_only()) return std::chrono::nanoseconds(0);
  return std::chrono::nanoseconds(static_cast<int64_t>(spin_us * 1e3));
}

bool sleep_on(std::atomic<uint32_t>& bell, uint32_t seen, std::chrono::nanoseconds time) {
  const auto bounded = std::clamp<std::chrono::nanoseconds>(time, std::chrono::nanoseconds(0), kLongestSleep);
  const timespec timeout = {0, static_cast<long>(bounded.count())};
  return futex(bell, FUTEX_WAIT, seen, &timeout) == 0 || errno != EINTR;
}

void wake_if_asleep(const std::atomic<uint32_t>& sleeps, std::atomic<uint32_t>& bell) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (sleeps.load(std::memory_order_relaxed) != 0) ring(bell);
}

void ring(std::atomic<uint32_t>& bell) {
  bell.fetch_add(1, std::memory_order_release);
  futex(bell, FUTEX_WAKE, INT_MAX, nullptr);
}

}  // namespace kvservice
