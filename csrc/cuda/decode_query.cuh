// The queries of the decode kernel: each lane's columns, which are the second operand of the first product.
#pragma once

#include "cuda/decode_block.cuh"

namespace kvservice::decode {

// The columns of one lane.
template <typename K>
struct Columns {
  float scale[K::kColumnTiles][2];  // to log2 units, or plain logits before a soft cap
  int limit[K::kColumnTiles][2];    // keys from this position on are not visible
  uint32_t query[K::kColumnTiles == 1 ? K::kSteps : 1][2];
};

// Brings the queries of a work tile from shared memory into registers or, if a warp has several column tiles, into
// shared memory.
template <typename K>
class Query {
  static constexpr bool kFp8 = K::kFp8;
  static constexpr int kHead = K::kHead;
  static constexpr int kSteps = K::kSteps;
  static constexpr int kColumnTiles = K::kColumnTiles;

 public:
  __device__ Query(const Block& block, typename K::Shared& shared) : block_(block), shared_(shared) {}

  __device__ void load(const WorkTile& s, int slot, Columns<K>& columns) {
    const Params& p = block_.p;
    const int g = block_.lane / 4, t = block_.lane % 4;
    const float base = p.scale * (p.k_scale != nullptr ? p.k_scale[s.kv_head] : 1.0F) *
                       (p.soft_cap == 0.0F ? 1.4426950408889634F : 1.0F);
    const int first_limit = s.context - s.query_len + 1;
    float factor = 1.0F;
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      if (kColumnTiles > 1 && n != block_.token_warp) continue;  // each column tile is the work of one warp
      const int column = block_.first_column + n * 8 + g;
      const char* row = column < used_columns(p, s) ? shared_.rows[slot][column] : nullptr;
      uint32_t pairs[kSteps][2];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load_pairs(row, step, t, pairs[step]);
      if constexpr (kFp8) factor = scale_to_half(pairs);
      if constexpr (kFp8 && kColumnTiles > 1) {
        if (t == 0) shared_.query_factors[column] = factor;
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint32_t (&pair)[2] = pairs[step];
        if constexpr (kColumnTiles == 1) {
          columns.query[step][0] = pair[0];
          columns.query[step][1] = pair[1];
        } else {
          shared_.query[(block_.first_column / 8 + n) * kSteps + step][block_.lane] = {pair[0], pair[1]};
        }
      }
    }
    __syncwarp();
    if (block_.lane == 0) ptx::mbarrier_arrive(block_.query_empty + slot * 8);
    if constexpr (kColumnTiles > 1) ptx::named_barrier(1, K::kConsumerThreads);
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = block_.first_column + n * 8 + 2 * t + j;
        float others = 1.0F;
        if constexpr (kFp8) {
          others = kColumnTiles > 1 ? shared_.query_factors[column] : __shfl_sync(~0U, factor, (2 * t + j) * 4);
        }
        columns.scale[n][j] = base / others;
        columns.limit[n][j] =
            first_limit + (s.query_len == 1 ? 0 : min((s.first_query + column) / p.group, s.query_len - 1));
      }
    }
  }

 private:
  // Loads the elements of a step: two pairs, which are zero if the lane's column has no query. Their order matches the
  // fragments of the keys: four bytes of an FP8 key are two halves of a step.
  __device__ void load_pairs(const char* row, int step, int t, uint32_t (&pair)[2]) const {
    pair[0] = pair[1] = 0;
    if (row == nullptr) return;
    row += step * 32;
    if constexpr (kFp8) {
      const uint2 both = *reinterpret_cast<const uint2*>(row + 8 * t);
      pair[0] = both.x;
      pair[1] = both.y;
    } else {
      pair[0] = *reinterpret_cast<const uint32_t*>(row + 4 * t);
      pair[1] = *reinterpret_cast<const uint32_t*>(row + 4 * t + 16);
    }
  }

  // Converts a query to float16, scaled by the power of two that brings its largest element into [1, 2), so that it
  // keeps its precision and range. Returns the power.
  __device__ float scale_to_half(uint32_t (&pairs)[kSteps][2]) const {
    float largest = 0.0F;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 x = to_floats(pairs[step][i]);
        largest = fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y)));
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 2));
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23);
    const float factor =
        exponent < 1 || exponent > 253 ? 1.0F : __uint_as_float(static_cast<uint32_t>(254 - exponent) << 23);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 x = to_floats(pairs[step][i]);
        pairs[step][i] = ptx::pack<half>(x.x * factor, x.y * factor);
      }
    }
    return factor;
  }

  __device__ float2 to_floats(uint32_t pair) const {
    if (block_.p.query_is_bfloat16) return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
    return __half22float2(*reinterpret_cast<const half2*>(&pair));
  }

  const Block& block_;
  typename K::Shared& shared_;
};

}  // namespace kvservice::decode
