// The consumer warpgroups of the Hopper extend kernel.
#pragma once

#include "cuda/extend_wgmma_rows.cuh"

namespace kvservice {
namespace extend {

// The partial result of a warpgroup for one chunk: 64 rows of unnormalised sums in the threads' register layout, then
// the maximum (in log2 units) and the sum of the weights of each row.
template <int kHead>
struct WarpgroupPartial {
  static constexpr int kFloats = kWarpgroupRows * (kHead + 2);
  float* data;

  __device__ float4* values(int quad, int thread) const {
    return reinterpret_cast<float4*>(data) + quad * kWarpgroupThreads + thread;
  }
  __device__ float2* state(int row) const { return reinterpret_cast<float2*>(data + kWarpgroupRows * kHead) + row; }
};

#ifdef KVSERVICE_WGMMA

// A consumer warpgroup issues the QK product of a step together with the PV product of the previous step, so that the
// softmax of the step overlaps the latter. Warpgroups with different rows alternate on the tensor cores (ping-pong
// scheduling), so that the exponentials of one overlap the products of the other.
template <typename T, int kHead, bool kFloat8>
class WgmmaConsumer {
  using Shape = WgmmaShape<kHead>;
  static constexpr int kKeys = Shape::kKeys, kLogits = kKeys / 2, kParts = Shape::kParts;
  using Partial = WarpgroupPartial<kHead>;

 public:
  __device__ WgmmaConsumer(const Args& a, char* shared, SharedStorage<kHead>* storage)
      : a_(a),
        storage_(storage),
        shared_(shared),
        warpgroup_(uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads - 1)),
        lane_(threadIdx.x % 32),
        rows_(a) {
    const uint32_t address = ptx::shared_address(shared);
    queries_tile_ = ptx::matrix_descriptor(address, kWgmmaRows * 16, 128);
    keys_tile_ = ptx::matrix_descriptor(address + Shape::kKeysOffset, kKeys * 16, 128);
    values_tile_ = ptx::swizzled_32_descriptor(address + Shape::kValuesOffset);
  }

  __device__ void run() {
    if (warpgroup_ == 1) scheduler_barrier_arrive();  // the first warpgroup begins
    for (int slot = 0;;) {
      ptx::mbarrier_wait(ptx::shared_address(&storage_->query_full[queries_.stage()]), queries_.parity());
      if (storage_->tiles[slot].num_steps <= 0) break;
      attend(storage_->tiles[slot]);
      ++queries_.steps;
      if (++slot == SharedStorage<kHead>::kTiles) slot = 0;
    }
  }

 private:
  // Returns a value that is equal in all lanes, in a form that the compiler recognizes as uniform: wgmma descriptors
  // are in uniform registers.
  static __device__ int uniform(int value) { return __shfl_sync(~0U, value, 0); }

  __device__ int thread() const { return threadIdx.x % kWarpgroupThreads; }
  __device__ const Tile& tile() const { return rows_.tile(); }

  __device__ void scheduler_barrier_sync() const {
    ptx::named_barrier(kFirstSchedulerBarrier + warpgroup_, 2 * kWarpgroupThreads);
  }
  __device__ void scheduler_barrier_arrive() const {
    asm volatile("bar.arrive %0, %1;" ::"r"(kFirstSchedulerBarrier + 1 - warpgroup_), "n"(2 * kWarpgroupThreads)
                 : "memory");
  }

  // The barrier counts the warps of both warpgroups. A warpgroup that uses a stage alone also arrives for the other
  // one.
  __device__ void release(uint64_t* barrier, int arrivals) const {
    __syncwarp();
    if (lane_ < arrivals) ptx::mbarrier_arrive(ptx::shared_address(barrier));
  }
  __device__ void wait_keys() const {
    ptx::mbarrier_wait(ptx::shared_address(&storage_->keys_full[keys_.stage()]), keys_.parity());
  }
  __device__ void wait_values() const {
    ptx::mbarrier_wait(ptx::shared_address(&storage_->values_full[values_.stage()]), values_.parity());
  }
  __device__ void release_keys() {
    release(&storage_->keys_empty[keys_.stage()], stride_);
    keys_.steps += stride_;
  }
  __device__ void release_values() {
    release(&storage_->values_empty[values_.stage()], stride_);
    values_.steps += stride_;
  }

  __device__ void attend(const Tile& tile) {
    const bool few_rows = tile.first_row + kWarpgroupRows >= tile.num_rows(a_);
    shares_rows_ = few_rows && tile.num_steps > 1;
    stride_ = shares_rows_ ? 2 : 1;
    query_offset_ =
        uniform(queries_.stage() * (Shape::kQueryBytes / 16) + (shares_rows_ ? 0 : warpgroup_ * kWarpgroupRows));
    if (few_rows && !shares_rows_ && warpgroup_ == 1) return skip_step();
    rows_.start(tile, shares_rows_ ? 0 : warpgroup_ * kWarpgroupRows, storage_->row_scales[queries_.stage()]);
    const int count = tile.num_steps, first_key = tile.first_key;
    const uint32_t end = keys_.steps + count;
    const int skipped = shares_rows_ ? warpgroup_ : 0;
    keys_.steps += skipped;
    values_.steps += skipped;
    if (count > skipped) {
      if (kKeys > kFewKeys && tile.has_few_keys()) {
        attend_few(first_key);
      } else {
        attend_steps(first_key + skipped * kKeys, (count - skipped + stride_ - 1) / stride_);
      }
    }
    keys_.steps = values_.steps = end;
    rows_.finish();
    if (shares_rows_ && !combine_warpgroups()) return;
    const int num_chunks = tile.num_chunks;
    if (num_chunks > 1 && !reduce_chunks(num_chunks)) return;
    if (rows_.any()) rows_.store();
  }

