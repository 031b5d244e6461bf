// The computing groups of the extend kernel for Hopper.
#pragma once

#include "cuda/extend_wgmma_rows.cuh"

namespace kvservice {
namespace extend {

// What a group leaves of a chunk: 64 rows of unnormalised sums, as its threads have them, and maximum (a power of two)
// and sum of the weights of each.
template <int kHead>
struct GroupPartial {
  static constexpr int kFloats = kGroupRows * (kHead + 2);
  float* data;

  __device__ float4* values(int quad, int thread) const {
    return reinterpret_cast<float4*>(data) + quad * kGroupThreads + thread;
  }
  __device__ float2* state(int row) const { return reinterpret_cast<float2*>(data + kGroupRows * kHead) + row; }
};

#ifdef KVSERVICE_WGMMA

// The computing groups. A group starts the next step's product with the keys before it turns this step's logits into
// weights, and groups with rows of their own take turns at the multiplier, so that one's exponentials run beside the
// other's products.
template <typename T, int kHead, bool kFloat8>
class WgmmaCompute {
  using Shape = WgmmaShape<kHead>;
  static constexpr int kKeys = Shape::kKeys, kLogits = kKeys / 2, kParts = Shape::kParts;
  using Partial = GroupPartial<kHead>;

 public:
  __device__ WgmmaCompute(const Args& a, char* shared, Signals<kKeys>* signals)
      : a_(a),
        signals_(signals),
        shared_(shared),
        group_(uniform(static_cast<int>(threadIdx.x) / kGroupThreads - 1)),
        lane_(threadIdx.x % 32),
        rows_(a, group_) {
    const uint32_t address = ptx::shared_address(shared);
    queries_ = ptx::matrix_descriptor(address, kWgmmaRows * 16, 128);
    keys_tile_ = ptx::matrix_descriptor(address + Shape::kKeysOffset, kKeys * 16, 128);
    values_tile_ = ptx::swizzled_32_descriptor(address + Shape::kValuesOffset);
  }

  __device__ void run() {
    if (group_ == 1) pass_turn();  // the first group has it
    uint32_t parity = 0;
    while (true) {
      ptx::mbarrier_wait(ptx::shared_address(&signals_->query_full), parity);
      parity ^= 1;
      if (!signals_->computing_found) break;
      attend();
    }
  }

 private:
  // Equal in all lanes, which the compiler cannot know otherwise: descriptors live in registers of the warp.
  static __device__ int uniform(int value) { return __shfl_sync(~0U, value, 0); }

  __device__ int thread() const { return threadIdx.x % kGroupThreads; }
  __device__ const Tile& tile() const { return rows_.tile(); }

  __device__ void take_turn() const { ptx::named_barrier(kFirstTurn + group_, 2 * kGroupThreads); }
  __device__ void pass_turn() const {
    asm volatile("bar.arrive %0, %1;" ::"r"(kFirstTurn + 1 - group_), "n"(2 * kGroupThreads) : "memory");
  }

  // The barrier counts the warps of both groups; a group that uses a stage alone arrives for the other too.
  __device__ void release(uint64_t* barrier, int arrivals) const {
    __syncwarp();
    if (lane_ < arrivals) ptx::mbarrier_arrive(ptx::shared_address(barrier));
  }
  __device__ void wait_keys() const {
    ptx::mbarrier_wait(ptx::shared_address(&signals_->keys_full[keys_.stage()]), keys_.parity());
  }
  __device__ void wait_values() const {
    ptx::mbarrier_wait(ptx::shared_address(&signals_->values_full[values_.stage()]), values_.parity());
  }
  __device__ void release_keys() {
    release(&signals_->keys_empty[keys_.stage()], stride_);
    keys_.steps += stride_;
  }
  __device__ void release_values() {
    release(&signals_->values_empty[values_.stage()], stride_);
    values_.steps += stride_;
  }

  __device__ void attend() {
    const Tile& next = signals_->computing;
    shares_rows_ = next.first_row + kGroupRows >= next.num_rows(a_);
    stride_ = shares_rows_ ? 2 : 1;
    rows_.start(next, shares_rows_, signals_->row_scale);
    const Steps<kWgmmaRows, kKeys> steps(a_, tile());
    const int count = steps.count;
    const uint32_t end = keys_.steps + count;
    const int skipped = shares_rows_ ? group_ : 0;
    keys_.steps += skipped;
    values_.steps += skipped;
    if (count > skipped) attend_steps(steps.first + skipped * kKeys, (count - skipped + stride_ - 1) / stride_);
    keys_.steps = values_.steps = end;
    rows_.finish();
    if (shares_rows_ && !join_groups()) return;
    if (steps.num_chunks > 1 && !join_chunks(steps.num_chunks)) return;
    if (rows_.any()) rows_.store();
  }

  __device__ void attend_steps(int key, int count) {
    float logits[kLogits], decay[2];
    uint32_t weights[kKeys / 16][4];
    wait_keys();
    ptx::fence_for_wgmma();
    ptx::wgmma_fence();
    multiply_keys(logits);
    ptx::wgmma_wait<0>();
    ptx::pin(logits);
    release_keys();
    if (count == 1) release_queries();
    rows_.soften(key, logits, decay);
    rows_.pack(logits, weights);
    for (int left = count - 1; left > 0; --left) {
      key += kKeys * stride_;
      wait_keys();
      wait_values();
      ptx::fence_for_wgmma();
      if (!shares_rows_) take_turn();
      rows_.pin();
      ptx::wgmma_fence();
      multiply_keys(logits);
      multiply_values(weights);
      if (!shares_rows_) pass_turn();
      ptx::wgmma_wait<1>();
      ptx::pin(logits);
      release_keys();
      if (left == 1) release_queries();
      rows_.soften(key, logits, decay);
      ptx::pin(logits);
      ptx::pin(decay);
      // The assembler would move the wait for the product up before the exponentials, but not past another wait, which
      // this is for.
      wait_values();
      ptx::wgmma_wait<0>();
      rows_.pin();
      ptx::pin(logits);
      release_values();
      rows_.rescale(decay);
      rows_.pack(logits, weights);
    }
    wait_values();
    ptx::fence_for_wgmma();
    rows_.pin();
    ptx::wgmma_fence();
    multiply_values(weights);
    ptx::wgmma_wait<0>();
    rows_.pin();
    release_values();
  }

