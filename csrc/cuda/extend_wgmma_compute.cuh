// The computing groups of the extend kernel for Hopper.
#pragma once

#include "cuda/extend_wgmma.cuh"

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
  static constexpr int kPartAcc = Shape::kColumns / 2;
  using Partial = GroupPartial<kHead>;

 public:
  __device__ WgmmaCompute(const Args& a, char* shared, Signals<kKeys>* signals)
      : a_(a),
        signals_(signals),
        shared_(shared),
        group_(uniform(static_cast<int>(threadIdx.x) / kGroupThreads - 1)),
        lane_(threadIdx.x % 32) {
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
      tile_ = signals_->computing;
      attend();
    }
  }

 private:
  // Equal in all lanes, which the compiler cannot know otherwise: descriptors live in registers of the warp.
  static __device__ int uniform(int value) { return __shfl_sync(~0U, value, 0); }

  __device__ int thread() const { return threadIdx.x % kGroupThreads; }
  // Of the tile, the first of this warp's.
  __device__ int warp_row() const { return (shares_rows_ ? 0 : group_ * kGroupRows) + thread() / 32 * 16; }
  __device__ int row(int i) const { return tile_.first_row + warp_row() + lane_ / 4 + 8 * i; }
  __device__ bool warp_has_rows() const { return tile_.first_row + warp_row() < tile_.num_rows(a_); }

  __device__ void take_turn() const { ptx::named_barrier(kFirstTurn + group_, 2 * kGroupThreads); }
  __device__ void pass_turn() const {
    asm volatile("bar.arrive %0, %1;" ::"r"(kFirstTurn + 1 - group_), "n"(2 * kGroupThreads) : "memory");
  }

  // The barrier counts the warps of both groups; for one who uses a stage alone it arrives for the other too.
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
    const Steps<kWgmmaRows, kKeys> steps(a_, tile_);
    const int count = steps.count;
    shares_rows_ = tile_.first_row + kGroupRows >= tile_.num_rows(a_);
    stride_ = shares_rows_ ? 2 : 1;
    start_tile();
    const uint32_t end = keys_.steps + count;
    const int skipped = shares_rows_ ? group_ : 0;
    keys_.steps += skipped;
    values_.steps += skipped;
    if (count > skipped) attend_steps(steps.first + skipped * kKeys, (count - skipped + stride_ - 1) / stride_);
    keys_.steps = values_.steps = end;
