// The daemon's side of a lane: one thread that takes entries, has them computed and answers.
#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lane/check.h"
#include "lane/ring.h"
#include "lane/stats.h"

namespace kvservice {

class LaneServer {
 public:
  // Formats the memory (64-byte aligned, kLaneBytes), which stays until close() has returned true. Throws
  // ArgumentError. `on_fault` is called at most once, from the lane's thread and as the last thing that it does: the
  // executor threw what is no ArgumentError. `event`: as of LaneCall, for entries with kLaneEvent; without it they are
  // refused.
  LaneServer(void* memory, int64_t num_bytes, LaneSession& session, LaneExecutor& executor, double spin_us,
             std::function<void(const std::string&)> on_fault, void* event = nullptr);
  ~LaneServer();
  LaneServer(const LaneServer&) = delete;
  LaneServer& operator=(const LaneServer&) = delete;

  // Ends the lane after the calls that run, and waits for them. A second call does nothing, but waits as well. True:
  // the thread is gone, and the memory may go. False, without waiting: it is the thread itself that calls, in
  // `on_fault`.
  bool close();

  // No more entries are taken: it was closed, or has ended by itself.
  bool closed() const { return closed_.load(std::memory_order_acquire); }

  const LaneStats& stats() const { return stats_; }

 private:
  void serve();
  bool work_or_stop();
  bool next_entry();
  LaneCompletion answer(const LaneEntry& entry);
  void compute(const LaneEntry& entry);
  void settle();
  void fail();
  void finish(const LaneCompletion& completion);
  void end(LaneState state);

  LaneMemory& memory_;
  LaneSession& session_;
  LaneExecutor& executor_;
  const std::chrono::nanoseconds spin_;
  std::function<void(const std::string&)> on_fault_;
  void* const event_;
  LaneStats stats_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> closed_{false};
  std::mutex joining_;

  // The thread's own. What it once knew of the ring it never learns from the ring again.
  uint64_t served_ = 0;    // entries taken and answered
  uint64_t consumed_ = 0;  // completions that the client had read when somebody last looked
  uint32_t unwaited_ = 0;  // calls that were answered and may not be done
  LaneState end_ = kLaneClosed;
  std::string fault_;
  std::vector<float> slopes_;

  std::thread thread_;
};

}  // namespace kvservice
