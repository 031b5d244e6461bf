// A kernel reads and writes host memory itself, and is launched at once; but others that compute beside it need all
// SMs, and take half as long again. Copy engines take nothing from them. They need a microsecond for each
// piece, and a block has as many pieces as the model has layers, so they copy large pieces only.
#include "cuda/move_blocks.h"

#include <algorithm>
#include <vector>

#include "errors.h"

namespace kvservice {
namespace {

constexpr int kMaxCopies = 240;  // launch parameters are limited to 4 KiB
constexpr int kThreads = 256;
constexpr int kVectorsPerThread = 8;
constexpr int kTileVectors = kThreads * kVectorsPerThread;
// Enough to saturate the host link. More would only occupy SMs.
constexpr int64_t kThreadBlocks = 16;
// Checksums alone do not wait for the link: all SMs end them soon. A few would need long, and kernels beside
// them would wait for these.
constexpr int64_t kSumsThreadBlocks = 1 << 14;
// From this size on, copy engines keep the host link busy.
constexpr int64_t kEnginePieceBytes = 16 << 10;
// The first pieces are copied while the driver takes the next.
constexpr int64_t kPiecesPerCall = 512;
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

// The part of a thread in a block's sums, see store/checksum.h. All its vectors are halves of stripes with the same
// parity, so it has four lanes.
struct PartialSums {
  static constexpr int kLanes = 4;
  uint64_t sums[kLanes] = {};
  uint64_t weighted[kLanes] = {};

  __device__ void add(uint4 data, uint32_t weight) {
    const uint32_t words[kLanes] = {data.x, data.y, data.z, data.w};
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      sums[lane] += words[lane];
      weighted[lane] += uint64_t{weight} * words[lane];
    }
  }

  // Adds the parts of a warp to those of the block. All threads of the warp call it.
  __device__ void add_to(uint64_t* of_block) {
    const unsigned parity = threadIdx.x % 2;
    uint64_t* const own = of_block + parity * 2 * kLanes;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      add_over_warp(sums[lane], own + 2 * lane);
      add_over_warp(weighted[lane], own + 2 * lane + 1);
    }
  }

 private:
  __device__ static void add_over_warp(uint64_t value, uint64_t* to) {
#pragma unroll
    for (int distance = 16; distance > 1; distance /= 2) value += __shfl_xor_sync(~0U, value, distance);
    if (threadIdx.x % 32 < 2) atomicAdd(reinterpret_cast<unsigned long long*>(to), value);
  }
};

constexpr int64_t kSumsPerBlock = 4 * PartialSums::kLanes;

__device__ uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

__global__ void __launch_bounds__(kThreads)
    finish_checksums(const uint64_t* sums, int64_t block_bytes, int64_t num_blocks, uint64_t* values) {
  const int64_t block = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (block >= num_blocks) return;
  auto value = static_cast<uint64_t>(block_bytes);
  for (int64_t i = 0; i < kSumsPerBlock; ++i) value = mix(value ^ sums[block * kSumsPerBlock + i]);
  values[block] = value;
}

enum class Way { kToDevice, kToHost, kSumsOnly };

