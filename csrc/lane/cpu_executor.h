#pragma once

#include "lane/executor.h"
#include "lane/turns.h"

namespace kvservice {

// On a pool in host memory, with the kernels' threads. `batch_invariant`: sequence by sequence, since how a call's work
// is split among threads follows from all of it, and sums from how they are split.
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
  Turns turns_;
};

}  // namespace kvservice
