#include "cuda/lane_executor.h"

#include <algorithm>

#include "cuda/kv_slots.h"
#include "errors.h"
#include "lane/error.h"

namespace kvservice {
namespace {

// Every thread block of a decode reads its query before it starts. If the query is in host memory, these reads cross
// the host link a few bytes at a time. Above this size there are enough thread blocks, which start one after another.
// Below it the latency is most of the call, so the query is copied to the device in the launch that writes keys and
// values.
constexpr int64_t kStagedQueryBytes = 128 << 10;
constexpr int64_t kSlopesBytes = 4 * 65536;

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Reallocates to at least `bytes` bytes. Does not keep the content.
void grow(std::unique_ptr<DeviceMemory>& memory, int64_t bytes) {
  if (bytes <= memory->bytes()) return;
  try {
    memory = std::make_unique<DeviceMemory>(memory->device(), bytes);  // frees the old memory once the device is idle
  } catch (const CudaError& error) {
    if (error.code() != cudaErrorMemoryAllocation) throw;
    throw LaneError("RESOURCE_EXHAUSTED", "", std::string("the GPU has no memory left for this call: ") + error.what());
  }
}

LaneShape shape_of(const CudaLaneConfig& config) {
  const PoolView& pool = config.pool;
  return {pool.num_layers, pool.num_kv_heads, pool.head_size, pool.block_size, item_size(config.dtype), true};
}

bool is_on_host(LaneMemoryKind kind, const char* field) {
  // Kernels cannot access pageable host memory.
  require(kind != LaneMemoryKind::kHost, field, "is host memory that is not page-locked");
  return kind == LaneMemoryKind::kPinnedHost;
}

}  // namespace

CudaLaneExecutor::CudaLaneExecutor(const CudaLaneConfig& config) : config_(config), shape_(shape_of(config)) {
  require(config.workspace_bytes >= kCounterBytes, "workspace_bytes", "is less than the counters take");
  const DeviceScope scope(config.device);
  staging_ = std::make_unique<DeviceMemory>(config.device, kSlopesBytes + kStagedQueryBytes);
  workspace_ = std::make_unique<DeviceMemory>(config.device, config.workspace_bytes);
  check_cuda(cudaMemsetAsync(workspace_->data(), 0, kCounterBytes, config.stream), "cudaMemsetAsync");
}

CudaLaneExecutor::~CudaLaneExecutor() {
  for (cudaEvent_t event : events_) clear_error(cudaEventDestroy(event));
}

KvSlotsParams CudaLaneExecutor::slots_of(const LaneCall& call) const {
  KvSlotsParams p = kv_slots_params(call, config_.pool, config_.dtype, call.step->device);
  if (config_.scales != nullptr) {
    p.k_scale = config_.scales + call.layer * config_.pool.num_kv_heads;
    p.v_scale = p.k_scale + config_.pool.num_layers * config_.pool.num_kv_heads;
  }
  return p;
}

AttentionParams CudaLaneExecutor::attention_of(const LaneCall& call) const {
  const KvSlotsParams slots = slots_of(call);
  AttentionParams p = attention_params(call, config_.pool, config_.dtype, call.step->device);
  p.k_scale = slots.k_scale;
  p.v_scale = slots.v_scale;
  return p;
}

int64_t CudaLaneExecutor::query_bytes(const LaneCall& call) const {
  return call.step->num_tokens * call.num_heads * shape_.head_size * shape_.item_size;
}

int64_t CudaLaneExecutor::lse_bytes(const LaneCall& call) const { return 4 * call.step->num_tokens * call.num_heads; }

// Checks that the lane cannot make.
CudaLaneExecutor::Tensors CudaLaneExecutor::check(const LaneCall& call) const {
  if (call.step->device.slot_mapping == nullptr) throw std::logic_error("a step was published without device tables");
  is_on_host(call.kinds[1], "key");
  is_on_host(call.kinds[2], "value");
  return {is_on_host(call.kinds[0], "query"), is_on_host(call.kinds[3], "output_place"),
          call.lse != nullptr && is_on_host(call.kinds[4], "lse_place")};
}

// Decode writes its output directly: each thread block writes whole rows when it finishes. The other kernels write two
// or four bytes at a time, in fragment order; over the host link that took 15 times as long as the call itself.
CudaLaneExecutor::Tensors CudaLaneExecutor::staged_of(const LaneCall& call, const AttentionParams& attention,
                                                      const Tensors& on_host) const {
  if (!attention_is_decode(attention, launch_config())) return on_host;
  return {on_host.query && query_bytes(call) <= kStagedQueryBytes, false, false};
}

CudaLaunch CudaLaneExecutor::launch_config() const {
  CudaLaunch how;
  how.stream = config_.stream;
  how.workspace = {workspace_->data(), workspace_->bytes()};
  how.batch_invariant = config_.batch_invariant;
  return how;
}

void CudaLaneExecutor::reserve(const LaneCall& call, const AttentionParams& attention, const Tensors& staged) {
  const int64_t wanted = attention_workspace_bytes(attention, launch_config());
  const int64_t query = staged.query || staged.output ? aligned(query_bytes(call)) : 0;
  grow(staging_, kSlopesBytes + 2 * query + (staged.lse ? lse_bytes(call) : 0));
  if (wanted <= workspace_->bytes()) return;
  grow(workspace_, wanted);
  check_cuda(cudaMemsetAsync(workspace_->data(), 0, kCounterBytes, config_.stream), "cudaMemsetAsync");
}

void CudaLaneExecutor::copy(void* to, const void* from, int64_t bytes) const {
  check_cuda(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, config_.stream),
             "cudaMemcpyAsync");
}

