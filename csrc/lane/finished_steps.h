// The steps whose last layer was written through a lane. Lane threads add them, the event loop takes them.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <mutex>
#include <vector>

namespace kvservice {

struct FinishedStep {
  int64_t session = 0;  // the number of its LaneSession
  int64_t step_id = 0;
};

// A queue for the lanes of all sessions, with an eventfd for the event loop.
//
// A lane adds a step before it completes the call that wrote the last layer, and signals the eventfd after that. So
// whoever has seen the completion finds the step in take(), and the signal does not delay the completion.
class FinishedSteps {
 public:
  FinishedSteps();  // throws std::system_error if there are no file descriptors left
  ~FinishedSteps();
  FinishedSteps(const FinishedSteps&) = delete;
  FinishedSteps& operator=(const FinishedSteps&) = delete;

  // Becomes readable with signal(), and is not readable after take().
  int descriptor() const { return descriptor_; }

  // Moves the element of `step` to the queue. Does not allocate, so that a destructor may call it.
  void add(std::list<FinishedStep>& step) noexcept;

  // Makes the descriptor readable if there are steps in the queue.
  void signal();

  // Returns the steps added since the last call, each once. Cheap if there are none.
  std::vector<FinishedStep> take();

 private:
  const int descriptor_;
  std::atomic<bool> any_{false};
  std::mutex mutex_;
  bool signalled_ = false;  // whether the descriptor is readable
  std::list<FinishedStep> steps_;
};

}  // namespace kvservice
