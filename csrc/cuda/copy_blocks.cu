// Copies whole blocks between pools. Within one device: one kernel for up to kMaxPairs blocks, with the block ids in
// its launch parameters, so that nothing is uploaded first. Between host and device: asynchronous copies, which the
// copy engines run in parallel with kernels.
#include <algorithm>

#include "cuda/copy_blocks.h"
#include "errors.h"

namespace kvservice {
namespace {

constexpr int kMaxPairs = 400;  // launch parameters are limited to 4 KiB
constexpr int kThreads = 256;
constexpr int kVectorsPerThread = 8;
constexpr int64_t kVectorBytes = sizeof(uint4);
constexpr int64_t kMaxGridX = 1 << 16;

struct Pairs {
  int32_t src[kMaxPairs];
  int32_t dst[kMaxPairs];
};

__global__ void __launch_bounds__(kThreads)
    copy_pairs(const char* src, char* dst, int64_t block_bytes, const __grid_constant__ Pairs pairs) {
  const auto* from = reinterpret_cast<const uint4*>(src + pairs.src[blockIdx.y] * block_bytes);
  auto* to = reinterpret_cast<uint4*>(dst + pairs.dst[blockIdx.y] * block_bytes);
  const int64_t count = block_bytes / kVectorBytes;
  constexpr int64_t kStep = int64_t{kThreads} * kVectorsPerThread;
  for (int64_t first = blockIdx.x * kStep + threadIdx.x; first < count; first += gridDim.x * kStep) {
    uint4 data[kVectorsPerThread];
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
      if (first + i * kThreads < count) data[i] = __ldcs(from + first + i * kThreads);
    }
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
      if (first + i * kThreads < count) __stcs(to + first + i * kThreads, data[i]);
    }
  }
}

void copy_within_device(const CopyBlocksParams& p, cudaStream_t stream) {
  constexpr int64_t kBytesPerBlock = kVectorBytes * kThreads * kVectorsPerThread;
  const int64_t width = std::min((p.block_bytes + kBytesPerBlock - 1) / kBytesPerBlock, kMaxGridX);
  Pairs pairs = {};
  for (int64_t first = 0; first < p.num_copies; first += kMaxPairs) {
    const int64_t count = std::min<int64_t>(kMaxPairs, p.num_copies - first);
    std::copy_n(p.src_ids + first, count, pairs.src);
    std::copy_n(p.dst_ids + first, count, pairs.dst);
    const dim3 grid(static_cast<unsigned>(width), static_cast<unsigned>(count));
    copy_pairs<<<grid, kThreads, 0, stream>>>(p.src, p.dst, p.block_bytes, pairs);
    check_launch("copy_blocks");
  }
}

// Returns the number of copies, from `first` on, that form one contiguous copy: ids are consecutive on both sides.
int64_t range_length(const CopyBlocksParams& p, int64_t first) {
  int64_t length = 1;
  while (first + length < p.num_copies && p.src_ids[first + length] == p.src_ids[first] + length &&
         p.dst_ids[first + length] == p.dst_ids[first] + length) {
    ++length;
  }
  return length;
}

void copy_ranges(const CopyBlocksParams& p, cudaStream_t stream) {
  for (int64_t first = 0, length; first < p.num_copies; first += length) {
    length = range_length(p, first);
    check_cuda(cudaMemcpyAsync(p.dst + p.dst_ids[first] * p.block_bytes, p.src + p.src_ids[first] * p.block_bytes,
                               static_cast<size_t>(length * p.block_bytes), cudaMemcpyDefault, stream),
               "cudaMemcpyAsync");
  }
}

cudaPointerAttributes attributes_of(const void* pointer, const char* field) {
  cudaPointerAttributes attributes = {};
  check_cuda(cudaPointerGetAttributes(&attributes, pointer), "cudaPointerGetAttributes");
  // A copy from or to pageable memory would block until the device is done.
  require(attributes.type != cudaMemoryTypeUnregistered, field, "is host memory that is not page-locked");
  return attributes;
}

}  // namespace

void copy_blocks_cuda(const CopyBlocksParams& p, cudaStream_t stream) {
  require(p.block_bytes > 0, "block_bytes", "is not positive");
  if (p.num_copies == 0) return;
  const cudaPointerAttributes src = attributes_of(p.src, "src"), dst = attributes_of(p.dst, "dst");
  if (src.type != cudaMemoryTypeDevice || dst.type != cudaMemoryTypeDevice || src.device != dst.device) {
    copy_ranges(p, stream);
    return;
  }
  require(p.block_bytes % kVectorBytes == 0, "block_bytes", "is not a multiple of 16");
  require((reinterpret_cast<uintptr_t>(p.src) | reinterpret_cast<uintptr_t>(p.dst)) % kVectorBytes == 0, "src",
          "pools are not aligned to 16 bytes");
  copy_within_device(p, stream);
}

}  // namespace kvservice
