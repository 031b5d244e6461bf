// The client side of a lane. Not thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "lane/ring.h"

namespace kvservice {

// The lane is closed; the message gives the reason.
class LaneClosedError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// kLaneCapacity calls are in flight or unread.
class LaneFullError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

class LaneClient {
 public:
  // `memory` was formatted by a LaneServer and outlives the object. Throws ArgumentError.
  LaneClient(void* memory, int64_t num_bytes, double spin_us);

  // Writes the entry and returns its number. Throws LaneFullError, LaneClosedError.
  uint64_t submit(LaneEntry entry);

  // Returns the completion of the entry, or nothing after a timeout or a signal. Sleeps at most once, for at most
  // kLongestSleep. Drops the completions of earlier entries. Throws LaneClosedError, and ArgumentError (number) if the
  // entry was never submitted or its completion was already read or dropped.
  std::optional<LaneCompletion> wait(uint64_t number, std::chrono::nanoseconds time);

 private:
  uint64_t completed();
  LaneCompletion take();

  LaneMemory& memory_;
  const std::chrono::nanoseconds spin_;
  uint64_t submitted_ = 0;
  uint64_t consumed_ = 0;
};

}  // namespace kvservice
