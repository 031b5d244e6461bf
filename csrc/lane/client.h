// The client's side of a lane. One thread at a time.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "lane/ring.h"

namespace kvservice {

// The lane serves no more; the text says why.
class LaneClosedError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// kLaneCapacity calls are under way or unread.
class LaneFullError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

class LaneClient {
 public:
  // Of memory that a LaneServer has formatted, and that stays. Throws ArgumentError.
  LaneClient(void* memory, int64_t num_bytes, double spin_us);

  // Writes the entry, with its number, which is returned. Throws LaneFullError, LaneClosedError.
  uint64_t submit(LaneEntry entry);

  // The completion of that entry, or nothing when it was not there in time or a signal came; sleeps once, for at most
  // kLongestSleep. Completions of earlier entries are dropped: nobody waits for them any more. Throws LaneClosedError,
  // and ArgumentError (number) for an entry that was never submitted or whose completion is gone.
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
