// The distribution of the work of a decode launch over thread blocks.
//
// The KV tiles of all sequences, KV heads and passes form one list, which is divided into equal ranges. Each thread
// block computes its own range from the lengths on the device.
#pragma once

#include "cuda/decode_params.cuh"

namespace kvservice::decode {

// Chunks of batch-invariant mode. Each costs an epilogue and a partial result, so chunks are long, and sequences of up
// to kMaxWholeTokens have only one. The chunks of a single long sequence with 8 KV heads still occupy nearly every SM.
constexpr int kMaxChunks = 16;
constexpr int kMinChunkTokens = 512;
constexpr int kMaxWholeTokens = 1024;

// The queries and the epilogue of a work tile cost as much as this many KV tiles.
constexpr int kWorkTileCost = 2;

// A boundary between the ranges of two thread blocks moves by at most so many tiles, and by a part of a range, to avoid
// a short work tile: that costs more than it relieves another thread block of.
constexpr int kMostMoved = 2;
constexpr int kMovedPart = 3;

// With more sequences and heads for each thread block, some thread blocks without work cost more than short work tiles.
constexpr int kMostEven = 8;

// Returns the tiles of a chunk, from the length of the sequence alone. The last chunk may be shorter.
__device__ __forceinline__ int chunk_tiles(const Params& p, int num_tiles) {
  if (num_tiles <= max(1, kMaxWholeTokens >> p.tile_shift)) return num_tiles;
  return max(max(1, kMinChunkTokens >> p.tile_shift), (num_tiles + kMaxChunks - 1) / kMaxChunks);
}

__device__ __forceinline__ int chunk_count(const Params& p, int num_tiles) {
  if (num_tiles == 0) return 0;
  const int chunk = chunk_tiles(p, num_tiles);
  return (num_tiles + chunk - 1) / chunk;
}

__device__ __forceinline__ int divide_up(int number, int by) { return divide(number + by - 1, by); }

// Divides all work into equal ranges. begin() is the range of a thread block, owner() is the inverse.
class Ranges {
 public:
  Ranges() = default;
  __device__ Ranges(int total, int blocks)
      : blocks_(min(total, blocks)), each_(total / max(blocks_, 1)), longer_(total - each_ * blocks_) {}

  __device__ int blocks() const { return blocks_; }
  __device__ int length() const { return each_; }
  __device__ int begin(int index) const { return index * each_ + min(index, longer_); }
  __device__ int owner(int tile) const {
    const int split = longer_ * (each_ + 1);
    const bool longer = tile < split;
    return (longer ? 0 : longer_) + divide(longer ? tile : tile - split, longer ? each_ + 1 : each_);
  }

 private:
  int blocks_ = 0, each_ = 0, longer_ = 0;  // the first longer_ ranges have one more
};

// Iterates over the work tiles of a thread block. All threads of a warp construct it together.
//
// The work of a sequence and head is its KV tiles, and before them kWorkTileCost units for what a work tile costs: a
// thread block in whose range a sequence and head begins has one work tile more, and gets fewer KV tiles. With few
// sequences and heads, or few KV tiles for each thread block, only KV tiles count.
//
// In batch-invariant mode a work tile is a whole chunk, and belongs to the thread block in whose range it begins. There
// are no more ranges than chunks, so that few chunks are spread over as many SMs.
class WorkTileScheduler {
 public:
  __device__ WorkTileScheduler(const Params& p, int lane) : p_(p) {
    const Sums before = sum_lanes(lane);
    if (static_cast<int>(blockIdx.x) >= ranges_.blocks()) return;
    at_ = ranges_.begin(blockIdx.x);
    end_ = ranges_.begin(blockIdx.x + 1);
    find(before, lane);
  }

  __device__ bool next(WorkTile& s) {
    const int heads = p_.num_kv_heads * p_.num_passes;
    while (at_ < end_) {
      const int offset = at_ - base_, work = work_of(tiles_);
      if (offset >= work * heads) {
        base_ += work * heads;
        query_start_ += query_len_;
        load(++seq_);
        continue;
      }
      const int head = divide(offset, work), item = base_ + head * work;  // where the work of this head begins
      const int from = moved(at_ - item), to = moved(end_ - item);
      if (from >= to) {
        at_ = from == work ? item + work : end_;
        continue;
      }
      const int tile = max(from - cost_, 0);
      int count = to - cost_ - tile;
      at_ = item + cost_ + tile;
      if (p_.batch_invariant) {
        const int chunk = chunk_tiles(p_, tiles_), into = tile % chunk;
        count = min(tiles_ - tile, chunk - into);
        if (into != 0) {  // belongs to another thread block
          at_ += count;
          continue;
        }
        own_chunks_ = start_ == at_ - tile ? own_chunks_ + 1 : 1;
      }
      s.seq = seq_;
      s.kv_head = p_.num_passes == 1 ? head : divide(head, p_.num_passes);
      s.first_query = (head - s.kv_head * p_.num_passes) * p_.columns;
      s.query_start = query_start_;
      s.query_len = query_len_;
      s.context = context_;
      s.tile = first_ + tile;
      s.end_tile = first_ + tile + count;
      start_ = at_ - tile;
      at_ += count;
      return true;
    }
    s.seq = -1;
    return false;
  }