  __device__ void attend_steps(int key, int count) {
    float logits[kLogits], decay[2];
    uint32_t weights[kKeys / 16][4];
    wait_keys();
    ptx::fence_proxy_async();
    ptx::wgmma_fence();
    multiply_keys(logits);
    ptx::wgmma_wait<0>();
    ptx::fence_operand(logits);
    release_keys();
    if (count == 1) release_queries();
    rows_.online_softmax(key, logits, decay);
    rows_.pack(logits, weights);
    for (int left = count - 1; left > 0; --left) {
      key += kKeys * stride_;
      wait_keys();
      wait_values();
      ptx::fence_proxy_async();
      if (!shares_rows_) scheduler_barrier_sync();
      rows_.fence_accumulators();
      ptx::wgmma_fence();
      multiply_keys(logits);
      multiply_values(weights);
      if (!shares_rows_) scheduler_barrier_arrive();
      ptx::wgmma_wait<1>();
      ptx::fence_operand(logits);
      release_keys();
      if (left == 1) release_queries();
      rows_.online_softmax(key, logits, decay);
      ptx::fence_operand(logits);
      ptx::fence_operand(decay);
      // ptxas would move the wait for the product before the exponentials. It does not move it past another wait, so
      // this redundant wait keeps it here.
      wait_values();
      ptx::wgmma_wait<0>();
      rows_.fence_accumulators();
      ptx::fence_operand(logits);
      release_values();
      rows_.rescale(decay);
      rows_.pack(logits, weights);
    }
    wait_values();
    ptx::fence_proxy_async();
    rows_.fence_accumulators();
    ptx::wgmma_fence();
    multiply_values(weights);
    ptx::wgmma_wait<0>();
    rows_.fence_accumulators();
    release_values();
  }

  // For a warpgroup that has no rows.
  __device__ void skip_step() {
    wait_keys();
    release_keys();
    release_queries();
    wait_values();
    release_values();
  }

  // The same for the only step of a tile with few keys.
  __device__ void attend_few(int key) {
    float logits[kFewKeys / 2], decay[2];
    uint32_t weights[kFewKeys / 16][4];
    wait_keys();
    ptx::fence_proxy_async();
    ptx::wgmma_fence();
    multiply_keys(logits);
    ptx::wgmma_wait<0>();
    ptx::fence_operand(logits);
    release_keys();
    release_queries();
    rows_.online_softmax(key, logits, decay);
    rows_.pack(logits, weights);
    wait_values();
    ptx::fence_proxy_async();
    rows_.fence_accumulators();
    ptx::wgmma_fence();
    multiply_values(weights);
    ptx::wgmma_wait<0>();
    rows_.fence_accumulators();
    release_values();
  }

  // Warpgroups with the same rows need the query memory once more, for combine_warpgroups().
  __device__ void release_queries() const {
    if (!shares_rows_) release(&storage_->query_empty[queries_.stage()], 1);
  }

  template <int kCount>
  __device__ void multiply_keys(float (&logits)[kCount]) {
    const uint64_t queries = queries_tile_ + query_offset_;
    const uint64_t keys = keys_tile_ + uniform(keys_.stage()) * (Shape::kTileBytes / 16);
#pragma unroll
    for (int k = 0; k < kHead / 16; ++k) {
      ptx::wgmma<T>(logits, queries + k * (2 * kWgmmaRows), keys + k * (2 * kKeys), k > 0);
    }
    ptx::wgmma_commit();
  }

