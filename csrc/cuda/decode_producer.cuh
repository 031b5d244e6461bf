// The producer warp of the decode kernel: fills the pipeline stages and publishes the work tiles in them.
#pragma once

#include "cuda/decode_block.cuh"
#include "cuda/decode_direct.cuh"

namespace kvservice::decode {

// Finds the KV tiles of the thread block and loads K, then V, of each.
class Producer : public Block {
 public:
  using Block::Block;

  __device__ void run() {
    if (p.cluster > 1) ptx::cluster_arrive();
    schedule();
    if (p.cluster > 1) ptx::cluster_wait();
  }

 private:
  __device__ void schedule() {
    DirectScheduler direct(p, lane);
    ptx::wait_for_previous();
    if (p.cluster > 0) {
      direct.request();
      if (direct.is_even()) return start(direct);
    }
    WorkTileScheduler scheduler(p, lane);
    start(scheduler);
  }

  template <typename Scheduler>
  __device__ void start(Scheduler& scheduler) {
    __syncthreads();
    produce(scheduler);
  }

  struct KvTile {
    WorkTile work;
    int number;  // of the work tile, within the thread block
    int index;
    int first_block, num_blocks;  // blocks of the tile that any query sees
    int block;                    // this lane's block id
    // Block ids of the work tile, 32 at a time, one per lane; next_ids holds the prefetched next 32.
    int first_id, ids, next_ids;
  };

  // Returns the id of block `index` of a sequence, or 0 if no query sees that block.
  __device__ int load_id(const WorkTile& s, int index) const {
    const bool seen = index >= first_seen(s) >> p.block_shift && index <= (s.context - 1) >> p.block_shift;
    return seen ? __ldg(p.block_tables + int64_t{s.seq} * p.max_blocks + index) : 0;
  }

  __device__ void load_first_ids(const WorkTileScheduler& /*scheduler*/, KvTile& tile) const {
    tile.first_id = tile.index * (p.tile_tokens >> p.block_shift);
    tile.ids = load_id(tile.work, tile.first_id + lane);
    tile.next_ids = load_id(tile.work, tile.first_id + 32 + lane);
  }

  // The scheduler has the first 32 block ids of the sequence.
  __device__ void load_first_ids(const DirectScheduler& scheduler, KvTile& tile) const {
    const int blocks = p.tile_tokens >> p.block_shift, first = tile.index * blocks;
    tile.first_id = first & ~31;
    tile.ids = tile.first_id == 0 ? scheduler.block_id() : load_id(tile.work, tile.first_id + lane);
    tile.next_ids = load_id(tile.work, tile.first_id + 32 + lane);
  }

  template <typename Scheduler>
  __device__ bool next_tile(Scheduler& scheduler, KvTile& tile) {
    const WorkTile& s = tile.work;
    const int blocks = p.tile_tokens >> p.block_shift;
    if (++tile.index >= s.end_tile) {
      ++tile.number;
      if (!scheduler.next(tile.work)) return false;
      tile.index = s.tile;
      load_first_ids(scheduler, tile);
    }
    const int begin = tile.index * blocks;
    if (begin - tile.first_id == 32) {
      tile.first_id = begin;
      tile.ids = tile.next_ids;
      tile.next_ids = load_id(s, begin + 32 + lane);
    }
    tile.first_block = max(begin, first_seen(s) >> p.block_shift) - begin;
    tile.num_blocks = min(blocks, ((s.context - 1) >> p.block_shift) + 1 - begin) - tile.first_block;
    tile.block = __shfl_sync(~0U, tile.ids, begin - tile.first_id + tile.first_block + lane);
    return true;
  }

  // The queries are asked for right behind the first keys: behind the values, they would arrive long after the keys.
  // They are few bytes, for which a bulk copy would take longer.
  __device__ void publish_work(const WorkTile& work, int number) {
    const int slot = number % kQuerySlots, columns = work.seq < 0 ? 0 : used_columns(p, work);
    const uint32_t barrier = work_ready + number % kMaxWorkTiles * 8;
    const uint32_t stride = p.query_bytes + kQueryPadding, to = rows + slot * p.columns * stride;
    ptx::mbarrier_wait(query_empty + slot * 8, number / kQuerySlots % 2 ^ 1);
    const int pieces = p.query_bytes / 16;  // of a row
    for (int first = 0, column = 0, piece = lane; first < columns * pieces; first += 32, piece += 32) {
      for (; piece >= pieces; piece -= pieces) ++column;
      if (column >= columns) continue;
      const char* row = static_cast<const char*>(p.query) + output_row(p, work, column) * p.query_bytes;
      ptx::copy_16_async(to + column * stride + piece * 16, row + piece * 16);
    }
    ptx::mbarrier_arrive_after_copies(barrier);
    if (lane != 0) return;
    storage.work_tiles[number % kMaxWorkTiles] = work;
    ptx::mbarrier_arrive(barrier);
  }

  template <typename Scheduler>
  __device__ void publish_split(Scheduler& scheduler, const KvTile& tile) {
    scheduler.prefetch();
    const SplitKv split = scheduler.split_of(tile.work);
    if (lane != 0) return;
    storage.splits[tile.number % kMaxWorkTiles] = split;
    ptx::mbarrier_arrive(split_ready + tile.number % kMaxWorkTiles * 8);
  }

  template <typename Scheduler>
  __device__ void produce(Scheduler& scheduler) {
    KvTile tile{}, next{};
    next.number = -1;
    int stage = 0, parity = 1;
    const auto load = [&](bool values) {
      const char* source = p.pool + int64_t{tile.block} * p.block_bytes + int64_t{tile.work.kv_head} * p.head_bytes;
      ptx::mbarrier_wait(empty + stage * 8, parity);
      load_blocks(tile, source + (values ? p.value_bytes : 0), stage);
      advance(stage, parity);
    };
    for (bool needs_values = false;;) {
      const bool more = next_tile(scheduler, next);  // its block ids arrive while the values wait for a stage
      if (needs_values) load(true);
      if (more) {
        tile = next;
        load(false);
        needs_values = tile.index != tile.work.tile;
        if (needs_values) continue;
      }
      if (!more && (p.cluster == 0 || p.direct.starts_next)) ptx::start_next();
      publish_work(next.work, next.number);
      if (!more) return;
      // A split takes long to compute, and the first values wait for nothing.
      load(true);
      publish_split(scheduler, tile);
    }
  }

  __device__ void load_blocks(const KvTile& tile, const char* source, int stage) {
    const uint32_t to = stages + stage * p.stage_bytes + tile.first_block * p.head_bytes;
    const uint32_t barrier = full + stage * 8;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (lane == 0) ptx::mbarrier_arrive_expect(barrier, tile.num_blocks * p.head_bytes);
    __syncwarp();
    if (lane < tile.num_blocks)
      ptx::bulk_copy(to + lane * p.head_bytes, source, p.head_bytes, barrier, ptx::evict_first_policy());
#else
    for (int block = 0; block < tile.num_blocks; ++block) {
      const auto from = reinterpret_cast<const char*>(__shfl_sync(~0U, reinterpret_cast<uint64_t>(source), block));
      for (int byte = lane * 16; byte < p.head_bytes; byte += 32 * 16) {
        ptx::copy_16_async(to + block * p.head_bytes + byte, from + byte);
      }
    }
    ptx::mbarrier_arrive_after_copies(barrier);
#endif
  }
};

}  // namespace kvservice::decode
