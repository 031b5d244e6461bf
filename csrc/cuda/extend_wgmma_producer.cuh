// The producer warpgroup of the Hopper extend kernel.
#pragma once

#include "cuda/extend_convert.cuh"
#include "cuda/extend_wgmma.cuh"

namespace kvservice {
namespace extend {

#ifdef KVSERVICE_WGMMA

// Requests tiles from the scheduler and loads their queries, keys and values.
template <int kHead, bool kFloat8>
class WgmmaProducer {
  using Shape = WgmmaShape<kHead>;
  static constexpr int kKeys = Shape::kKeys;
  template <int kShift>
  using Loader = KvLoader<kHead, kKeys, false, kShift>;
  using Converter = KvConverter<kHead, kKeys>;
  using Scheduler = TileScheduler<kWgmmaRows, kKeys>;

 public:
  __device__ WgmmaProducer(const Args& a, char* shared, SharedStorage<kKeys>* storage)
      : a_(a), address_(ptx::shared_address(shared)), storage_(storage) {}

  __device__ void run() {
    if (threadIdx.x < 32) {
      Scheduler scheduler;
      scheduler.start(a_);
      if (threadIdx.x == 0) storage_->scheduler = scheduler;
    }
    int64_t index = blockIdx.x;
    int slot = 0;
    bool shared = false;
    for (; find(&index, slot); slot ^= 1) {
      const Tile& tile = storage_->producer_tiles[slot];
      load(tile, shared);
      shared = tile.first_row + kWarpgroupRows >= tile.num_rows(a_);
    }
    wait_query_empty();
    publish_tile(nullptr);
    arrive_when_copied(&storage_->query_full);
    if (threadIdx.x == 0) reset_counters(a_);
  }

 private:
  // Writes the next tile to storage_->producer_tiles[slot]; returns false if there is none.
  __device__ bool find(int64_t* index, int slot) {
    if (threadIdx.x < 32) {
      __syncwarp();
      Scheduler scheduler = storage_->scheduler;
      Tile tile;
      bool found, empty;
      do {
        found = scheduler.find(a_, *index, &tile);
        empty = found && Steps<kWgmmaRows, kKeys>(a_, tile).count <= 0;
        if (found && threadIdx.x == 0) *index = next_tile(a_);
        *index = __shfl_sync(~0U, *index, 0);
      } while (empty);
      if (threadIdx.x == 0) {
        storage_->scheduler = scheduler;
        storage_->producer_tiles[slot] = tile;
        storage_->producer_found[slot] = found;
      }
    }
    ptx::named_barrier(kProducerBarrier, kLoadThreads);
    return storage_->producer_found[slot];
  }

  __device__ void load(const Tile& tile, bool late) {
    const Steps<kWgmmaRows, kKeys> steps(a_, tile);
    if constexpr (kFloat8) {
      Converter converter(a_, tile, steps.begin, steps.end, threadIdx.x);
      load_converting(converter, tile, steps);
    } else {
      switch (a_.head_size == kHead ? a_.block_shift : 0) {
        case 4:
          return load_copying(Loader<4>(a_, tile, steps.begin, steps.end, threadIdx.x), tile, steps, late);
        case 5:
          return load_copying(Loader<5>(a_, tile, steps.begin, steps.end, threadIdx.x), tile, steps, late);
        case 6:
          return load_copying(Loader<6>(a_, tile, steps.begin, steps.end, threadIdx.x), tile, steps, late);
        case 7:
          return load_copying(Loader<7>(a_, tile, steps.begin, steps.end, threadIdx.x), tile, steps, late);
        default:
          return load_copying(Loader<0>(a_, tile, steps.begin, steps.end, threadIdx.x), tile, steps, late);
      }
    }
  }

  // `late`: the previous tile keeps its query memory to the end, so that keys and values are loaded before the queries.
  template <typename L>
  __device__ void load_copying(L loader, const Tile& tile, const Steps<kWgmmaRows, kKeys>& steps, bool late) {
    loader.look_up_keys(steps.first);
    loader.look_up_values(steps.first);
    copy_keys(loader, steps.first);
    int i = 1, key = steps.first;
    const auto next = [&] {
      copy_keys(loader, key + kKeys);
      copy_values(loader, key);
      ++i;
      key += kKeys;
    };
    if (late && steps.count > 1) next();
    wait_query_empty();
    publish_tile(&tile);
    copy_queries(tile);
    arrive_when_copied(&storage_->query_full);
    while (i < steps.count) next();
    copy_values(loader, key);
  }

  template <typename L>
  __device__ void copy_keys(L& loader, int key) {
    loader.load_keys(free_keys(), key);
    arrive_when_copied(&storage_->keys_full[keys_.stage()]);
    loader.look_up_keys(key + kKeys);
    ++keys_.steps;
  }

  template <typename L>
  __device__ void copy_values(L& loader, int key) {
    loader.load_values(free_values(), key);
    arrive_when_copied(&storage_->values_full[values_.stage()]);
    loader.look_up_values(key + kKeys);
    ++values_.steps;
  }

