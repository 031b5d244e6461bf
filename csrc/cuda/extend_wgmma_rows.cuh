// The rows of a consumer thread: online softmax and accumulators.
#pragma once

#include "cuda/extend_wgmma.cuh"

namespace kvservice {
namespace extend {

#ifdef KVSERVICE_WGMMA

// A warp has 16 rows of a tile. A thread has two of them, eight apart, and two of every eight columns of each.
template <typename T, int kHead, bool kFloat8>
class WgmmaRows {
  using Shape = WgmmaShape<kHead>;
  static constexpr int kParts = Shape::kParts;
  static constexpr int kPartAcc = Shape::kColumns / 2;
  static constexpr int kScales = kFloat8 ? 2 : 1;  // one if all rows have the same scale

 public:
  __device__ explicit WgmmaRows(const Args& a) : a_(a), lane_(threadIdx.x % 32) {}

  // `first_row` of the warpgroup, within the tile. `row_scales`: of the rows of the tile, for FP8 pools.
  // The tile stays where it is until the rows are stored.
  __device__ void start(const Tile& tile, int first_row, const float* row_scales) {
    tile_ = &tile;
    warp_row_ = first_row + static_cast<int>(threadIdx.x) % kWarpgroupThreads / 32 * 16;
#pragma unroll
    for (int i = 0; i < 2; ++i) position_[i] = tile_->position(a_, row(i));
    const float k_scale = a_.k_scale != nullptr ? a_.k_scale[tile_->kv_head] : 1.0F;
    plain_ = a_.soft_cap <= 0.0F && a_.alibi_slopes == nullptr && a_.scale * k_scale > 0.0F;
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
      scale_[i] = a_.scale * k_scale * (kFloat8 ? row_scales[warp_row_ + lane_ / 4 + 8 * i] : 1.0F);
      factor_[i] = plain_ ? scale_[i] * kLog2E : 1.0F;
    }
    clear();
    all_visible_end_ = __shfl_sync(~0U, position_[0], 0) + 1;
    all_visible_begin_ = tile_->first_visible(a_, __shfl_sync(~0U, position_[1], 31));
  }

  __device__ const Tile& tile() const { return *tile_; }
  // Whether the warp has any rows. The last of them may be padding.
  __device__ bool any() const { return tile_->first_row + warp_row_ < tile_->num_rows(a_); }

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      max[i] = -INFINITY;
      sum[i] = 0.0F;
    }
#pragma unroll
    for (auto& part : acc) {
#pragma unroll
      for (float& x : part) x = 0.0F;
    }
  }

  __device__ void fence_accumulators() {
#pragma unroll
    for (auto& part : acc) ptx::fence_operand(part);
  }

  // Converts the logits of the 2 * kCount keys from `key` on to weights. The caller multiplies the accumulators by
  // `decay`.
  template <int kCount>
  __device__ void online_softmax(int key, float (&logits)[kCount], float (&decay)[2]) {
    if (!plain_) apply_options(key, logits);
    if (key + 2 * kCount > all_visible_end_ || key < all_visible_begin_) mask(key, logits);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float largest = max[i];
#pragma unroll
      for (int n = 0; n < kCount; n += 4) {
        largest = fmaxf(largest, fmaxf(logits[n + 2 * i], logits[n + 2 * i + 1]));
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 2));
      // No key was visible so far: any finite number works.
      const float shift = largest == -INFINITY ? 0.0F : largest * factor(i);
      decay[i] = ptx::exp2_fast(max[i] * factor(i) - shift);
      max[i] = largest;
      float weights = 0.0F;