// `sums` are those of the first copy; only blocks that are saved have them.
template <Way kWay>
__global__ void __launch_bounds__(kThreads) move_blocks(Pieces pieces, int64_t num_vectors, int num_copies,
                                                        uint64_t* sums, const __grid_constant__ Copies copies) {
  const int64_t num_stripes = (num_vectors + 1) / 2;
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
    if constexpr (kWay == Way::kToDevice) {
      for_each([&](int i, int64_t vector) { data[i] = __ldcs(host + vector); });
      for_each(find);
      for_each([&](int i, int64_t) { *device[i] = data[i]; });
    } else {
      for_each(find);
      for_each([&](int i, int64_t) { data[i] = __ldcs(device[i]); });
      if constexpr (kWay == Way::kToHost) {
        for_each([&](int i, int64_t vector) { __stcs(host + vector, data[i]); });
      }
      PartialSums partial;
      for_each([&](int i, int64_t vector) { partial.add(data[i], static_cast<uint32_t>(num_stripes - vector / 2)); });
      partial.add_to(sums + copy * kSumsPerBlock);
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

template <Way kWay>
void launch(const MoveBlocksParams& p, uint64_t* sums, cudaStream_t stream) {
  const Pieces pieces = {p.pieces, p.pieces + p.num_pieces, p.pieces + 2 * p.num_pieces,
                         static_cast<int>(p.num_pieces)};
  const int64_t num_vectors = p.block_bytes / kVectorBytes;
  const int64_t tiles = (num_vectors + kTileVectors - 1) / kTileVectors;
  Copies copies = {};
  for (int64_t first = 0; first < p.num_copies; first += kMaxCopies) {
    const int64_t count = std::min<int64_t>(kMaxCopies, p.num_copies - first);
    std::copy_n(p.addresses + first, count, copies.addresses);
    std::copy_n(p.block_ids + first, count, copies.block_ids);
    const int64_t most = kWay == Way::kSumsOnly ? kSumsThreadBlocks : kThreadBlocks;
    const auto grid = static_cast<unsigned>(std::min(most, tiles * count));
    move_blocks<kWay><<<grid, kThreads, 0, stream>>>(pieces, num_vectors, static_cast<int>(count),
                                                     sums == nullptr ? nullptr : sums + first * kSumsPerBlock, copies);
    check_launch("move_blocks");
  }
}

// Copies blocks by the copy engines. Returns false if the pieces are too small, or the driver too old.
bool copy_by_engines(const MoveBlocksParams& p, bool to_device, cudaStream_t stream) {
#if CUDART_VERSION >= 13000
  if (p.host_pieces == nullptr || p.block_bytes / p.num_pieces < kEnginePieceBytes) return false;
  const int64_t* const starts = p.host_pieces;
  const int64_t* const strides = starts + p.num_pieces;
  const int64_t* const ends = strides + p.num_pieces;
  const int64_t count = p.num_copies * p.num_pieces;
  std::vector<void*> device, host;
  std::vector<size_t> sizes;
  for (std::vector<void*>* list : {&device, &host}) list->reserve(kPiecesPerCall);
  sizes.reserve(kPiecesPerCall);
  cudaMemcpyAttributes attributes = {};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  for (int64_t first = 0; first < count; first += kPiecesPerCall) {
    device.clear();
    host.clear();
    sizes.clear();
    for (int64_t i = first; i < std::min(count, first + kPiecesPerCall); ++i) {
      const int64_t copy = i / p.num_pieces, piece = i % p.num_pieces;
      const int64_t begin = piece == 0 ? 0 : ends[piece - 1];
      device.push_back(reinterpret_cast<void*>(starts[piece] + p.block_ids[copy] * strides[piece]));
      host.push_back(reinterpret_cast<void*>(p.addresses[copy] + static_cast<uint64_t>(begin)));
      sizes.push_back(static_cast<size_t>(ends[piece] - begin));
    }
    const std::vector<void*>&to = to_device ? device : host, &from = to_device ? host : device;
    size_t attributes_of = 0;
    const cudaError_t code = cudaMemcpyBatchAsync(to.data(), from.data(), sizes.data(), sizes.size(), &attributes,
                                                  &attributes_of, 1, stream);
    if (first == 0 && (code == cudaErrorNotSupported || code == cudaErrorCallRequiresNewerDriver)) {
      clear_error(code);
      return false;
    }
    check_cuda(code, "cudaMemcpyBatchAsync");
  }
  return true;
#else
  (void)p;
  (void)to_device;
  (void)stream;
  return false;
#endif
}

}  // namespace

void load_blocks_cuda(const MoveBlocksParams& params, cudaStream_t stream) {
  check(params);
  if (!copy_by_engines(params, true, stream)) launch<Way::kToDevice>(params, nullptr, stream);
}

void save_blocks_cuda(const MoveBlocksParams& params, const BlockChecksums& checksums, cudaStream_t stream) {
  check(params);
  if (params.num_copies == 0) return;
  const auto num_bytes = static_cast<size_t>(params.num_copies * kSumsPerBlock) * sizeof(uint64_t);
  check_cuda(cudaMemsetAsync(checksums.sums, 0, num_bytes, stream), "cudaMemsetAsync");
  if (copy_by_engines(params, false, stream)) {
    launch<Way::kSumsOnly>(params, checksums.sums, stream);
  } else {
    launch<Way::kToHost>(params, checksums.sums, stream);
  }
  const auto grid = static_cast<unsigned>((params.num_copies + kThreads - 1) / kThreads);
  finish_checksums<<<grid, kThreads, 0, stream>>>(checksums.sums, params.block_bytes, params.num_copies,
                                                  checksums.values);
  check_launch("finish_checksums");
}

}  // namespace kvservice
