#pragma once

#include <array>

#include "lane/executor.h"
#include "lane/fair_mutex.h"

namespace kvservice {

// Work on a pool in host memory is in a size class by the bytes that it reads and writes, counted roughly: class i has
// at most kSizeClasses[i] bytes, and one more class has no bound. Work runs beside work of other classes, so that small
// work, which is done in milliseconds, never waits for work of seconds.
constexpr std::array<int64_t, 2> kSizeClasses = {int64_t{64} << 20, int64_t{4} << 30};

// Executes calls on a pool in host memory, on the threads of the kernels. With `batch_invariant`, it computes one
// sequence at a time: the split of a call over threads depends on the whole batch, and the order of the sums depends on
// the split. Calls of one size class run in turns.
class CpuLaneExecutor : public LaneExecutor {
 public:
  CpuLaneExecutor(const PoolView& pool, bool batch_invariant);
  const LaneShape& shape() const override { return shape_; }
  void attend(const LaneCall& call) override;

 private:
  void attend_one_by_one(const AttentionParams& whole) const;

  const PoolView pool_;
  const LaneShape shape_;
  const bool batch_invariant_;
  std::array<FairMutex, kSizeClasses.size() + 1> turns_;
};

}  // namespace kvservice