  template <int kUnits>
  __device__ void multiply_values(const uint32_t (&weights)[kUnits][4]) {
    const uint64_t values = values_tile_ + uniform(values_.stage()) * (Shape::kTileBytes / 16);
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        ptx::wgmma<T>(rows_.acc[part], weights[k], values + (k * kHead + part * Shape::kColumns) * 2);
      }
    }
    ptx::wgmma_commit();
  }

  // Adds the sums of two warpgroups with the same rows, through the query memory. Returns true in the warpgroup that
  // has the result. A quad takes the place of eight dimensions of queries: those past the head size have to stay zero.
  __device__ bool combine_warpgroups() {
    auto* values = reinterpret_cast<float4*>(shared_ + queries_.stage() * Shape::kQueryBytes);
    ptx::named_barrier(kConsumersBarrier, 2 * kWarpgroupThreads);
    if (warpgroup_ == 1) {
#pragma unroll
      for (int i = 0; i < kHead / 8; ++i) {
        if (8 * i < a_.head_size) values[i * kWarpgroupThreads + thread()] = rows_.quad(i);
      }
      storage_->states[thread()] = make_float4(rows_.max[0], rows_.max[1], rows_.sum[0], rows_.sum[1]);
    }
    ptx::named_barrier(kConsumersBarrier, 2 * kWarpgroupThreads);
    if (warpgroup_ == 0) {
      const float4 other = storage_->states[thread()];
      const float other_max[2] = {other.x, other.y}, other_sum[2] = {other.z, other.w};
      float mine[2], others[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float largest = fmaxf(rows_.max[i], other_max[i]);
        const float shift = largest == -INFINITY ? 0.0F : largest;
        mine[i] = ptx::exp2_fast(rows_.max[i] - shift);
        others[i] = ptx::exp2_fast(other_max[i] - shift);
        rows_.max[i] = largest;
        rows_.sum[i] = rows_.sum[i] * mine[i] + other_sum[i] * others[i];
      }
      rows_.rescale(mine);
#pragma unroll
      for (int i = 0; i < kHead / 8; ++i) {
        if (8 * i < a_.head_size) rows_.add_quad(i, values[i * kWarpgroupThreads + thread()], others);
      }
    }
    release(&storage_->query_empty[queries_.stage()], 1);
    return warpgroup_ == 0;
  }

  // Stores the partial result of a chunk. Returns true in the last warpgroup to finish the same rows, which then has
  // the sum of all chunks, added in order.
  __device__ bool reduce_chunks(int num_chunks) {
    const int half = a_.partial_rows / kWarpgroupRows, which = shares_rows_ ? 0 : warpgroup_;
    float* const first = a_.partials + (int64_t{tile().partial} * half + which) * Partial::kFloats;
    const int64_t stride = int64_t{half} * Partial::kFloats;
    if (rows_.any()) store_partial({first + tile().chunk * stride});
    if (!is_last(a_.counters + kScheduleCounters + 2 * tile().partial + which, num_chunks)) return false;
    if (rows_.any()) reduce_partials(first, stride, num_chunks);
    return true;
  }

  __device__ void store_partial(Partial to) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = rows_.quad_sum(rows_.sum[i]);
      if (lane_ % 4 == 0) __stcg(to.state(thread() / 32 * 16 + lane_ / 4 + 8 * i), make_float2(rows_.max[i], sum));
    }
#pragma unroll
    for (int i = 0; i < kHead / 8; ++i) __stcg(to.values(i, thread()), rows_.quad(i));
  }

  // Returns true in the last of `count` warpgroups that call this. It then sees everything that the others wrote
  // before.
  __device__ bool is_last(int* counter, int count) {
    ptx::named_barrier(kFirstWarpgroupBarrier + warpgroup_, kWarpgroupThreads);
    if (thread() == 0) {
      auto* word = reinterpret_cast<uint32_t*>(counter);
      const bool last = ptx::add_acquire_release(word, 1) == static_cast<uint32_t>(count - 1);
      if (last) *word = 0;
      storage_->last[warpgroup_] = last;
    }
    ptx::named_barrier(kFirstWarpgroupBarrier + warpgroup_, kWarpgroupThreads);
    return storage_->last[warpgroup_];
  }

  // Sums the partial results in chunk order. Loads of different chunks are independent.
  __device__ void reduce_partials(float* first, int64_t stride, int count) {
    const int my_row = thread() / 32 * 16 + lane_ / 4;
    rows_.clear();
    for (int k = 0; k < count; ++k) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        rows_.max[i] = fmaxf(rows_.max[i], __ldcg(Partial{first + k * stride}.state(my_row + 8 * i)).x);
      }
    }
#pragma unroll(kHead > 128 ? 1 : 2)
    for (int k = 0; k < count; ++k) {
      const Partial from{first + k * stride};
      float factors[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 state = __ldcg(from.state(my_row + 8 * i));
        factors[i] = ptx::exp2_fast(state.x - rows_.max[i]);
        // One lane of four holds their sum.
        if (lane_ % 4 == 0) rows_.sum[i] += state.y * factors[i];
      }
#pragma unroll
      for (int i = 0; i < kHead / 8; ++i) rows_.add_quad(i, __ldcg(from.values(i, thread())), factors);
    }
  }

  const Args& a_;
  SharedStorage<kHead>* const storage_;
  char* const shared_;
  const int warpgroup_;
  const int lane_;
  uint64_t queries_tile_;
  uint64_t keys_tile_;
  uint64_t values_tile_;
  int query_offset_;  // of this warpgroup's queries, in the descriptor
  PipelineState<Shape::kQueryStages> queries_;
  PipelineState<kStages> keys_;
  PipelineState<kStages> values_;
  bool shares_rows_;  // with the other warpgroup, which has every second step
  int stride_;        // from one step of this warpgroup to its next
  WgmmaRows<T, kHead, kFloat8> rows_;
};

#endif  // KVSERVICE_WGMMA

}  // namespace extend
}  // namespace kvservice
