// The daemon side of a lane: one thread that takes entries, executes them and writes completions.
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <mutex>
#include <string>
#include <vector>

#include "lane/check.h"
#include "lane/ring.h"
#include "lane/stats.h"

namespace kvservice {

class LaneServer {
 public:
  // Formats the memory (64-byte aligned, kLaneBytes), which must outlive the first close(). Throws ArgumentError.
  // `on_fault` is called at most once, from the lane's thread after the end of the lane, if the executor throws
  // anything but ArgumentError. It may close or destroy this object.
  LaneServer(void* memory, int64_t num_bytes, LaneSession& session, LaneExecutor& executor, double spin_us,
             std::function<void(const std::string&)> on_fault);
  ~LaneServer();
  LaneServer(const LaneServer&) = delete;
  LaneServer& operator=(const LaneServer&) = delete;

  // Ends the lane after the running calls and waits for them, but not for `on_fault`. Then the lane's thread uses none
  // of the constructor's arguments any more. Further calls only wait.
  void close();

  // Whether the lane takes no more entries: close() was called, or the lane has ended by itself.
  bool closed() const { return closed_.load(std::memory_order_acquire); }

  const LaneStats& stats() const { return stats_; }

 private:
  void serve(std::promise<void> ended);
  bool wait_for_entry();
  bool next_entry();
  LaneCompletion answer(const LaneEntry& entry);
  void compute(const LaneEntry& entry);
  void fail();
  void finish(const LaneCompletion& completion);
  void end(LaneState state);

  LaneMemory& memory_;
  LaneSession& session_;
  LaneExecutor& executor_;
  const std::chrono::nanoseconds spin_;
  std::function<void(const std::string&)> on_fault_;
  LaneStats stats_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> closed_{false};
  std::mutex closing_;

  // Used by the thread only. It never rereads its own indices from the ring.
  uint64_t served_ = 0;    // entries executed
  uint64_t consumed_ = 0;  // completions that the client had read at the last check
  LaneState end_ = kLaneClosed;
  std::string fault_;
  std::vector<float> slopes_;

  std::shared_future<void> ended_;
};

}  // namespace kvservice