  // The lengths of the next sequences are at hand.
  __device__ void prefetch() {}

  // Returns the split of the last work tile that next() returned. Separate from next(), because it is slow and is
  // needed late.
  __device__ SplitKv split_of(const WorkTile& s) const {
    SplitKv split;
    split.partial = -1;
    split.clustered = false;
    split.members = 0;
    if (s.end_tile - s.tile == tiles_) return split;
    const int block = blockIdx.x;
    const int first_block = ranges_.owner(start_ + most_before());
    // A thread block has two partial results: one for the work tile at the beginning of its range, one for another at
    // its end.
    split.first = split.meeting = 2 * first_block + (ranges_.begin(first_block) >= start_ - cost_ ? 0 : 1);
    if (p_.batch_invariant) {
      split_chunks(s, split);
      return split;
    }
    const int end = start_ + tiles_, last_block = ranges_.owner(end - 1 - most_after());
    split.partial = block == first_block ? split.first : 2 * block;
    split.members = last_block - first_block + 1;
    split.own = 1;
    // The last member does not wait for the others if its range goes on.
    split.slices = ranges_.begin(last_block + 1) > end ? split.members - 1 : split.members;
    split.slice = block - first_block;
    split.base = 2 * first_block;
    split.stride = 2;
    return split;
  }

 private:
  // A boundary between two ranges that leaves few tiles of a sequence and head on one side moves to its begin or its
  // end. Returns the most tiles before a boundary that moves to the begin.
  __device__ int most_before() const { return min(most_moved_, tiles_ / 2); }

  // Returns the most tiles after a boundary that moves to the end.
  __device__ int most_after() const { return min(most_moved_, (tiles_ - 1) / 2); }

  // Returns where a boundary `at` units of work after the begin of the current sequence and head moves.
  __device__ int moved(int at) const {
    const int work = work_of(tiles_);
    if (at - cost_ <= most_before() && cost_ > 0) return 0;
    return work - at <= most_after() ? work : max(at, 0);
  }

  // Every chunk has a partial result of its own. The thread blocks of a sequence and head count their chunks when they
  // have finished the last of them, and the last one reduces all; at most one sequence and head that spans several
  // thread blocks has the meeting.
  __device__ void split_chunks(const WorkTile& s, SplitKv& split) const {
    const int item = (seq_ * p_.num_kv_heads + s.kv_head) * p_.num_passes + s.first_query / p_.columns;
    split.first = split.base = item * kMaxChunks;
    split.stride = 1;
    split.partial = split.first + (s.tile - first_) / chunk_tiles(p_, tiles_);
    split.own = own_chunks_;
    split.slices = split.slice = 0;
    const bool last_own = s.end_tile - first_ == tiles_ || at_ >= end_;
    split.members = last_own ? chunk_count(p_, tiles_) : 0;
  }

  __device__ void load(int seq) {
    query_len_ = seq < p_.num_seqs ? p_.query_lens[seq] : 0;
    context_ = seq < p_.num_seqs ? p_.context_lens[seq] : 0;
    tiles_ = tile_count(p_, query_len_, context_, first_);
  }

  // Work and query tokens of some sequences.
  struct Sums {
    int work, tokens;
  };

  // Returns the work of a sequence and head with so many tiles.
  __device__ int work_of(int tiles) const { return tiles == 0 ? 0 : tiles + cost_; }

  __device__ int seqs_per_lane() const { return (p_.num_seqs + 31) / 32; }

  // Sums over some sequences, for all KV heads and passes.
  struct Counts {
    int tiles = 0, tokens = 0, items = 0, chunks = 0;
  };

  // Counts the next kSeqs sequences of this lane, of which `left` exist. All their lengths are in flight at once.
  template <int kSeqs>
  __device__ void count(int seq, int left, Counts& counts) const {
    const int heads = p_.num_kv_heads * p_.num_passes;
    int query_lens[kSeqs], contexts[kSeqs];
#pragma unroll
    for (int i = 0; i < kSeqs; ++i) {
      const bool has = i < left && seq + i < p_.num_seqs;
      query_lens[i] = has ? p_.query_lens[seq + i] : 0;
      contexts[i] = has ? p_.context_lens[seq + i] : 0;
    }
#pragma unroll
    for (int i = 0; i < kSeqs; ++i) {
      int skipped;
      const int tiles = tile_count(p_, query_lens[i], contexts[i], skipped);
      counts.tiles += tiles * heads;
      counts.tokens += query_lens[i];
      counts.items += tiles > 0 ? heads : 0;
      if (p_.batch_invariant) counts.chunks += chunk_count(p_, tiles) * heads;
    }
  }

