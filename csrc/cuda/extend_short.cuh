// The Hopper extend kernel for short contexts. There a tile is a chain of waits (its number, block ids, keys and
// queries, two products, its output) with little work between them. So a thread block is one warpgroup that does
// everything itself, with memory for one tile, and the thread blocks of an SM fill each other's waits.
#pragma once

#include <type_traits>

#include "cuda/extend_convert.cuh"
#include "cuda/extend_queries.cuh"
#include "cuda/extend_wgmma_rows.cuh"
#include "cuda/launch.h"

namespace kvservice {
namespace extend {

template <int kHead>
struct ShortShape {
  static constexpr int kRows = kShortRows, kKeys = 64;
  static_assert(kRows == kWarpgroupRows, "the rows of one product");
  static constexpr int kTileBytes = kHead * kKeys * 2;  // of queries, keys or values
  static constexpr int kKeysOffset = kTileBytes, kValuesOffset = 2 * kTileBytes, kSharedBytes = 3 * kTileBytes;
  static_assert(kRows == kKeys, "queries take as much memory as keys");
  static constexpr int kBlocksPerSm = kHead > 128 ? 2 : kHead > 64 ? 3 : 4;
};

#ifdef KVSERVICE_WGMMA

// Brings queries, keys and values of a tile to shared memory, in groups of copies: the queries and first keys, then
// values and keys by turns.
template <int kHead, int kShift>
class ShortLoader {
  using Shape = ShortShape<kHead>;

 public:
  __device__ ShortLoader(const Args& a, const Tile& tile, uint32_t address)
      : a_(a), tile_(tile), address_(address), loader_(a, tile) {}

  __device__ void load_first(float* /*row_scales*/) {
    const int key = tile_.first_key;
    loader_.look_up_keys(key);
    loader_.look_up_values(key);
    QueryLoader<kHead, Shape::kRows>::copy(a_, tile_, address_);
    load_keys(key);
    load_values(key);
  }

  __device__ void load_keys(int key) {
    loader_.load_keys(address_ + Shape::kKeysOffset, loader_.keys_at(key));
    commit_copies();
    loader_.look_up_keys(key + Shape::kKeys);
  }

  __device__ void load_values(int key) {
    loader_.load_values(address_ + Shape::kValuesOffset, loader_.values_at(key));
    commit_copies();
    loader_.look_up_values(key + Shape::kKeys);
  }

 private:
  const Args& a_;
  const Tile& tile_;
  const uint32_t address_;
  KvLoader<kHead, Shape::kKeys, false, kShift> loader_;
};

// The same for FP8 pools. Everything is stored before the calls return.
template <int kHead>
class ShortConverter {
  using Shape = ShortShape<kHead>;
  using Converter = KvConverter<kHead, Shape::kKeys>;

 public:
  __device__ ShortConverter(const Args& a, const Tile& tile, uint32_t address)
      : a_(a), tile_(tile), address_(address), converter_(a, tile) {}

  __device__ void load_first(float* row_scales) {
    const int key = tile_.first_key;
    converter_.look_up(key);
    converter_.fetch_keys(key);
    QueryLoader<kHead, Shape::kRows>::convert(a_, tile_, address_, row_scales);
    if (Converter::kOverlaps) converter_.fetch_values(key);
    converter_.put_keys(address_ + Shape::kKeysOffset);
    if (!Converter::kOverlaps) converter_.fetch_values(key);
    converter_.put_values(address_ + Shape::kValuesOffset, key);
    __syncthreads();  // the scales are there
  }

  __device__ void load_keys(int key) {
    converter_.look_up(key);
    converter_.fetch_keys(key);
    converter_.put_keys(address_ + Shape::kKeysOffset);
  }

  __device__ void load_values(int key) {
    converter_.fetch_values(key);
    converter_.put_values(address_ + Shape::kValuesOffset, key);
  }

 private:
  const Args& a_;
  const Tile& tile_;
  const uint32_t address_;
  Converter converter_;
};

template <typename T, int kHead, bool kFloat8, int kShift>
class ShortBlock {
  using Shape = ShortShape<kHead>;
  static constexpr int kKeys = Shape::kKeys;
  using Loader = std::conditional_t<kFloat8, ShortConverter<kHead>, ShortLoader<kHead, kShift>>;

 public:
  using Scheduler = TileScheduler<Shape::kRows, kKeys, 8, false>;

  struct Storage {
    Tile tiles[2];  // this one and the next
    typename Scheduler::Sequences sequences;
    float row_scales[kFloat8 ? Shape::kRows : 1];
  };

  __device__ ShortBlock(const Args& a, uint32_t address, Storage* storage)
      : a_(a), address_(address), storage_(*storage), scheduler_(a, &storage->sequences), rows_(a) {}

  __device__ void run() {
    if (threadIdx.x < 32) {
      scheduler_.start();
      scheduler_.next(&storage_.tiles[0]);
    }
    for (int slot = 0;; slot ^= 1) {
      __syncthreads();
      const Tile tile = storage_.tiles[slot];
      if (tile.num_steps <= 0) break;
      attend(tile, &storage_.tiles[slot ^ 1]);
    }
    if (threadIdx.x == 0) reset_counters(a_);
  }