  // Groups with the same rows want the queries' memory once more, to join.
  __device__ void release_queries() const {
    if (!shares_rows_) release(&signals_->query_empty, 1);
  }

  __device__ void multiply_keys(float (&logits)[kLogits]) {
    const uint64_t queries = queries_ + uniform(shares_rows_ ? 0 : group_ * kGroupRows);
    const uint64_t keys = keys_tile_ + uniform(keys_.stage()) * (Shape::kTileBytes / 16);
#pragma unroll
    for (int k = 0; k < kHead / 16; ++k) {
      ptx::wgmma<T>(logits, queries + k * (2 * kWgmmaRows), keys + k * (2 * kKeys), k > 0);
    }
    ptx::wgmma_commit();
  }

  __device__ void multiply_values(const uint32_t (&weights)[kKeys / 16][4]) {
    const uint64_t values = values_tile_ + uniform(values_.stage()) * (Shape::kTileBytes / 16);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        ptx::wgmma<T>(rows_.acc[part], weights[k], values + (k * kHead + part * Shape::kColumns) * 2);
      }
    }
    ptx::wgmma_commit();
  }

  // The sum of two groups with the same rows, through the queries' memory. True in the one that then has the sum.
  __device__ bool join_groups() {
    auto* values = reinterpret_cast<float4*>(shared_);
    ptx::named_barrier(kComputers, 2 * kGroupThreads);
    if (group_ == 1) {
#pragma unroll
      for (int i = 0; i < kHead / 8; ++i) values[i * kGroupThreads + thread()] = rows_.quad(i);
      signals_->states[thread()] = make_float4(rows_.max[0], rows_.max[1], rows_.sum[0], rows_.sum[1]);
    }
    ptx::named_barrier(kComputers, 2 * kGroupThreads);
    if (group_ == 0) {
      const float4 other = signals_->states[thread()];
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
      for (int i = 0; i < kHead / 8; ++i) rows_.add_quad(i, values[i * kGroupThreads + thread()], others);
    }
    release(&signals_->query_empty, 1);
    return group_ == 0;
  }

  // Leaves what the group has of a chunk to the last to come of those with the same rows. True in that one, which then
  // has the sum, of all in their order.
  __device__ bool join_chunks(int num_chunks) {
    const int half = a_.partial_rows / kGroupRows, which = shares_rows_ ? 0 : group_;
    float* const first = a_.partials + (int64_t{tile().partial} * half + which) * Partial::kFloats;
    const int64_t stride = int64_t{half} * Partial::kFloats;
    if (rows_.any()) leave({first + tile().chunk * stride});
    if (!is_last(a_.counters + kScheduleCounters + 2 * tile().partial + which, num_chunks)) return false;
    if (rows_.any()) collect(first, stride, num_chunks);
    return true;
  }

  __device__ void leave(Partial to) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = rows_.quad_sum(rows_.sum[i]);
      if (lane_ % 4 == 0) __stcg(to.state(thread() / 32 * 16 + lane_ / 4 + 8 * i), make_float2(rows_.max[i], sum));
    }
#pragma unroll
    for (int i = 0; i < kHead / 8; ++i) __stcg(to.values(i, thread()), rows_.quad(i));
  }

  // Of `count` groups that come here, for the last one. What all of them wrote before is there for it to read.
  __device__ bool is_last(int* counter, int count) {
    ptx::named_barrier(kFirstGroup + group_, kGroupThreads);
    if (thread() == 0) {
      auto* word = reinterpret_cast<uint32_t*>(counter);
      const bool last = ptx::add_acquire_release(word, 1) == static_cast<uint32_t>(count - 1);
      if (last) *word = 0;
      signals_->last[group_] = last;
    }
    ptx::named_barrier(kFirstGroup + group_, kGroupThreads);
    return signals_->last[group_];
  }

  // The sum of what was left, in the order of chunks. The loads of one do not wait for those of another.
  __device__ void collect(float* first, int64_t stride, int count) {
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
        // One lane of four has the sum of them.
        if (lane_ % 4 == 0) rows_.sum[i] += state.y * factors[i];
      }
#pragma unroll
      for (int i = 0; i < kHead / 8; ++i) rows_.add_quad(i, __ldcg(from.values(i, thread())), factors);
    }
  }

  const Args& a_;
  Signals<kKeys>* const signals_;
  char* const shared_;
  const int group_;
  const int lane_;
  uint64_t queries_;
  uint64_t keys_tile_;
  uint64_t values_tile_;
  Turn keys_;
  Turn values_;
  bool shares_rows_;  // with the other group, which has every second step
  int stride_;        // from one of this group's steps to the next
  WgmmaRows<T, kHead, kFloat8> rows_;
};

#endif  // KVSERVICE_WGMMA

}  // namespace extend
}  // namespace kvservice
