// The work of a decode launch whose thread blocks know their part before they know any length: each (sequence, KV head,
// pass) belongs to a cluster of thread blocks, perhaps of one.
#pragma once

#include "cuda/decode_params.cuh"
#include "cuda/ptx.cuh"

namespace kvservice::decode {

// Iterates over the work tiles of a thread block. All threads of a warp construct it together.
//
// A thread block that knows its part early starts sooner, and the members of a cluster reduce their partial results in
// shared memory. But sequences are not divided evenly over all SMs, which few SMs at the end pay for.
class DirectScheduler {
 public:
  __device__ DirectScheduler(const Params& p, int lane)
      : p_(p),
        lane_(lane),
        rank_(static_cast<int>(blockIdx.x) & (p.cluster - 1)),
        item_(static_cast<int>(blockIdx.x) >> p.direct.cluster_shift),
        next_seq_(divide(item_, p.num_kv_heads * p.num_passes)) {}

  // Asks for what the next work tile needs, all at once. Precedes next().
  __device__ void request() {
    if (next_seq_ >= p_.num_seqs) return;
    query_len_ = p_.query_lens[next_seq_];
    context_ = p_.context_lens[next_seq_];
    next_block_id_ = lane_ < p_.table_blocks ? __ldg(p_.block_tables + int64_t{next_seq_} * p_.max_blocks + lane_) : 0;
#pragma unroll 8
    for (int before = seq_ + lane_; before < next_seq_; before += 32) tokens_ += p_.query_lens[before];
    seq_ = next_seq_;
  }

  // Whether the lengths are even enough. The same for all thread blocks.
  __device__ bool is_even() const {
    const DirectWork& direct = p_.direct;
    if (direct.surely) return true;
    int sum = 0, most = 0;
#pragma unroll 4
    for (int seq = lane_; seq < p_.num_seqs; seq += 32) {
      int first;
      const int tiles = tile_count(p_, p_.query_lens[seq], p_.context_lens[seq], first);
      sum += tiles;
      most = max(most, tiles);
    }
    sum = __reduce_add_sync(~0U, sum);
    most = __reduce_max_sync(~0U, most);
    const float all = static_cast<float>(sum) * static_cast<float>(p_.num_kv_heads * p_.num_passes);
    const float longer =
        static_cast<float>(most) - __fdividef(static_cast<float>(sum), static_cast<float>(p_.num_seqs));
    const auto own = static_cast<float>((most + p_.cluster - 1) >> direct.cluster_shift);
    const float alone = fmaxf(own * direct.busy_blocks - all, 0.0F);  // after the other thread blocks
    return alone + longer * direct.lost_by_longer + all * direct.lost_by_tile <= direct.most_lost;
  }

  __device__ bool next(WorkTile& s) {
    const int heads = p_.num_kv_heads * p_.num_passes, shift = p_.direct.cluster_shift;
    while (next_seq_ < p_.num_seqs) {
      if (!requested_) request();
      requested_ = false;
      const int head = item_ - seq_ * heads;
      int first;
      const int tiles = tile_count(p_, query_len_, context_, first);
      const bool many = tiles >= p_.cluster;
      const int each = many ? tiles >> shift : 1, longer = many ? tiles & (p_.cluster - 1) : 0;
      members_ = min(tiles, p_.cluster);
      s.seq = seq_;
      s.kv_head = p_.num_passes == 1 ? head : divide(head, p_.num_passes);
      s.first_query = (head - s.kv_head * p_.num_passes) * p_.columns;
      s.query_start = __reduce_add_sync(~0U, tokens_);
      s.query_len = query_len_;
      s.context = context_;
      s.tile = first + rank_ * each + min(rank_, longer);
      s.end_tile = s.tile + each + (rank_ < longer ? 1 : 0);
      block_id_ = next_block_id_;
      item_ += static_cast<int>(gridDim.x) >> shift;
      next_seq_ = divide(item_, heads);
      if (rank_ < members_) return true;
    }
    s.seq = -1;
    return false;
  }

  // Asks for what the next work tile needs before next() is called.
  __device__ void prefetch() {
    request();
    requested_ = true;
  }

  __device__ SplitKv split_of(const WorkTile& /*work*/) const {
    SplitKv split{};
    split.partial = -1;
    if (members_ > 1) {
      split.clustered = true;
      split.slices = split.members = members_;
      split.slice = rank_;
    }
    return split;
  }

  // Returns the id of this lane's block of the sequence, if it has one.
  __device__ int block_id() const { return block_id_; }

 private:
  const Params& p_;
  const int lane_, rank_;
  int item_;      // the next (sequence, KV head, pass)
  int next_seq_;  // its sequence
  bool requested_ = true;
  // These are of the sequence that was last asked for. The sum of tokens_ over the lanes is the tokens before it.
  int seq_ = 0, query_len_ = 0, context_ = 0, next_block_id_ = 0, tokens_ = 0;
  int members_ = 0, block_id_ = 0;  // of the last work tile
};

}  // namespace kvservice::decode