#pragma unroll
    for (int i = 0; i < 2; ++i) max_[i] *= factor(i);
    if (shares_rows_ && !join_groups()) return;
    if (steps.num_chunks > 1 && !join_chunks(steps.num_chunks)) return;
    if (warp_has_rows()) store();
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
    soften(key, logits, decay);
    pack(logits, weights);
    for (int left = count - 1; left > 0; --left) {
      key += kKeys * stride_;
      wait_keys();
      wait_values();
      ptx::fence_for_wgmma();
      if (!shares_rows_) take_turn();
      pin_acc();
      ptx::wgmma_fence();
      multiply_keys(logits);
      multiply_values(weights);
      if (!shares_rows_) pass_turn();
      ptx::wgmma_wait<1>();
      ptx::pin(logits);
      release_keys();
      if (left == 1) release_queries();
      soften(key, logits, decay);
      ptx::pin(logits);
      ptx::pin(decay);
      // The assembler would move the wait for the product up before the exponentials, but not past another wait, which
      // this is for.
      wait_values();
      ptx::wgmma_wait<0>();
      pin_acc();
      ptx::pin(logits);
      release_values();
      rescale(decay);
      pack(logits, weights);
    }
    wait_values();
    ptx::fence_for_wgmma();
    pin_acc();
    ptx::wgmma_fence();
    multiply_values(weights);
    ptx::wgmma_wait<0>();
    pin_acc();
    release_values();
  }

  // Where both groups have the rows their memory is wanted once more.
  __device__ void release_queries() const {
    if (!shares_rows_) release(&signals_->query_empty, 1);
  }

  __device__ void start_tile() {
    const float k_scale = a_.k_scale != nullptr ? a_.k_scale[tile_.kv_head] : 1.0F;
    scale_ = a_.scale * k_scale;
    plain_ = a_.soft_cap <= 0.0F && a_.alibi_slopes == nullptr && scale_ > 0.0F;
#pragma unroll
    for (int i = 0; i < (kFloat8 ? 2 : 1); ++i) {
      factor_[i] = plain_ ? scale_ * row_scale(i) * kLog2E : 1.0F;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      max_[i] = -INFINITY;
      sum_[i] = 0.0F;
    }
    clear_acc();
    all_visible_end_ = tile_.position(a_, tile_.first_row + warp_row()) + 1;
    all_visible_begin_ = tile_.first_visible(a_, tile_.position(a_, tile_.first_row + warp_row() + 15));
  }

  __device__ float row_scale(int i) const {
    return kFloat8 ? signals_->row_scale[warp_row() + lane_ / 4 + 8 * i] : 1.0F;
  }
  // Of a plain logit the scale is applied on the way into the exponential.
  __device__ float factor(int i) const { return factor_[kFloat8 ? i : 0]; }

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
        ptx::wgmma<T>(acc_[part], weights[k], values + (k * kHead + part * Shape::kColumns) * 2);
      }
    }
    ptx::wgmma_commit();
  }

  __device__ void pin_acc() {
#pragma unroll
    for (auto& part : acc_) ptx::pin(part);
  }

  __device__ void clear_acc() {
#pragma unroll
    for (auto& part : acc_) {
#pragma unroll
      for (float& x : part) x = 0.0F;
    }
  }

  // Logits of the step at `key` to weights; what was summed before is to be multiplied by `decay`.
  __device__ void soften(int key, float (&logits)[kLogits], float (&decay)[2]) {
    if (!plain_) apply_options(key, logits);
    if (key + kKeys > all_visible_end_ || key < all_visible_begin_) mask(key, logits);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float largest = max_[i];
#pragma unroll
      for (int n = 0; n < kLogits; n += 4) {
        largest = fmaxf(largest, fmaxf(logits[n + 2 * i], logits[n + 2 * i + 1]));
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 2));
      // Nothing visible so far: any finite number will do.
      const float shift = largest == -INFINITY ? 0.0F : largest * factor(i);
      decay[i] = ptx::exp2_fast(max_[i] * factor(i) - shift);
      max_[i] = largest;
      float sum = 0.0F;
