// A lock that is given in the order in which it was asked for.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>

#include "lane/waiting.h"

namespace kvservice {

class Turns {
 public:
  void lock() {
    Waiter me;
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      if (!taken_) {
        taken_ = true;
        return;
      }
      waiters_.push_back(&me);
    }
    // Whoever has the turn is at work, often for less time than a sleep and a wake take.
    spin_until(kSpin, [&] { return me.turn.load(std::memory_order_acquire); });
    std::unique_lock<std::mutex> guard(mutex_);  // also where it came while spinning: the giver still holds `me`
    me.wake.wait(guard, [&] { return me.turn.load(std::memory_order_acquire); });
  }

  // To the one who has waited longest: it is taken all the while, so that nobody comes in between.
  void unlock() {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (waiters_.empty()) {
      taken_ = false;
      return;
    }
    Waiter* next = waiters_.front();
    waiters_.pop_front();
    next->turn.store(true, std::memory_order_release);
    next->wake.notify_one();
  }

 private:
  static constexpr auto kSpin = std::chrono::microseconds(10);
  struct Waiter {
    std::condition_variable wake;
    std::atomic<bool> turn{false};
  };

  std::mutex mutex_;
  bool taken_ = false;
  std::deque<Waiter*> waiters_;
};

}  // namespace kvservice