  // All lanes take equally many neighbouring sequences. Computes the ranges, and returns the sums of the lanes before
  // this one.
  __device__ Sums sum_lanes(int lane) {
    constexpr int kInFlight = 8;
    const int each = seqs_per_lane();
    Counts counts;
    if (each == 1) {
      count<1>(lane, 1, counts);
    } else {
#pragma unroll 1
      for (int first = 0; first < each; first += kInFlight) {
        count<kInFlight>(lane * each + first, each - first, counts);
      }
    }
    const int blocks = gridDim.x, items = __reduce_add_sync(~0U, counts.items);
    const bool many = items >= blocks / 8 && __reduce_add_sync(~0U, counts.tiles) >= 2 * blocks;
    cost_ = many && !p_.batch_invariant ? kWorkTileCost : 0;
    const Sums own = {counts.tiles + counts.items * cost_, counts.tokens}, all = sum_to(own, lane);
    const int work = __shfl_sync(~0U, all.work, 31);
    if (p_.batch_invariant) {
      ranges_ = {work, min(blocks, __reduce_add_sync(~0U, counts.chunks))};
    } else {
      ranges_ = {work, work <= blocks ? blocks : even_ranges(work, items, blocks)};
    }
    if (cost_ > 0) most_moved_ = max(min(kMostMoved, ranges_.length() / kMovedPart - 1), 0);
    return {all.work - own.work, all.tokens - own.tokens};
  }

  // Returns how many ranges there are: perhaps a few less than thread blocks, so that equally long sequences and heads
  // begin with a range, and a thread block has no work tile more than it needs. Of huge work the quotients are not
  // exact, which does not matter here.
  __device__ static int even_ranges(int work, int items, int blocks) {
    const int most = divide_up(work, blocks);
    int even;
    if (items <= blocks) {
      const int each = divide_up(work, items);
      even = items * divide_up(each, divide_up(each, divide(blocks, items)));
    } else {
      const int each = divide_up(items, blocks);
      if (each > kMostEven) return blocks;
      even = divide_up(items, each);
    }
    const bool few_less = even >= blocks - blocks / 16 && even <= blocks;
    return few_less && divide_up(work, even) <= most + most / 16 ? even : blocks;
  }

  // Returns the sums up to and with this lane.
  __device__ static Sums sum_to(Sums sums, int lane) {
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
      const int work = __shfl_up_sync(~0U, sums.work, delta), tokens = __shfl_up_sync(~0U, sums.tokens, delta);
      if (lane >= delta) {
        sums.work += work;
        sums.tokens += tokens;
      }
    }
    return sums;
  }

  // Finds the sequence in which the range begins, and the sums before it: the last lane that begins there or before,
  // and then the sequence among that lane's.
  __device__ void find(Sums before, int lane) {
    const int heads = p_.num_kv_heads * p_.num_passes, each = seqs_per_lane();
    const int owner = last_lane(before.work <= at_);
    seq_ = owner * each;
    base_ = __shfl_sync(~0U, before.work, owner);
    query_start_ = __shfl_sync(~0U, before.tokens, owner);
    for (int left = each; left > 1;) {
      load(seq_ + lane);
      const Sums own = {work_of(tiles_) * heads, query_len_}, all = sum_to(own, lane);
      const bool here = at_ < base_ + __shfl_sync(~0U, all.work, 31);
      const int last = here ? last_lane(base_ + all.work - own.work <= at_) : 31;
      base_ += __shfl_sync(~0U, here ? all.work - own.work : all.work, last);
      query_start_ += __shfl_sync(~0U, here ? all.tokens - own.tokens : all.tokens, last);
      seq_ += here ? last : 32;
      left = here ? 0 : left - 32;
    }
    load(seq_);
  }

  __device__ static int last_lane(bool condition) {
    return 31 - __clz(static_cast<int>(__ballot_sync(~0U, condition)));
  }

  const Params& p_;
  int seq_ = 0, query_start_ = 0, query_len_ = 0, context_ = 0, tiles_ = 0, first_ = 0;
  int cost_ = 0;        // of a work tile
  int most_moved_ = 0;  // tiles that a boundary moves by
  int base_ = 0;        // work of all sequences before seq_
  Ranges ranges_;
  int at_ = 0, end_ = 0;
  int start_ = -1;      // index of the first tile of the current sequence and head
  int own_chunks_ = 0;  // chunks of the current sequence and head that next() has returned
};

}  // namespace kvservice::decode