#pragma unroll
      for (int n = 0; n < kLogits; n += 4) {
#pragma unroll
        for (int e = n + 2 * i; e < n + 2 * i + 2; ++e) {
          logits[e] = ptx::exp2_fast(logits[e] * factor(i) - shift);
          sum += logits[e];
        }
      }
      sum_[i] = sum_[i] * decay[i] + sum;
    }
  }

  // The key of element e of the logits is the step's, plus this.
  __device__ int key_offset(int e) const { return e / 4 * 8 + lane_ % 4 * 2 + e % 2; }

  __device__ void apply_options(int key, float (&logits)[kLogits]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int position = tile_.position(a_, row(i));
      const int head = tile_.kv_head * a_.group + row(i) % a_.group;
      const LogitOptions options{scale_ * row_scale(i), a_.soft_cap,
                                 a_.alibi_slopes != nullptr ? a_.alibi_slopes[head] * kLog2E : 0.0F};
#pragma unroll
      for (int n = 0; n < kLogits; n += 4) {
#pragma unroll
        for (int e = n + 2 * i; e < n + 2 * i + 2; ++e) {
          logits[e] = options.apply(logits[e], key + key_offset(e) - position);
        }
      }
    }
  }

  __device__ void mask(int key, float (&logits)[kLogits]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int position = tile_.position(a_, row(i));
      // Offsets of this lane's first key that are visible.
      const int last = position - key - lane_ % 4 * 2;
      const int first = tile_.first_visible(a_, position) - key - lane_ % 4 * 2;
#pragma unroll
      for (int n = 0; n < kLogits; n += 4) {
#pragma unroll
        for (int e = n + 2 * i; e < n + 2 * i + 2; ++e) {
          const int offset = e / 4 * 8 + e % 2;
          if (offset > last || offset < first) logits[e] = -INFINITY;
        }
      }
    }
  }

  __device__ void rescale(const float (&decay)[2]) {
#pragma unroll
    for (auto& part : acc_) {
#pragma unroll
      for (int e = 0; e < kPartAcc; ++e) part[e] *= decay[e / 2 % 2];
    }
  }

  static __device__ void pack(const float (&logits)[kLogits], uint32_t (&weights)[kKeys / 16][4]) {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[k][i] = ptx::pack<T>(logits[8 * k + 2 * i], logits[8 * k + 2 * i + 1]);
    }
  }

  // Of two groups with the same rows, through the queries' memory. True in the one that then has the sum.
  __device__ bool join_groups() {
    auto* values = reinterpret_cast<float4*>(shared_);
    ptx::named_barrier(kComputers, 2 * kGroupThreads);
    if (group_ == 1) {
#pragma unroll
      for (int i = 0; i < kHead / 8; ++i) values[i * kGroupThreads + thread()] = acc_quad(i);
      signals_->states[thread()] = make_float4(max_[0], max_[1], sum_[0], sum_[1]);
    }
    ptx::named_barrier(kComputers, 2 * kGroupThreads);
    if (group_ == 0) {
      const float4 other = signals_->states[thread()];
      const float other_max[2] = {other.x, other.y}, other_sum[2] = {other.z, other.w};
      float mine[2], others[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float largest = fmaxf(max_[i], other_max[i]);
        const float shift = largest == -INFINITY ? 0.0F : largest;
        mine[i] = ptx::exp2_fast(max_[i] - shift);
        others[i] = ptx::exp2_fast(other_max[i] - shift);
        max_[i] = largest;
        sum_[i] = sum_[i] * mine[i] + other_sum[i] * others[i];
      }
      rescale(mine);
#pragma unroll
      for (int i = 0; i < kHead / 8; ++i) add_quad(i, values[i * kGroupThreads + thread()], others);
    }
    release(&signals_->query_empty, 1);
    return group_ == 0;
  }

  // Leaves what the group has for the last to come of those with the same rows. True in it, which then has the sum, of
  // all in their order.
  __device__ bool join_chunks(int num_chunks) {
    const int half = a_.partial_rows / kGroupRows, which = shares_rows_ ? 0 : group_;
    float* const first = a_.partials + (int64_t{tile_.partial} * half + which) * Partial::kFloats;
    const int64_t stride = int64_t{half} * Partial::kFloats;
    if (warp_has_rows()) leave({first + tile_.chunk * stride});
    if (!is_last(a_.counters + kScheduleCounters + 2 * tile_.partial + which, num_chunks)) return false;
    if (warp_has_rows()) collect(first, stride, num_chunks);
    return true;
  }

  __device__ void leave(Partial to) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = quad_sum(sum_[i]);
      if (lane_ % 4 == 0) __stcg(to.state(thread() / 32 * 16 + lane_ / 4 + 8 * i), make_float2(max_[i], sum));
    }