#pragma unroll
      for (int n = 0; n < kCount; n += 4) {
#pragma unroll
        for (int e = n + 2 * i; e < n + 2 * i + 2; ++e) {
          logits[e] = ptx::exp2_fast(logits[e] * factor(i) - shift);
          weights += logits[e];
        }
      }
      sum[i] = sum[i] * decay[i] + weights;
    }
  }

  // Called after the last step. Converts the maxima to log2 units, to which the sums are relative.
  __device__ void finish() {
#pragma unroll
    for (int i = 0; i < 2; ++i) max[i] *= factor(i);
  }

  __device__ void rescale(const float (&decay)[2]) {
#pragma unroll
    for (auto& part : acc) {
#pragma unroll
      for (int e = 0; e < kPartAcc; ++e) part[e] *= decay[e / 2 % 2];
    }
  }

  template <int kUnits>
  static __device__ void pack(const float (&logits)[8 * kUnits], uint32_t (&weights)[kUnits][4]) {
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[k][i] = ptx::pack<T>(logits[8 * k + 2 * i], logits[8 * k + 2 * i + 1]);
    }
  }

  // Accumulators in groups of four: two columns of one row, then of the other.
  __device__ float4 quad(int i) const {
    const float* x = &acc[i * 4 / kPartAcc][i * 4 % kPartAcc];
    return make_float4(x[0], x[1], x[2], x[3]);
  }
  __device__ void add_quad(int i, float4 values, const float (&factors)[2]) {
    float* x = &acc[i * 4 / kPartAcc][i * 4 % kPartAcc];
    x[0] += values.x * factors[0];
    x[1] += values.y * factors[0];
    x[2] += values.z * factors[1];
    x[3] += values.w * factors[1];
  }

  static __device__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0U, x, 1);
    return x + __shfl_xor_sync(~0U, x, 2);
  }

  __device__ void store() {
    const float v_scale = a_.v_scale != nullptr ? a_.v_scale[tile_->kv_head] : 1.0F;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float total = quad_sum(sum[i]);
      const bool valid = row(i) < tile_->num_rows(a_);
      const int64_t index = valid ? tile_->query_row(a_, row(i), position_[i]) : 0;
      if (valid && a_.lse != nullptr && lane_ % 4 == 0) a_.lse[index] = (max[i] + log2f(total)) * kLn2;
      auto* out = reinterpret_cast<uint4*>(static_cast<uint16_t*>(a_.out) + index * a_.head_size);
      store_row(out, i, v_scale / total, valid);
    }
  }

  // State of the two rows of this thread: the largest logit (in log2 units after finish()), the sum of the weights of
  // this thread's columns, and the weighted values.
  float max[2];
  float sum[2];
  float acc[kParts][kPartAcc];

 private:
  __device__ int row(int i) const { return tile_->first_row + warp_row_ + lane_ / 4 + 8 * i; }
  // The exponential applies the scale of a plain logit.
  __device__ float factor(int i) const { return factor_[kFloat8 ? i : 0]; }

  // Returns the offset of the key of logit e from the step's first key.
  __device__ int key_offset(int e) const { return e / 4 * 8 + lane_ % 4 * 2 + e % 2; }

  template <int kCount>
  __device__ void apply_options(int key, float (&logits)[kCount]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = tile_->kv_head * a_.group + row(i) % a_.group;
      const LogitOptions options{scale_[kFloat8 ? i : 0], a_.soft_cap,
                                 a_.alibi_slopes != nullptr ? a_.alibi_slopes[head] * kLog2E : 0.0F};
#pragma unroll
      for (int n = 0; n < kCount; n += 4) {
#pragma unroll
        for (int e = n + 2 * i; e < n + 2 * i + 2; ++e) {
          logits[e] = options.apply(logits[e], key + key_offset(e) - position_[i]);
        }
      }
    }
  }

  template <int kCount>
  __device__ void mask(int key, float (&logits)[kCount]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // The visible range, as offsets from this lane's first key.
      const int last = position_[i] - key - lane_ % 4 * 2;
      const int first = tile_->first_visible(a_, position_[i]) - key - lane_ % 4 * 2;
#pragma unroll
      for (int n = 0; n < kCount; n += 4) {
#pragma unroll
        for (int e = n + 2 * i; e < n + 2 * i + 2; ++e) {
          const int offset = e / 4 * 8 + e % 2;
          if (offset > last || offset < first) logits[e] = -INFINITY;
        }
      }
    }
  }

  // Four lanes share a row: each has two of every eight dimensions. They exchange them, so that each stores eight at
  // once.
  __device__ void store_row(uint4* out, int i, float factor, bool valid) const {
#pragma unroll
    for (int octet = 0; octet < kHead / 8; octet += 4) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* pair = &acc[octet * 4 / kPartAcc][(octet + j) * 4 % kPartAcc + 2 * i];
        words[j] = kFloat8 ? pack_as(pair[0] * factor, pair[1] * factor, a_.dtype)
                           : ptx::pack<T>(pair[0] * factor, pair[1] * factor);
      }
      transpose_by_quads(words);
      const int piece = octet + lane_ % 4;
      if (valid && piece < a_.head_size / 8) out[piece] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  // Word j of lane t (of four) becomes word t of lane j.
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
  const int lane_;
  const Tile* tile_;
  int warp_row_;  // first row of this warp, within the tile
  int position_[2];
  // All rows of the warp see the keys in this range.
  int all_visible_begin_;
  int all_visible_end_;
  bool plain_;
  float scale_[kScales];
  float factor_[kScales];
};

#endif  // KVSERVICE_WGMMA

}  // namespace extend
}  // namespace kvservice
