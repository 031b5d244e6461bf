// The kernel reads and writes host memory itself. A copy engine needs microseconds for each piece, and a block has as
// many pieces as the model has layers.
#include "cuda/move_blocks.h"

#include <algorithm>

#include "errors.h"

namespace kvservice {
namespace {

constexpr int kMaxCopies = 240;  // launch parameters are limited to 4 KiB
constexpr int kThreads = 256;
constexpr int kVectorsPerThread = 8;
constexpr int kTileVectors = kThreads * kVectorsPerThread;
// Enough to saturate the host link. More would only occupy multiprocessors.
constexpr int64_t kThreadBlocks = 16;
constexpr int64_t kVectorBytes = sizeof(uint4);
constexpr int64_t kMaxBlockBytes = int64_t{1} << 34;

struct Copies {
  uint64_t addresses[kMaxCopies];
  int64_t block_ids[kMaxCopies];
};

struct Pieces {
  const int64_t* starts;
  const int64_t* strides;
  const int64_t* ends;
  int count;

  // Returns the address of byte `offset` of a block.
  __device__ uint4* find(int64_t block_id, int64_t offset) const {
    int first = 0, last = count - 1;
    while (first < last) {
      const int middle = (first + last) / 2;
      if (ends[middle] > offset) {
        last = middle;
      } else {
        first = middle + 1;
      }
    }
    const int64_t begin = first == 0 ? 0 : ends[first - 1];
    return reinterpret_cast<uint4*>(starts[first] + block_id * strides[first] + offset - begin);
  }
};

template <bool kToDevice>
__global__ void __launch_bounds__(kThreads)
    move_blocks(Pieces pieces, int64_t num_vectors, int num_copies, const __grid_constant__ Copies copies) {
  const int64_t tiles = (num_vectors + kTileVectors - 1) / kTileVectors;
  for (int64_t unit = blockIdx.x; unit < tiles * num_copies; unit += gridDim.x) {
    const auto copy = static_cast<int>(unit / tiles);
    const int64_t first = unit % tiles * kTileVectors + threadIdx.x;
    auto* const host = reinterpret_cast<uint4*>(copies.addresses[copy]);
    uint4* device[kVectorsPerThread];
    uint4 data[kVectorsPerThread];
    const auto for_each = [&](auto work) {
#pragma unroll
      for (int i = 0; i < kVectorsPerThread; ++i) {
        if (first + i * kThreads < num_vectors) work(i, first + i * kThreads);
      }
    };
    const auto find = [&](int i, int64_t vector) {
      device[i] = pieces.find(copies.block_ids[copy], vector * kVectorBytes);
    };
    if constexpr (kToDevice) {
      for_each([&](int i, int64_t vector) { data[i] = __ldcs(host + vector); });
      for_each(find);
      for_each([&](int i, int64_t) { *device[i] = data[i]; });
    } else {
      for_each(find);
      for_each([&](int i, int64_t) { data[i] = __ldcs(device[i]); });
      for_each([&](int i, int64_t vector) { __stcs(host + vector, data[i]); });
    }
  }
}

void check(const MoveBlocksParams& p) {
  require(p.num_pieces > 0 && p.num_pieces < INT32_MAX, "num_pieces", "is out of range");
  require(p.block_bytes > 0 && p.block_bytes <= kMaxBlockBytes, "block_bytes", "is out of range");
  require(p.block_bytes % kVectorBytes == 0, "block_bytes", "is not a multiple of 16");
  for (int64_t i = 0; i < p.num_copies; ++i) {
    require(p.addresses[i] != 0 && p.addresses[i] % kVectorBytes == 0, "addresses", "are not aligned to 16 bytes");
    require(p.block_ids[i] >= 0, "block_ids", "are negative");
  }
}

template <bool kToDevice>
void launch(const MoveBlocksParams& p, cudaStream_t stream) {
  check(p);
  const Pieces pieces = {p.pieces, p.pieces + p.num_pieces, p.pieces + 2 * p.num_pieces,
                         static_cast<int>(p.num_pieces)};
  const int64_t num_vectors = p.block_bytes / kVectorBytes;
  const int64_t tiles = (num_vectors + kTileVectors - 1) / kTileVectors;
  Copies copies = {};
  for (int64_t first = 0; first < p.num_copies; first += kMaxCopies) {
    const int64_t count = std::min<int64_t>(kMaxCopies, p.num_copies - first);
    std::copy_n(p.addresses + first, count, copies.addresses);
    std::copy_n(p.block_ids + first, count, copies.block_ids);
    const auto grid = static_cast<unsigned>(std::min(kThreadBlocks, tiles * count));
    move_blocks<kToDevice><<<grid, kThreads, 0, stream>>>(pieces, num_vectors, static_cast<int>(count), copies);
    check_launch("move_blocks");
  }
}

}  // namespace

void load_blocks_cuda(const MoveBlocksParams& params, cudaStream_t stream) { launch<true>(params, stream); }

void save_blocks_cuda(const MoveBlocksParams& params, cudaStream_t stream) { launch<false>(params, stream); }

}  // namespace kvservice
