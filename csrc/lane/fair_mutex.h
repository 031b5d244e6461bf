// A fair lock: it is granted in the order of the requests.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>

#include "lane/waiting.h"

namespace kvservice {

class FairMutex {
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
    // The owner often works for less time than a sleep and a wake take.
    spin_until(kSpin, [&] { return me.granted.load(std::memory_order_acquire); });
    std::unique_lock<std::mutex> guard(mutex_);  // also after spinning: unlock() may still be using `me`
    me.wake.wait(guard, [&] { return me.granted.load(std::memory_order_acquire); });
  }

  // Passes the lock to the longest waiter. It stays taken, so that no other thread gets in between.
  void unlock() {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (waiters_.empty()) {
      taken_ = false;
      return;
    }
    Waiter* next = waiters_.front();
    waiters_.pop_front();
    next->granted.store(true, std::memory_order_release);
    next->wake.notify_one();
  }

 private:
  static constexpr auto kSpin = std::chrono::microseconds(10);
  struct Waiter {
    std::condition_variable wake;
    std::atomic<bool> granted{false};
  };

  std::mutex mutex_;
  bool taken_ = false;
  std::deque<Waiter*> waiters_;
};

}  // namespace kvservice