// Writes keys and values into the pool and copies the staged inputs to the device.
void CudaLaneExecutor::stage_inputs(const LaneCall& call, AttentionParams& attention, const Tensors& staged) {
  const int64_t bytes = query_bytes(call), output = kSlopesBytes + aligned(bytes), lse = output + aligned(bytes);
  FusedCopy fused;
  if (call.alibi_slopes != nullptr) {
    attention.alibi_slopes = reinterpret_cast<float*>(staging(0));
    copy(staging(0), call.alibi_slopes, 4 * call.num_heads);
  }
  if (staged.query) {
    attention.query = staging(kSlopesBytes);
    if (bytes <= kFusedCopyBytesMax) {
      fused = {staging(kSlopesBytes), call.query, bytes};
    } else {
      copy(staging(kSlopesBytes), call.query, bytes);
    }
  }
  if (staged.output) attention.out = staging(output);
  if (staged.lse) attention.lse = reinterpret_cast<float*>(staging(lse));
  write_kv_cuda(slots_of(call), fused, config_.stream);
}

void CudaLaneExecutor::copy_back(const LaneCall& call, const Tensors& staged) {
  const int64_t bytes = query_bytes(call), output = kSlopesBytes + aligned(bytes), lse = output + aligned(bytes);
  if (staged.output) copy(call.output, staging(output), bytes);
  if (staged.lse) copy(call.lse, staging(lse), lse_bytes(call));
}

cudaEvent_t CudaLaneExecutor::launch(const LaneCall& call, const Tensors& on_host) {
  AttentionParams attention = attention_of(call);
  const std::lock_guard<FairMutex> lock(launch_mutex_);
  const Tensors staged = staged_of(call, attention, on_host);  // checks the call too; nothing is refused after it
  reserve(call, attention, staged);
  stage_inputs(call, attention, staged);
  attention_cuda(attention, launch_config());
  copy_back(call, staged);
  const cudaEvent_t completion = acquire_event();
  check_cuda(cudaEventRecord(completion, config_.stream), "cudaEventRecord");
  return completion;
}

cudaEvent_t CudaLaneExecutor::acquire_event() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (events_.empty()) {
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync), "cudaEventCreate");
    return event;
  }
  const cudaEvent_t event = events_.back();
  events_.pop_back();
  return event;
}

void CudaLaneExecutor::release_event(cudaEvent_t event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  events_.push_back(event);
}

// Polls first, because waking up takes about 30 us, then blocks, because others may need the processor.
void CudaLaneExecutor::wait(cudaEvent_t completion) const {
  const auto deadline = std::chrono::steady_clock::now() + config_.spin;
  do {
    const cudaError_t code = cudaEventQuery(completion);
    if (code == cudaSuccess) return;
    clear_error(code);
    if (code != cudaErrorNotReady) throw CudaError(code, "cudaEventQuery");
  } while (std::chrono::steady_clock::now() < deadline);
  check_cuda(cudaEventSynchronize(completion), "cudaEventSynchronize");
}

void CudaLaneExecutor::attend(const LaneCall& call) {
  const DeviceScope scope(config_.device);
  const cudaEvent_t completion = launch(call, check(call));
  wait(completion);
  release_event(completion);
}

void CudaLaneExecutor::copy_in(void* to, const char* from, int64_t num_bytes) {
  const DeviceScope scope(config_.device);
  check_cuda(cudaMemcpy(to, from, static_cast<size_t>(num_bytes), cudaMemcpyDefault), "cudaMemcpy");
}

}  // namespace kvservice
