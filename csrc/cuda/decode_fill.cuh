// The warp of the decode kernel that has the copy engine fill the ring, and tells the others what is in it.
#pragma once

#include "cuda/decode_block.cuh"

namespace kvservice::decode {

// Finds the thread block's tiles, and brings in K and V of each, one after the other.
class Filler : public Block {
 public:
  using Block::Block;

  __device__ void run() {
    Walker walker(p, lane);
    __syncthreads();
    fill_ring(walker);
  }

 private:
  struct Tile {
    Segment segment;
    int number;  // of the segment, among those of the thread block
    int index;
    int first_block, num_blocks;  // of the tile, those that any query sees
    int block;                    // this lane's block id
    // Block ids of the segment, 32 at a time, one for each lane; those after them are on their way.
    int first_id, ids, next_ids;
  };

  // Of the block `index` of a sequence: none where no query sees it.
  __device__ int load_id(const Segment& s, int index) const {
    const bool seen = index >= first_seen(s) >> p.block_shift && index <= (s.context - 1) >> p.block_shift;
    return seen ? __ldg(p.block_tables + int64_t{s.seq} * p.max_blocks + index) : 0;
  }

  __device__ bool next_tile(Walker& walker, Tile& tile) {
    const Segment& s = tile.segment;
    const int blocks = p.tile_tokens >> p.block_shift;
    if (++tile.index >= s.end_tile) {
      const bool more = walker.next(tile.segment);
      describe(s, ++tile.number);
      if (!more) return false;
      tile.index = s.tile;
      tile.first_id = tile.index * blocks;
      tile.ids = load_id(s, tile.first_id + lane);
      tile.next_ids = load_id(s, tile.first_id + 32 + lane);
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

  __device__ void describe(const Segment& segment, int number) {
    if (lane != 0) return;
    signals.segments[number % kSegments] = segment;
    ptx::mbarrier_arrive(described + number % kSegments * 8);
  }

  __device__ void divide(const Walker& walker, const Tile& tile) {
    const Share share = walker.share(tile.segment);
    if (lane != 0) return;
    signals.shares[tile.number % kSegments] = share;
    ptx::mbarrier_arrive(divided + tile.number % kSegments * 8);
  }

  __device__ void fill_ring(Walker& walker) {
    Tile next;
    next.number = -1;
    next.index = next.segment.end_tile = 0;
    bool more = next_tile(walker, next);
    int entry = 0, parity = 1;
    while (more) {
      const Tile tile = next;
      const char* key = p.pool + int64_t{tile.block} * p.block_bytes + int64_t{tile.segment.kv_head} * p.head_bytes;
      for (int part = 0; part < 2; ++part) {
        ptx::mbarrier_wait(empty + entry * 8, parity);
        fill(tile, key + part * int64_t{p.value_bytes}, entry);
        advance(entry, parity);
        if (part == 1) continue;
        if (tile.index == tile.segment.tile) divide(walker, tile);
        more = next_tile(walker, next);  // its block ids arrive while this tile waits for room
      }
    }
  }

  __device__ void fill(const Tile& tile, const char* source, int entry) {
    const uint32_t to = ring + entry * p.entry_bytes + tile.first_block * p.head_bytes;
    const uint32_t barrier = full + entry * 8;
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
