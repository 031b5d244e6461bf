// The calls of lanes, on a CUDA device: launched in turns on one stream, and waited for by each lane's own thread, or
// by nobody here. The event of a LaneCall is a cudaEvent_t of the device.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/attention.h"
#include "cuda/memory.h"
#include "kv_slots.h"
#include "lane/executor.h"
#include "lane/turns.h"

namespace kvservice {

// What all calls have in common. The stream and what the pointers name outlive the executor.
struct CudaLaneConfig {
  int device = 0;
  cudaStream_t stream = nullptr;
  PoolView pool;
  DType dtype = DType::kFloat32;  // of the tensors
  const float* scales = nullptr;  // on the device, [2, num_layers, num_kv_heads], of keys, then of values; or null
  bool batch_invariant = false;
  int64_t workspace_bytes = 0;    // to begin with; it grows
  std::chrono::nanoseconds spin;  // for so long a call is waited for awake
};

// Regions are memory of the device, or page-locked host memory, which kernels read and write where it is if that is no
// slower than a copy. A step's `device` tables are there, and what brings them is launched on the stream before the
// step is published.
class CudaLaneExecutor : public LaneExecutor {
 public:
  // Throws ArgumentError, CudaError.
  explicit CudaLaneExecutor(const CudaLaneConfig& config);
  ~CudaLaneExecutor() override;
  CudaLaneExecutor(const CudaLaneExecutor&) = delete;
  CudaLaneExecutor& operator=(const CudaLaneExecutor&) = delete;

  const LaneShape& shape() const override { return shape_; }
  // Throws LaneError RESOURCE_EXHAUSTED too, where the device has no memory left for a larger workspace.
  void attend(const LaneCall& call) override;
  void finish() override;
  void copy_in(void* to, const char* from, int64_t num_bytes) override;

 private:
  // Which tensors are in host memory; or, of those, which are to be copied.
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
  CudaLaunch how_to_launch() const;
  void reserve(const LaneCall& call, const AttentionParams& attention, const Tensors& staged);
  void bring(const LaneCall& call, AttentionParams& attention, const Tensors& staged);
  void take_back(const LaneCall& call, const Tensors& staged);
  char* staging(int64_t begin) const { return static_cast<char*>(staging_->data()) + begin; }
  void copy(void* to, const void* from, int64_t bytes) const;
  cudaEvent_t launch(const LaneCall& call, const Tensors& on_host);
  cudaEvent_t take_event();
  void give_back(cudaEvent_t event);
  void record(cudaEvent_t event) const;
  void wait(cudaEvent_t landed) const;

  const CudaLaneConfig config_;
  const LaneShape shape_;
  Turns turns_;  // over what follows, and over launching
  std::unique_ptr<DeviceMemory> workspace_;
  std::unique_ptr<DeviceMemory> staging_;  // slopes, query, output, lse: of the call that the stream is at
  std::mutex mutex_;                       // over what follows
  std::vector<cudaEvent_t> events_;        // that nobody uses
};

}  // namespace kvservice
