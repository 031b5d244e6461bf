// The producer warpgroup of the Hopper extend kernel.
#pragma once

#include "cuda/extend_convert.cuh"
#include "cuda/extend_queries.cuh"
#include "cuda/extend_wgmma.cuh"

namespace kvservice {
namespace extend {

#ifdef KVSERVICE_WGMMA

// Requests tiles from the scheduler, in its first warp, and loads their queries, keys and values.
template <int kHead, bool kFloat8>
class WgmmaProducer {
  using Shape = WgmmaShape<kHead>;
  static constexpr int kKeys = Shape::kKeys;
  template <int kShift>
  using Loader = KvLoader<kHead, kKeys, false, kShift>;
  using Converter = KvConverter<kHead, kKeys>;
  using Queries = QueryLoader<kHead, kWgmmaRows>;
  using Scheduler = TileScheduler<kWgmmaRows, kKeys>;
  using Storage = SharedStorage<kHead>;

 public:
  __device__ WgmmaProducer(const Args& a, char* shared, Storage* storage)
      : a_(a), address_(ptx::shared_address(shared)), storage_(storage) {}

  __device__ void run() {
    Scheduler scheduler(a_, &storage_->sequences);
    if (threadIdx.x < 32) scheduler.start();
    for (bool late = false; find(scheduler);) {
      load(tile(), late);
      late = Shape::kQueryStages == 1 && tile().first_row + kWarpgroupRows >= tile().num_rows(a_);
      if (++slot_ == Storage::kTiles) slot_ = 0;
    }
    ptx::start_next();
    wait_query_empty();
    publish_tile();
    arrive_when_copied(&storage_->query_full[queries_.stage()]);
    if (threadIdx.x == 0) reset_counters(a_);
  }

 private:
  // The first warp writes the next tile. Returns false if there is none.
  __device__ bool find(Scheduler& scheduler) {
    if (threadIdx.x < 32) scheduler.next(&storage_->tiles[slot_]);
    ptx::named_barrier(kProducerBarrier, kLoadThreads);
    return tile().num_steps > 0;
  }

  __device__ const Tile& tile() const { return storage_->tiles[slot_]; }

  __device__ void load(const Tile& tile, bool late) {
    if constexpr (kFloat8) {
      Converter converter(a_, tile);
      load_converting(converter, tile);
    } else {
      switch (a_.head_size == kHead ? a_.block_shift : 0) {
        case 4:
          return load_copying(Loader<4>(a_, tile), tile, late);
        case 5:
          return load_copying(Loader<5>(a_, tile), tile, late);
        case 6:
          return load_copying(Loader<6>(a_, tile), tile, late);
        case 7:
          return load_copying(Loader<7>(a_, tile), tile, late);
        default:
          return load_copying(Loader<0>(a_, tile), tile, late);
      }
    }
  }

  // `late`: the previous tile keeps its query memory to the end, so that keys and values are loaded before the queries.
  template <typename L>
  __device__ void load_copying(L loader, const Tile& tile, bool late) {
    int i = 1, key = tile.first_key;
    loader.look_up_keys(key);
    loader.look_up_values(key);
    const auto next = [&] {
      copy_keys(loader, key + kKeys);
      copy_values(loader, key);
      ++i;
      key += kKeys;
    };
    const auto queries = [&] {
      wait_query_empty();
      publish_tile();
      Queries::copy(a_, tile, query_address());
      arrive_when_copied(&storage_->query_full[queries_.stage()]);
      ++queries_.steps;
    };
    if (Shape::kQueryStages > 1) queries();
    copy_keys(loader, key);
    if (Shape::kQueryStages == 1) {
      if (late && tile.num_steps > 1) next();
      queries();
    }
    while (i < tile.num_steps) next();
    copy_values(loader, key);
  }

  template <typename L>
  __device__ void copy_keys(L& loader, int key) {
    const auto source = loader.keys_at(key);  // before the wait
    loader.load_keys(free_keys(), source);
    arrive_when_copied(&storage_->keys_full[keys_.stage()]);
    loader.look_up_keys(key + kKeys);
    ++keys_.steps;
  }

  template <typename L>
  __device__ void copy_values(L& loader, int key) {
    const auto source = loader.values_at(key);
    const uint32_t dst = free_values();
    if (!loader.skips_values(key)) loader.load_values(dst, source);
    arrive_when_copied(&storage_->values_full[values_.stage()]);
    loader.look_up_values(key + kKeys);
    ++values_.steps;
  }

  // Values are in flight while keys are converted, and the reverse.
  __device__ void load_converting(Converter& converter, const Tile& tile) {
    int key = tile.first_key;
    converter.look_up(key);
    converter.fetch_keys(key);
    wait_query_empty();
    publish_tile();
    Queries::convert(a_, tile, query_address(), storage_->row_scales[queries_.stage()]);
    arrive_when_stored(&storage_->query_full[queries_.stage()]);
    ++queries_.steps;
    for (int i = 0; i < tile.num_steps; ++i, key += kKeys) {
      const bool more = i + 1 < tile.num_steps;
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

  // Waits until the queries of an earlier tile are no longer used.
  __device__ void wait_query_empty() const {
    ptx::mbarrier_wait(ptx::shared_address(&storage_->query_empty[queries_.stage()]), queries_.parity() ^ 1);
  }
  __device__ uint32_t query_address() const { return address_ + queries_.stage() * Shape::kQueryBytes; }

  __device__ void publish_tile() const {
    if (threadIdx.x == 0) ptx::mbarrier_arrive(ptx::shared_address(&storage_->query_full[queries_.stage()]));
  }

  static __device__ void arrive_when_copied(uint64_t* barrier) {
    ptx::mbarrier_arrive_after_copies(ptx::shared_address(barrier));
  }

  // The consumer fences. A fence here would also wait for the loads in flight.
  static __device__ void arrive_when_stored(uint64_t* barrier) { ptx::mbarrier_arrive(ptx::shared_address(barrier)); }

  const Args& a_;
  const uint32_t address_;
  Storage* const storage_;
  int slot_ = 0;  // of the tile
  PipelineState<Shape::kQueryStages> queries_;
  PipelineState<kStages> keys_;
  PipelineState<kStages> values_;
};

#endif  // KVSERVICE_WGMMA

}  // namespace extend
}  // namespace kvservice
