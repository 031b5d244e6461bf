// Copy engines move whole blocks over the link and take nothing from the kernels that compute meanwhile. They need a
// microsecond or two of the driver for each copy, and a block has as many pieces as the model has layers: so a kernel
// gathers and scatters the pieces within device memory, in two halves of a stage, one of which the engines use while
// the kernel works on the other.
#include "cuda/move_blocks.h"

#include <algorithm>

#include "errors.h"

namespace kvservice {
namespace {

constexpr int kMaxBlocks = 480;  // launch parameters are limited to 4 KiB
constexpr int kThreads = 256;
constexpr int kVectorsPerThread = 8;
constexpr int kTileVectors = kThreads * kVectorsPerThread;
constexpr int64_t kVectorBytes = sizeof(uint4);
constexpr int64_t kTileBytes = kTileVectors * kVectorBytes;
constexpr int64_t kMaxBlockBytes = int64_t{1} << 34;

struct BlockIds {
  int64_t ids[kMaxBlocks];
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

// One launch moves the vectors from `first` on of each of `num_blocks` blocks, which lie one after the other in the
// stage.
struct Staged {
  uint4* memory;
  int64_t first;
  int64_t num_vectors;
  int64_t block_vectors;
  int num_blocks;
};

// `sums` are those of the first block; only blocks that are saved have them.
template <bool kSaves>
__global__ void __launch_bounds__(kThreads)
    move_pieces(Pieces pieces, Staged staged, uint64_t* sums, const __grid_constant__ BlockIds blocks) {
  const int64_t num_stripes = (staged.block_vectors + 1) / 2;
  const int64_t tiles = (staged.num_vectors + kTileVectors - 1) / kTileVectors;
  for (int64_t unit = blockIdx.x; unit < tiles * staged.num_blocks; unit += gridDim.x) {
    const auto block = static_cast<int>(unit / tiles);
    const int64_t begin = unit % tiles * kTileVectors + threadIdx.x;
    uint4* const stage = staged.memory + block * staged.num_vectors;
    uint4* device[kVectorsPerThread];
    uint4 data[kVectorsPerThread];
    const auto for_each = [&](auto work) {
#pragma unroll
      for (int i = 0; i < kVectorsPerThread; ++i) {
        if (begin + i * kThreads < staged.num_vectors) work(i, begin + i * kThreads);
      }
    };
    for_each([&](int i, int64_t vector) {
      device[i] = pieces.find(blocks.ids[block], (staged.first + vector) * kVectorBytes);
    });
    if constexpr (kSaves) {
      for_each([&](int i, int64_t) { data[i] = __ldcs(device[i]); });
      for_each([&](int i, int64_t vector) { stage[vector] = data[i]; });
      PartialSums partial;
      for_each([&](int i, int64_t vector) {
        partial.add(data[i], static_cast<uint32_t>(num_stripes - (staged.first + vector) / 2));
      });
      partial.add_to(sums + block * kSumsPerBlock);
    } else {
      for_each([&](int i, int64_t vector) { data[i] = __ldcs(stage + vector); });
      for_each([&](int i, int64_t) { *device[i] = data[i]; });
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

// The bytes from `begin` to `end` of `num_blocks` blocks of a batch, from block `first` of it on.
struct Part {
  int64_t first;
  int64_t num_blocks;
  int64_t begin;
  int64_t end;

  int64_t width() const { return end - begin; }
};

// Calls `work` with parts of at most `most` bytes: several whole blocks, or a piece of one.
template <class Work>
void for_each_part(const MoveBlocksParams& p, int64_t most, Work work) {
  const int64_t blocks = std::max<int64_t>(1, most / p.block_bytes);
  const int64_t width = std::min(most, p.block_bytes);
  for (int64_t first = 0; first < p.num_copies; first += blocks) {
    for (int64_t begin = 0; begin < p.block_bytes; begin += width) {
      work(Part{first, std::min(blocks, p.num_copies - first), begin, std::min(begin + width, p.block_bytes)});
    }
  }
}

template <bool kSaves>
void move_to_or_from_stage(const MoveBlocksParams& p, const Part& part, void* stage, uint64_t* sums,
                           cudaStream_t stream) {
  const Pieces pieces = {p.pieces, p.pieces + p.num_pieces, p.pieces + 2 * p.num_pieces,
                         static_cast<int>(p.num_pieces)};
  Staged staged = {static_cast<uint4*>(stage), part.begin / kVectorBytes, part.width() / kVectorBytes,
                   p.block_bytes / kVectorBytes, 0};
  const int64_t tiles = (staged.num_vectors + kTileVectors - 1) / kTileVectors;
  BlockIds blocks = {};
  for (int64_t i = 0; i < part.num_blocks; i += kMaxBlocks) {
    staged.num_blocks = static_cast<int>(std::min<int64_t>(kMaxBlocks, part.num_blocks - i));
    std::copy_n(p.block_ids + part.first + i, staged.num_blocks, blocks.ids);
    move_pieces<kSaves><<<static_cast<unsigned>(tiles * staged.num_blocks), kThreads, 0, stream>>>(
        pieces, staged, kSaves ? sums + (part.first + i) * kSumsPerBlock : nullptr, blocks);
    check_launch("move_pieces");
    staged.memory += staged.num_blocks * staged.num_vectors;
  }
}

// Copies a part between the stage and host memory. Blocks that follow each other there are one copy.
void copy_over_link(const MoveBlocksParams& p, const Part& part, char* stage, bool to_device, cudaStream_t stream) {
  for (int64_t i = part.first, stop = part.first + part.num_blocks, next; i < stop; i = next) {
    const uint64_t address = p.addresses[i] + static_cast<uint64_t>(part.begin);
    for (next = i + 1; next < stop && part.width() == p.block_bytes; ++next) {
      if (p.addresses[next] != p.addresses[next - 1] + static_cast<uint64_t>(p.block_bytes)) break;
    }
    char* const staged = stage + (i - part.first) * part.width();
    auto* const host = reinterpret_cast<char*>(address);
    const auto num_bytes = static_cast<size_t>((next - i) * part.width());
    check_cuda(to_device ? cudaMemcpyAsync(staged, host, num_bytes, cudaMemcpyHostToDevice, stream)
                         : cudaMemcpyAsync(host, staged, num_bytes, cudaMemcpyDeviceToHost, stream),
               "cudaMemcpyAsync");
  }
}

void make_wait(cudaStream_t stream, cudaEvent_t event) {
  check_cuda(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
}

void record(cudaEvent_t event, cudaStream_t stream) { check_cuda(cudaEventRecord(event, stream), "cudaEventRecord"); }

}  // namespace

BlockStage::BlockStage(int device, int64_t num_bytes) : device_(device), half_bytes_(num_bytes / 2) {
  require(half_bytes_ > 0 && half_bytes_ % kTileBytes == 0, "num_bytes", "is not a positive multiple of 64 KiB");
  const DeviceScope scope(device);
  try {
    check_cuda(cudaStreamCreateWithFlags(&link_, cudaStreamNonBlocking), "cudaStreamCreate");
    for (Half& half : halves_) {
      check_cuda(cudaMalloc(&half.memory, static_cast<size_t>(half_bytes_)), "cudaMalloc");
      check_cuda(cudaEventCreateWithFlags(&half.filled, cudaEventDisableTiming), "cudaEventCreate");
      check_cuda(cudaEventCreateWithFlags(&half.emptied, cudaEventDisableTiming | cudaEventBlockingSync),
                 "cudaEventCreate");
    }
  } catch (...) {
    free();
    throw;
  }
}

BlockStage::~BlockStage() {
  const DeviceScope scope(device_);
  free();
}

void BlockStage::free() {
  for (Half& half : halves_) {
    if (half.memory != nullptr) clear_error(cudaFree(half.memory));
    if (half.filled != nullptr) clear_error(cudaEventDestroy(half.filled));
    if (half.emptied != nullptr) clear_error(cudaEventDestroy(half.emptied));
  }
  if (link_ != nullptr) clear_error(cudaStreamDestroy(link_));
}

BlockStage::Half& BlockStage::next() {
  next_ = 1 - next_;
  return halves_[next_];
}

void BlockStage::load(const MoveBlocksParams& params, cudaStream_t stream) {
  check(params);
  const DeviceScope scope(device_);
  const std::lock_guard lock(mutex_);
  for_each_part(params, half_bytes_, [&](const Part& part) {
    Half& half = next();
    make_wait(link_, half.emptied);
    copy_over_link(params, part, static_cast<char*>(half.memory), true, link_);
    record(half.filled, link_);
    make_wait(stream, half.filled);
    move_to_or_from_stage<false>(params, part, half.memory, nullptr, stream);
    record(half.emptied, stream);
  });
}

void BlockStage::save(const MoveBlocksParams& params, const BlockChecksums& checksums, cudaStream_t stream) {
  check(params);
  if (params.num_copies == 0) return;
  const DeviceScope scope(device_);
  const std::lock_guard lock(mutex_);
  const auto num_bytes = static_cast<size_t>(params.num_copies * kSumsPerBlock) * sizeof(uint64_t);
  check_cuda(cudaMemsetAsync(checksums.sums, 0, num_bytes, stream), "cudaMemsetAsync");
  for_each_part(params, half_bytes_, [&](const Part& part) {
    Half& half = next();
    // The driver's queues are short. Were they full of copies, it would hold up every thread that uses the device.
    check_cuda(cudaEventSynchronize(half.emptied), "cudaEventSynchronize");
    move_to_or_from_stage<true>(params, part, half.memory, checksums.sums, stream);
    record(half.filled, stream);
    make_wait(link_, half.filled);
    copy_over_link(params, part, static_cast<char*>(half.memory), false, link_);
    record(half.emptied, link_);
  });
  const auto grid = static_cast<unsigned>((params.num_copies + kThreads - 1) / kThreads);
  finish_checksums<<<grid, kThreads, 0, stream>>>(checksums.sums, params.block_bytes, params.num_copies,
                                                  checksums.values);
  check_launch("finish_checksums");
  make_wait(stream, halves_[next_].emptied);  // the last copy over the link
}

void BlockStage::synchronize() {
  const DeviceScope scope(device_);
  check_cuda(cudaStreamSynchronize(link_), "cudaStreamSynchronize");
}

}  // namespace kvservice
