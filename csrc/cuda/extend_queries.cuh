// Copies the queries of a tile to shared memory, in the layout [head_size/8][kRows][8] that wgmma reads.
#pragma once

#include "cuda/extend_load.cuh"

namespace kvservice {
namespace extend {

template <int kHead, int kRows>
struct QueryLoader {
  // Calls body(row of the tile, its query or null) for this thread's rows. Eight lanes have adjacent rows, so that they
  // store 128 contiguous bytes; the others of the warp have other pieces of the same rows.
  template <typename Body>
  static __device__ void for_each_row(const Args& a, const Tile& tile, const Body& body) {
    constexpr int kStride = kLoadThreads / 32 * 8;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = ptx::opaque(a.group);
    const int rows = tile.num_rows(a);
    const int tokens_apart = token_of_row(a, kStride), heads_apart = kStride - tokens_apart * group;
    int row = warp * 8 + lane % 8;
    int token = token_of_row(a, tile.first_row + row), head = tile.first_row + row - token * group;
    const int64_t first = tile.first_token * a.num_heads + tile.kv_head * group;
    for (; row < kRows; row += kStride) {
      const int64_t index = first + static_cast<int64_t>(token) * a.num_heads + head;
      const char* query = static_cast<const char*>(a.query) + index * a.head_size * 2;
      body(row, tile.first_row + row < rows ? query : nullptr);
      token += tokens_apart;
      head += heads_apart;
      if (head >= group) {
        head -= group;
        ++token;
      }
    }
  }

  // Rows past the last of the sequence keep what was there: their results are not used.
  static __device__ void copy(const Args& a, const Tile& tile, uint32_t to) {
    for_each_row(a, tile, [&](int row, const char* query) {
      if (query == nullptr) return;
      const int first = threadIdx.x % 32 / 8, pieces = a.head_size / 8;
      const uint32_t dst = to + (first * kRows + row) * 16;
#pragma unroll
      for (int i = 0; i < kHead / 8; i += 4) {
        if (first + i < pieces) ptx::copy_16_async(dst + i * kRows * 16, query + (first + i) * 16);
      }
    });
  }

  // For FP8 pools: in float16, where a power of two scales each row into the range. Rows past the last are zero.
  static __device__ void convert(const Args& a, const Tile& tile, uint32_t to, float* row_scales) {
    for_each_row(a, tile, [&](int row, const char* query) {
      constexpr int kPieces = kHead / 32;  // per lane
      const int lane = threadIdx.x % 32;
      const auto* source = reinterpret_cast<const uint4*>(query);
      uint4 numbers[kPieces];
      float largest = 0.0F;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int piece = lane / 8 + 4 * i;
        numbers[i] = query != nullptr && piece < a.head_size / 8 ? source[piece] : make_uint4(0, 0, 0, 0);
        largest = fmaxf(largest, largest_of_8(numbers[i], a.dtype));
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 8));
      largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 16));
      const PowerOfTwo power(largest);
      if (lane < 8) row_scales[row] = power.up;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const uint32_t dst = to + ((lane / 8 + 4 * i) * kRows + row) * 16;
        ptx::store_shared_16(dst, scaled_halves(numbers[i], a.dtype, power.down));
      }
    });
  }
};

}  // namespace extend
}  // namespace kvservice
