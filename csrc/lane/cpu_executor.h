#pragma once

#include "lane/executor.h"
#include "lane/fair_mutex.h"

namespace kvservice {

// Executes calls on a pool in host memory, on the threads of the kernels. With `batch_invariant`, it computes one
// sequence at a time: the split of a call over threads depends on the whole batch, and the order of the sums depends on
// the split.
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
  FairMutex mutex_;
};

}  // namespace kvservice
