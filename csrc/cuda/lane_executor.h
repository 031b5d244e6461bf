// Executes the calls of lanes on a CUDA device. Calls are launched in turns on one stream. Each lane's own thread waits
// for its calls.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/attention.h"
#include "cuda/memory.h"
#include "kv_slots.h"
#include "lane/executor.h"
#include "lane/fair_mutex.h"

namespace kvservice {

// Common to all calls. The stream and the memory behind the pointers outlive the executor.
struct CudaLaneConfig {
  int device = 0;
  cudaStream_t stream = nullptr;
  PoolView pool;
  DType dtype = DType::kFloat32;  // of the tensors
  const float* scales = nullptr;  // on the device, [2 (K, V), num_layers, num_kv_heads], or null
  bool batch_invariant = false;
  int64_t workspace_bytes = 0;    // initial size; it grows
  std::chrono::nanoseconds spin;  // how long a call polls for its completion
};

// Regions are device memory or pinned host memory. Kernels access pinned memory in place if that is not slower than a
// copy. The `device` tables of a step are on the device; the copies that fill them are launched on the stream before
// the step is published.
class CudaLaneExecutor : public LaneExecutor {
 public:
  // Throws ArgumentError, CudaError.
  explicit CudaLaneExecutor(const CudaLaneConfig& config);
  ~CudaLaneExecutor() override;
  CudaLaneExecutor(const CudaLaneExecutor&) = delete;
  CudaLaneExecutor& operator=(const CudaLaneExecutor&) = delete;

  const LaneShape& shape() const override { return shape_; }
  // Also throws LaneError RESOURCE_EXHAUSTED if the device has no memory left for a larger workspace.
  void attend(const LaneCall& call) override;
  void copy_in(void* to, const char* from, int64_t num_bytes) override;

 private:
  // Which tensors are in host memory, or which of those are staged.
  struct Tensors {
    bool query = false;
    bool output = false;
    bool lse = false;
  };

  KvSlotsParams slots_of(const LaneCall& call) const;
  AttentionParams attention_of(const LaneCall& call) const;
  int64_t query_bytes(const LaneCall& call) const;
  int64_t lse_bytes(const LaneCall& call) const;
  Tensors check(const LaneCall& call) const;
  Tensors staged_of(const LaneCall& call, const AttentionParams& attention, const Tensors& on_host) const;
  CudaLaunch launch_config() const;
  void reserve(const LaneCall& call, const AttentionParams& attention, const Tensors& staged);
  void stage_inputs(const LaneCall& call, AttentionParams& attention, const Tensors& staged);
  void copy_back(const LaneCall& call, const Tensors& staged);
  char* staging(int64_t begin) const { return static_cast<char*>(staging_->data()) + begin; }
  void copy(void* to, const void* from, int64_t bytes) const;
  cudaEvent_t launch(const LaneCall& call, const Tensors& on_host);
  cudaEvent_t acquire_event();
  void release_event(cudaEvent_t event);
  void wait(cudaEvent_t completion) const;

  const CudaLaneConfig config_;
  const LaneShape shape_;
  FairMutex launch_mutex_;  // guards the two members below, and launches
  std::unique_ptr<DeviceMemory> workspace_;
  std::unique_ptr<DeviceMemory> staging_;  // slopes, query, output, lse of the call that the stream executes
  std::mutex mutex_;                       // guards events_
  std::vector<cudaEvent_t> events_;        // free events
};

}  // namespace kvservice