 private:
  __device__ void attend(const Tile& tile, Tile* after) {
    Loader loader(a_, tile, address_);
    loader.load_first(storage_.row_scales);
    if (a_.single) ptx::start_next();
    // While the copies are on their way.
    if (threadIdx.x < 32) scheduler_.next(after);
    rows_.start(tile, 0, storage_.row_scales);
    int key = tile.first_key;
    for (int left = tile.num_steps - 1;; --left, key += kKeys) {
      float logits[kKeys / 2], decay[2];
      uint32_t weights[kKeys / 16][4];
      wait_all_but_last();
      multiply_keys(logits);
      if (left > 0) {
        __syncthreads();
        loader.load_keys(key + kKeys);
      } else {
        commit_copies();  // an empty group, so that one group always comes after the one that is waited for
      }
      rows_.online_softmax(key, logits, decay);
      rows_.pack(logits, weights);
      if (key != tile.first_key) rows_.rescale(decay);
      wait_all_but_last();
      multiply_values(weights);
      if (left == 0) break;
      __syncthreads();
      loader.load_values(key + kKeys);
    }
    rows_.finish();
    if (rows_.any()) rows_.store();
  }

  // Waits for the copies of all threads but their last groups.
  static __device__ void wait_all_but_last() {
    wait_copies<1>();
    ptx::fence_proxy_async();
    __syncthreads();
  }

  __device__ void multiply_keys(float (&logits)[kKeys / 2]) const {
    const uint64_t queries = ptx::matrix_descriptor(address_, Shape::kRows * 16, 128);
    const uint64_t keys = ptx::matrix_descriptor(address_ + Shape::kKeysOffset, kKeys * 16, 128);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHead / 16; ++k) {
      ptx::wgmma<T>(logits, queries + k * (2 * Shape::kRows), keys + k * (2 * kKeys), k > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::fence_operand(logits);
  }

  __device__ void multiply_values(const uint32_t (&weights)[kKeys / 16][4]) {
    const uint64_t values = ptx::swizzled_32_descriptor(address_ + Shape::kValuesOffset);
    rows_.fence_accumulators();
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int part = 0; part < WgmmaShape<kHead>::kParts; ++part) {
        ptx::wgmma<T>(rows_.acc[part], weights[k], values + (k * kHead + part * WgmmaShape<kHead>::kColumns) * 2);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    rows_.fence_accumulators();
  }

  const Args& a_;
  const uint32_t address_;
  Storage& storage_;
  Scheduler scheduler_;
  WgmmaRows<T, kHead, kFloat8> rows_;
};

#endif  // KVSERVICE_WGMMA

#ifdef KVSERVICE_WGMMA
#define KVSERVICE_SHORT_BOUNDS __launch_bounds__(kWarpgroupThreads, ShortShape<kHead>::kBlocksPerSm)
#else
// The host recognizes by these bounds that there is no code for the device.
#define KVSERVICE_SHORT_BOUNDS __launch_bounds__(32)
#endif

// kShift is log2 of the block size if the head size is kHead; 0 supports any.
template <typename T, int kHead, bool kFloat8, int kShift>
__global__ void KVSERVICE_SHORT_BOUNDS extend_short(const __grid_constant__ Args a) {
#ifdef KVSERVICE_WGMMA
  extern __shared__ __align__(1024) char shared[];
  using Block = ShortBlock<T, kHead, kFloat8, kShift>;
  __shared__ typename Block::Storage storage;
  if (a.head_size < kHead) {
    for (int i = threadIdx.x * 16; i < ShortShape<kHead>::kSharedBytes; i += kWarpgroupThreads * 16) {
      *reinterpret_cast<uint4*>(shared + i) = make_uint4(0, 0, 0, 0);
    }
  }
  ptx::wait_for_previous();
  __syncthreads();
  Block(a, ptx::shared_address(shared), &storage).run();
#endif
}

template <typename T, int kHead, bool kFloat8, int kShift>
bool launch_short_as(const Args& args, cudaStream_t stream, int64_t tiles) {
  using Shape = ShortShape<kHead>;
  const auto kernel = extend_short<T, kHead, kFloat8, kShift>;
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes(extend_short)");
  if (attributes.maxThreadsPerBlock < kWarpgroupThreads) return false;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes),
             "cudaFuncSetAttribute(extend_short)");
  const int64_t resident = static_cast<int64_t>(current_device_properties().num_sms) * Shape::kBlocksPerSm;
  const int64_t blocks = tiles < resident ? tiles : resident;
  Args own = args;
  own.single = tiles <= resident;
  launch_early("extend_short", kernel, {blocks, kWarpgroupThreads, Shape::kSharedBytes}, stream, own);
  return true;
}

template <typename T, int kHead, bool kFloat8>
bool launch_short_with(const Args& args, cudaStream_t stream, int64_t tiles) {
  if constexpr (!kFloat8) {
    if (args.head_size == kHead && args.block_shift == 4) {
      return launch_short_as<T, kHead, false, 4>(args, stream, tiles);
    }
  }
  return launch_short_as<T, kHead, kFloat8, 0>(args, stream, tiles);
}

template <typename T, bool kFloat8>
bool launch_short_of(const Args& args, cudaStream_t stream, int64_t tiles) {
  if (args.head_size <= 64) return launch_short_with<T, 64, kFloat8>(args, stream, tiles);
  if (args.head_size <= 128) return launch_short_with<T, 128, kFloat8>(args, stream, tiles);
  return launch_short_with<T, 256, kFloat8>(args, stream, tiles);
}

}  // namespace extend
}  // namespace kvservice
