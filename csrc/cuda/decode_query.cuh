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

// Loads the queries of a work tile into registers or, if a warp has several column tiles, into shared memory.
template <typename K>
class Query {
  static constexpr bool kFp8 = K::kFp8;
  static constexpr int kHead = K::kHead;
  static constexpr int kSteps = K::kSteps;
  static constexpr int kColumnTiles = K::kColumnTiles;

 public:
  __device__ Query(const Block& block, typename K::Shared& shared) : block_(block), shared_(shared) {}

  __device__ void load(const WorkTile& s, Columns<K>& columns) {
    const Params& p = block_.p;
    const int g = block_.lane / 4, t = block_.lane % 4;
    const float base = p.scale * (p.k_scale != nullptr ? p.k_scale[s.kv_head] : 1.0F) *
                       (p.soft_cap == 0.0F ? 1.4426950408889634F : 1.0F);
    const int first_limit = s.context - s.query_len + 1;
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      const int column = block_.first_column + n * 8 + g;
      const int64_t row = column < used_columns(p, s) ? output_row(p, s, column) : -1;
      float factor = 1.0F;
      if constexpr (kFp8) factor = query_factor(row, t);
      if (kColumnTiles == 1 || n == block_.token_warp) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          uint32_t pair[2];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            pair[half] = row < 0 ? 0U : load_pair(row * kHead + dimension(step, half, t), factor);
          }
          if constexpr (kColumnTiles == 1) {
            columns.query[step][0] = pair[0];
            columns.query[step][1] = pair[1];
          } else {
            shared_.query[(block_.first_column / 8 + n) * kSteps + step][block_.lane] = {pair[0], pair[1]};
          }
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float others = __shfl_sync(~0U, factor, (2 * t + j) * 4);
        const int index = s.first_query + block_.first_column + n * 8 + 2 * t + j;
        columns.scale[n][j] = base / others;
        columns.limit[n][j] = first_limit + min(index / p.group, s.query_len - 1);
      }
    }
    if constexpr (kColumnTiles > 1) ptx::named_barrier(1, K::kConsumerThreads);
  }

 private:
  // Returns the first of two adjacent dimensions that a lane holds in half `half` of step `step`. The order matches the
  // fragments of the keys: four bytes of an FP8 key are two halves of a step.
  __device__ static int dimension(int step, int half, int t) {
    return step * 16 + (kFp8 ? 4 * t + 2 * half : 2 * t + 8 * half);
  }

  __device__ uint32_t load_pair(int64_t index, float factor) const {
    const Params& p = block_.p;
    if constexpr (!kFp8) {
      return *reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(p.query) + index);
    } else {
      return ptx::pack<half>(load_query(p, index) * factor, load_query(p, index + 1) * factor);
    }
  }

  // Returns the power of two that scales the largest element of a query into [1, 2), so that the query keeps its
  // precision and range in float16.
  __device__ float query_factor(int64_t row, int t) const {
    float largest = 0.0F;
    if (row >= 0) {
      for (int step = 0; step < kSteps; ++step) {
        for (int i = 0; i < 4; ++i) {
          largest = fmaxf(largest, fabsf(load_query(block_.p, row * kHead + step * 16 + 4 * t + i)));
        }
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 2));
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23);
    return exponent < 1 || exponent > 253 ? 1.0F : __uint_as_float(static_cast<uint32_t>(254 - exponent) << 23);
  }

  const Block& block_;
  typename K::Shared& shared_;
};

}  // namespace kvservice::decode