#pragma unroll
    for (int i = 0; i < kHead / 8; ++i) __stcg(to.values(i, thread()), acc_quad(i));
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

  __device__ void collect(float* first, int64_t stride, int count) {
    const int my_row = thread() / 32 * 16 + lane_ / 4;
    max_[0] = max_[1] = -INFINITY;
    for (int k = 0; k < count; ++k) {
#pragma unroll
      for (int i = 0; i < 2; ++i) max_[i] = fmaxf(max_[i], __ldcg(Partial{first + k * stride}.state(my_row + 8 * i)).x);
    }
    sum_[0] = sum_[1] = 0.0F;
    clear_acc();
#pragma unroll(kHead > 128 ? 1 : 2)
    for (int k = 0; k < count; ++k) {
      const Partial from{first + k * stride};
      float factors[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 state = __ldcg(from.state(my_row + 8 * i));
        factors[i] = ptx::exp2_fast(state.x - max_[i]);
        // One lane of four has the sum of them.
        if (lane_ % 4 == 0) sum_[i] += state.y * factors[i];
      }
#pragma unroll
      for (int i = 0; i < kHead / 8; ++i) add_quad(i, __ldcg(from.values(i, thread())), factors);
    }
  }

  // Of accumulators in fours: two columns of one row, and of the other.
  __device__ float4 acc_quad(int i) const {
    const float* quad = &acc_[i * 4 / kPartAcc][i * 4 % kPartAcc];
    return make_float4(quad[0], quad[1], quad[2], quad[3]);
  }
  __device__ void add_quad(int i, float4 values, const float (&factors)[2]) {
    float* quad = &acc_[i * 4 / kPartAcc][i * 4 % kPartAcc];
    quad[0] += values.x * factors[0];
    quad[1] += values.y * factors[0];
    quad[2] += values.z * factors[1];
    quad[3] += values.w * factors[1];
  }

  static __device__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0U, x, 1);
    return x + __shfl_xor_sync(~0U, x, 2);
  }

  __device__ void store() {
    const float v_scale = a_.v_scale != nullptr ? a_.v_scale[tile_.kv_head] : 1.0F;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = quad_sum(sum_[i]);
      const bool valid = row(i) < tile_.num_rows(a_);
      const int64_t index = valid ? tile_.query_row(a_, row(i)) : 0;
      if (valid && a_.lse != nullptr && lane_ % 4 == 0) a_.lse[index] = (max_[i] + log2f(sum)) * kLn2;
      auto* out = reinterpret_cast<uint4*>(static_cast<uint16_t*>(a_.out) + index * a_.head_size);
      store_row(out, i, v_scale / sum, valid);
    }
  }

  // Four lanes have a row, each two of every eight dimensions. They swap, so that each stores eight at once.
  __device__ void store_row(uint4* out, int i, float factor, bool valid) const {
#pragma unroll
    for (int octet = 0; octet < kHead / 8; octet += 4) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* pair = &acc_[octet * 4 / kPartAcc][(octet + j) * 4 % kPartAcc + 2 * i];
        words[j] = kFloat8 ? pack_as(pair[0] * factor, pair[1] * factor, a_.dtype)
                           : ptx::pack<T>(pair[0] * factor, pair[1] * factor);
      }
      transpose_by_quads(words);
      const int piece = octet + lane_ % 4;
      if (valid && piece < a_.head_size / 8) out[piece] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  // Word j of lane t of four becomes word t of lane j.
  __device__ void transpose_by_quads(uint32_t (&words)[4]) const {
    const bool odd = lane_ % 2 != 0, upper = lane_ % 4 >= 2;
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const uint32_t got = __shfl_xor_sync(~0U, odd ? words[j] : words[j + 1], 1);
      (odd ? words[j] : words[j + 1]) = got;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t got = __shfl_xor_sync(~0U, upper ? words[j] : words[j + 2], 2);
      (upper ? words[j] : words[j + 2]) = got;
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
  Tile tile_;
  bool shares_rows_;  // with the other group, which has every second step
  int stride_;        // from one of this group's steps to the next
  // All rows of the warp see the keys from the one to the other.
  int all_visible_begin_;
  int all_visible_end_;
  bool plain_;
  float scale_;
  float factor_[kFloat8 ? 2 : 1];
  // Of this thread's two rows:
  float max_[2];
  float sum_[2];
  float acc_[kParts][kPartAcc];
};

#endif  // KVSERVICE_WGMMA

}  // namespace extend
}  // namespace kvservice
