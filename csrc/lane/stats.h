// Counts the calls of a lane and their durations.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

namespace kvservice {

// Upper bounds in seconds, equal to those of kvservice/telemetry/tables.py.
constexpr std::array<double, 17> kLaneBuckets = {50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3,
                                                 50e-3, 0.1,    0.2,    0.5,    1.0,  2.0,  5.0,  10.0};

// Written by one thread, read by any thread.
class LaneStats {
 public:
  void count(std::chrono::steady_clock::duration duration, bool ok) {
    const double seconds = std::chrono::duration<double>(duration).count();
    size_t bucket = 0;
    while (bucket < kLaneBuckets.size() && seconds > kLaneBuckets[bucket]) ++bucket;
    add(buckets_[bucket], int64_t{1});
    add(seconds_, seconds);
    add(errors_, int64_t{ok ? 0 : 1});
    add(calls_, int64_t{1});
  }

  int64_t calls() const { return calls_.load(std::memory_order_relaxed); }
  int64_t errors() const { return errors_.load(std::memory_order_relaxed); }
  double seconds() const { return seconds_.load(std::memory_order_relaxed); }

  // Returns the calls per bucket, not cumulative; the last bucket has no upper bound.
  std::vector<int64_t> buckets() const {
    std::vector<int64_t> counts;
    counts.reserve(buckets_.size());
    for (const auto& count : buckets_) counts.push_back(count.load(std::memory_order_relaxed));
    return counts;
  }

 private:
  template <class T>
  static void add(std::atomic<T>& sum, T value) {
    sum.store(sum.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
  }

  std::atomic<int64_t> calls_{0}, errors_{0};
  std::atomic<double> seconds_{0.0};
  std::array<std::atomic<int64_t>, kLaneBuckets.size() + 1> buckets_{};
};

}  // namespace kvservice
