#include "cuda/lane_executor.h"

#include <algorithm>

#include "cuda/kv_slots.h"
#include "errors.h"
#include "lane/error.h"

namespace kvservice {
namespace {

// A decode's query in host memory is read by every thread block that attends with it, bit by bit over the host's link,
// before the block can begin. Larger ones than this have enough thread blocks, which begin one after the other; of
// smaller ones that way is most of the call, and they are brought to the device beside the keys and values.
constexpr int64_t kStagedQueryBytes = 128 << 10;
constexpr int64_t kSlopesBytes = 4 * 65536;

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// At least so many bytes, whose content is not kept.
void grow(std::unique_ptr<DeviceMemory>& memory, int64_t bytes) {
  if (bytes <= memory->bytes()) return;
  try {
    memory = std::make_unique<DeviceMemory>(memory->device(), bytes);  // the old one goes when the device is idle
  } catch (const CudaError& error) {
    if (error.code() != cudaErrorMemoryAllocation) throw;
    throw LaneError("RESOURCE_EXHAUSTED", "", std::string("the GPU has no memory left for this call: ") + error.what());
  }
}

LaneShape shape_of(const CudaLaneConfig& config) {
  return {config.pool.num_layers, config.pool.num_kv_heads, config.pool.head_size, item_size(config.dtype), true};
}

bool is_on_host(LaneMemoryKind kind, const char* field) {
  // Which a kernel cannot reach.
  require(kind != LaneMemoryKind::kHost, field, "is host memory that is not page-locked");
  return kind == LaneMemoryKind::kPageLockedHost;
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
  for (cudaEvent_t event : events_) forget_error(cudaEventDestroy(event));
}

KvSlotsParams CudaLaneExecutor::slots_of(const LaneCall& call) const {
  KvSlotsParams p;
  p.pool = config_.pool;
  p.dtype = config_.dtype;
  p.layer = call.layer;
  p.num_tokens = call.step->num_tokens;
  p.slots = call.step->device.slot_mapping;
  p.key = call.key;
  p.value = call.value;
  if (config_.scales != nullptr) {
    p.k_scale = config_.scales + call.layer * config_.pool.num_kv_heads;
    p.v_scale = p.k_scale + config_.pool.num_layers * config_.pool.num_kv_heads;
  }
  return p;
}

AttentionParams CudaLaneExecutor::attention_of(const LaneCall& call) const {
  const LaneStep& step = *call.step;
  const KvSlotsParams slots = slots_of(call);
  AttentionParams p;
  p.pool = config_.pool;
  p.dtype = config_.dtype;
  p.layer = call.layer;
  p.num_tokens = step.num_tokens;
  p.num_seqs = step.num_seqs;
  p.num_heads = call.num_heads;
  p.max_blocks = step.max_blocks;
  p.max_query_len = step.device.max_query_len;
  p.num_common_blocks = step.device.num_common_blocks;
  p.query = call.query;
  p.query_lens = step.device.query_lens;
  p.block_tables = step.device.block_tables;
  p.context_lens = step.device.context_lens;
  p.alibi_slopes = call.alibi_slopes;
  p.k_scale = slots.k_scale;
  p.v_scale = slots.v_scale;
  p.sparse = call.sparse;
  p.scale = call.scale;
  p.soft_cap = call.soft_cap;
  p.sliding_window = call.sliding_window;
  p.out = call.output;
  p.lse = call.lse;
  return p;
}

int64_t CudaLaneExecutor::query_bytes(const LaneCall& call) const {
  return call.step->num_tokens * call.num_heads * shape_.head_size * shape_.item_size;
}

int64_t CudaLaneExecutor::lse_bytes(const LaneCall& call) const { return 4 * call.step->num_tokens * call.num_heads; }

// What a lane does not know of.
CudaLaneExecutor::Tensors CudaLaneExecutor::check(const LaneCall& call) const {
  if (call.step->device.slot_mapping == nullptr) throw std::logic_error("a step was published without device tables");
  require(!call.sparse.on() || call.sparse.block_size % config_.pool.block_size == 0, "options.block_sparse.block_size",
          "is not a multiple of the pool's");
  is_on_host(call.kinds[1], "key");
  is_on_host(call.kinds[2], "value");
  return {is_on_host(call.kinds[0], "query"), is_on_host(call.kinds[3], "output_place"),
          call.lse != nullptr && is_on_host(call.kinds[4], "lse_place")};
}

// A decode writes its output straight: each thread block when it is done, in whole rows. The other kernels write two or
// four bytes at a time, in the order of their fragments; over the host's link that took 15 times as long as the call.
CudaLaneExecutor::Tensors CudaLaneExecutor::staged_of(const LaneCall& call, const AttentionParams& attention,
                                                      const Tensors& on_host) const {
  if (!attention_is_decode(attention, how_to_launch())) return on_host;
  return {on_host.query && query_bytes(call) <= kStagedQueryBytes, false, false};
}

CudaLaunch CudaLaneExecutor::how_to_launch() const {
  CudaLaunch how;
  how.stream = config_.stream;
  how.workspace = {workspace_->data(), workspace_->bytes()};
  how.batch_invariant = config_.batch_invariant;
  return how;
}

void CudaLaneExecutor::reserve(const LaneCall& call, const AttentionParams& attention, const Tensors& staged) {
  const int64_t wanted = attention_workspace_bytes(attention, how_to_launch());
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

// Keys and values into the pool, and what is staged to the device.
void CudaLaneExecutor::bring(const LaneCall& call, AttentionParams& attention, const Tensors& staged) {
  const int64_t bytes = query_bytes(call), output = kSlopesBytes + aligned(bytes), lse = output + aligned(bytes);
  CopyBeside beside;
  if (call.alibi_slopes != nullptr) {
    attention.alibi_slopes = reinterpret_cast<float*>(staging(0));
    copy(staging(0), call.alibi_slopes, 4 * call.num_heads);
  }
  if (staged.query) {
    attention.query = staging(kSlopesBytes);
    if (bytes <= kMostBytesBeside) {
      beside = {staging(kSlopesBytes), call.query, bytes};
    } else {
      copy(staging(kSlopesBytes), call.query, bytes);
    }
  }
  if (staged.output) attention.out = staging(output);
  if (staged.lse) attention.lse = reinterpret_cast<float*>(staging(lse));
  write_kv_cuda(slots_of(call), beside, config_.stream);
}

void CudaLaneExecutor::take_back(const LaneCall& call, const Tensors& staged) {
  const int64_t bytes = query_bytes(call), output = kSlopesBytes + aligned(bytes), lse = output + aligned(bytes);
  if (staged.output) copy(call.output, staging(output), bytes);
  if (staged.lse) copy(call.lse, staging(lse), lse_bytes(call));
}

cudaEvent_t CudaLaneExecutor::launch(const LaneCall& call, const Tensors& on_host) {
  AttentionParams attention = attention_of(call);
  const std::lock_guard<Turns> turn(turns_);
  const Tensors staged = staged_of(call, attention, on_host);  // which checks, too: after it nothing is refused
  reserve(call, attention, staged);
  bring(call, attention, staged);
  attention_cuda(attention, how_to_launch());
  take_back(call, staged);
  const cudaEvent_t landed = call.event != nullptr ? static_cast<cudaEvent_t>(call.event) : take_event();
  record(landed);
  return landed;
}

void CudaLaneExecutor::record(cudaEvent_t event) const {
  check_cuda(cudaEventRecord(event, config_.stream), "cudaEventRecord");
}

cudaEvent_t CudaLaneExecutor::take_event() {
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

void CudaLaneExecutor::give_back(cudaEvent_t event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  events_.push_back(event);
}

// By looking, since being woken takes some 30 us; but not for ever, since others may need the processor.
void CudaLaneExecutor::wait(cudaEvent_t landed) const {
  const auto deadline = std::chrono::steady_clock::now() + config_.spin;
  do {
    const cudaError_t code = cudaEventQuery(landed);
    if (code == cudaSuccess) return;
    forget_error(code);
    if (code != cudaErrorNotReady) throw CudaError(code, "cudaEventQuery");
  } while (std::chrono::steady_clock::now() < deadline);
  check_cuda(cudaEventSynchronize(landed), "cudaEventSynchronize");
}

void CudaLaneExecutor::attend(const LaneCall& call) {
  const DeviceScope scope(config_.device);
  const cudaEvent_t landed = launch(call, check(call));
  if (call.event != nullptr) return;
  wait(landed);
  give_back(landed);
}

// Other lanes' calls too: it is one stream.
void CudaLaneExecutor::finish() {
  const DeviceScope scope(config_.device);
  const cudaEvent_t landed = take_event();
  record(landed);
  wait(landed);
  give_back(landed);
}

void CudaLaneExecutor::copy_in(void* to, const char* from, int64_t num_bytes) {
  const DeviceScope scope(config_.device);
  check_cuda(cudaMemcpy(to, from, static_cast<size_t>(num_bytes), cudaMemcpyDefault), "cudaMemcpy");
}

}  // namespace kvservice