  // Values are in flight while keys are converted, and the reverse.
  __device__ void load_converting(Converter& converter, const Tile& tile, const Steps<kWgmmaRows, kKeys>& steps) {
    int key = steps.first;
    converter.look_up(key);
    converter.fetch_keys(key);
    wait_query_empty();
    publish_tile(&tile);
    convert_queries(tile);
    arrive_when_stored(&storage_->query_full);
    for (int i = 0; i < steps.count; ++i, key += kKeys) {
      const bool more = i + 1 < steps.count;
      if (Converter::kOverlaps) converter.fetch_values(key);
      converter.put_keys(free_keys());
      arrive_when_stored(&storage_->keys_full[keys_.stage()]);
      ++keys_.steps;
      if (!Converter::kOverlaps) converter.fetch_values(key);
      converter.look_up(key + kKeys);
      if (Converter::kOverlaps && more) converter.fetch_keys(key + kKeys);
      converter.put_values(free_values(), key);
      arrive_when_stored(&storage_->values_full[values_.stage()]);
      ++values_.steps;
      if (!Converter::kOverlaps && more) converter.fetch_keys(key + kKeys);
    }
  }

  // Waits until the stage is empty and returns its address.
  __device__ uint32_t free_keys() const {
    ptx::mbarrier_wait(ptx::shared_address(&storage_->keys_empty[keys_.stage()]), keys_.parity() ^ 1);
    return address_ + Shape::kKeysOffset + keys_.stage() * Shape::kTileBytes;
  }
  __device__ uint32_t free_values() const {
    ptx::mbarrier_wait(ptx::shared_address(&storage_->values_empty[values_.stage()]), values_.parity() ^ 1);
    return address_ + Shape::kValuesOffset + values_.stage() * Shape::kTileBytes;
  }

  // Waits until the queries of the previous tile are no longer used.
  __device__ void wait_query_empty() {
    ptx::mbarrier_wait(ptx::shared_address(&storage_->query_empty), query_parity_ ^ 1);
    query_parity_ ^= 1;
  }

  // Publishes the next tile to the consumers; null: there are no more tiles.
  __device__ void publish_tile(const Tile* tile) {
    if (threadIdx.x != 0) return;
    storage_->consumer_found = tile != nullptr;
    if (tile != nullptr) storage_->consumer_tile = *tile;
    ptx::mbarrier_arrive(ptx::shared_address(&storage_->query_full));
  }

  // The layout is [head_size/8][128 rows][8]. Eight lanes have adjacent rows, so that they store 128 contiguous bytes.
  __device__ void copy_queries(const Tile& tile) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pieces = a_.head_size / 8;
    for (int octet = warp; octet < kWgmmaRows / 8; octet += kLoadThreads / 32) {
      const int row = tile.first_row + octet * 8 + lane % 8;
      const bool copy = row < tile.num_rows(a_);
      const char* source = static_cast<const char*>(a_.query);
      if (copy) source += tile.query_row(a_, row) * a_.head_size * 2;
      const uint32_t dst = address_ + (octet * 8 + lane % 8) * 16;
      for (int piece = lane / 8; piece < pieces; piece += 4) {
        copy_16_or_zeros(dst + piece * kWgmmaRows * 16, source + (copy ? piece * 16 : 0), copy);
      }
    }
  }

  // The same layout in float16: a power of two scales each row into the range.
  __device__ void convert_queries(const Tile& tile) {
    constexpr int kPieces = kHead / 32;  // per lane
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int octet = warp; octet < kWgmmaRows / 8; octet += kLoadThreads / 32) {
      const int row = tile.first_row + octet * 8 + lane % 8;
      const bool valid = row < tile.num_rows(a_);
      const auto* source = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(a_.query) +
                                                          (valid ? tile.query_row(a_, row) * a_.head_size : 0));
      uint4 numbers[kPieces];
      float largest = 0.0F;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int piece = lane / 8 + 4 * i;
        numbers[i] = valid && piece < a_.head_size / 8 ? source[piece] : make_uint4(0, 0, 0, 0);
        largest = fmaxf(largest, largest_of_8(numbers[i], a_.dtype));
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 8));
      largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 16));
      const PowerOfTwo power(largest);
      if (lane < 8) storage_->row_scale[octet * 8 + lane] = power.up;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const uint32_t dst = address_ + ((lane / 8 + 4 * i) * kWgmmaRows + octet * 8 + lane % 8) * 16;
        ptx::store_shared_16(dst, scaled_halves(numbers[i], a_.dtype, power.down));
      }
    }
  }

  static __device__ void arrive_when_copied(uint64_t* barrier) {
    ptx::mbarrier_arrive_after_copies(ptx::shared_address(barrier));
  }

  // The consumer fences. A fence here would also wait for the loads in flight.
  static __device__ void arrive_when_stored(uint64_t* barrier) { ptx::mbarrier_arrive(ptx::shared_address(barrier)); }

  const Args& a_;
  const uint32_t address_;
  SharedStorage<kKeys>* const storage_;
  PipelineState keys_;
  PipelineState values_;
  uint32_t query_parity_ = 0;
};

#endif  // KVSERVICE_WGMMA

}  // namespace extend
}  // namespace kvservice
