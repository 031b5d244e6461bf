// Attention of few queries a sequence (decode, speculative verification), as fast as the memory gives the cache.
//
// The operands of both products are swapped: rows are tokens, columns are the queries of a KV head, of one or several
// query tokens, kColumnTiles * 8 at a time. One warp of a thread block has the copy engine bring tiles of K and V into
// a ring in shared memory; four warps take 16 tokens of each tile, every one with a maximum, a sum and an output of its
// own, which they join at the end of a segment.
//
// The tiles of all sequences and KV heads, one after the other, are cut into equal ranges, one for each thread block;
// so a range ends in the middle of a sequence, and unequal lengths cost nothing. The parts of a sequence are joined by
// the thread block that is the last to write one: first those of kJoined neighbours, then the results of these.
//
// Batch-invariant: a sequence is cut into at most kMaxChunks chunks, by its own length alone, and a second kernel joins
// them in their order.
#pragma once

#include "cuda/decode_compute.cuh"
#include "cuda/decode_fill.cuh"
#include "cuda/decode_join.cuh"

namespace kvservice::decode {

constexpr int kJoinThreads = 128;  // of a block that only joins chunks

// One warp fills the ring, the others compute. There is one Block, which is the Filler's own and which the other parts
// refer to: of copies of it the compiler makes another order of instructions.
template <typename K>
class ThreadBlock : Filler {
 public:
  __device__ ThreadBlock(const Params& params, char* shared)
      : Filler(params, *reinterpret_cast<typename K::Shared*>(shared), ptx::shared_address(shared + K::kRingOffset),
               K::kColumnTiles),
        shared_(*reinterpret_cast<typename K::Shared*>(shared)) {}

  __device__ void run() {
    if (warp == K::kWarps) {
      Filler::run();
    } else {
      Computer<K>(*this, shared_).run();
    }
  }

 private:
  typename K::Shared& shared_;
};

template <typename T, Cache kCache, int kHead, int kColumns>
__global__ void __launch_bounds__(block_threads(kColumns), blocks_per_multiprocessor(kCache, kHead, kColumns))
    decode_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char shared[];
  ThreadBlock<Kernel<T, kCache, kHead, kColumns>>(p, shared).run();
}

// One thread block for each sequence, KV head and pass: joins its chunks, where it has several.
template <int kHead, int kColumns>
__global__ void __launch_bounds__(kJoinThreads) join_chunks_kernel(const __grid_constant__ Params p) {
  const int heads = p.num_kv_heads * p.column_tiles;
  const int item = blockIdx.x, seq = item / heads, head = item - seq * heads;
  Segment s;
  s.seq = seq;
  s.kv_head = head / p.column_tiles;
  s.first_query = (head - s.kv_head * p.column_tiles) * p.columns;
  s.query_len = p.query_lens[seq];
  s.context = p.context_lens[seq];
  int first = 0;
  const int tiles = tile_count(p, s.query_len, s.context, first), chunk = chunk_tiles(p, tiles);
  if (tiles <= chunk) return;
  __shared__ int query_start;
  if (threadIdx.x == 0) query_start = 0;
  __syncthreads();
  int before = 0;
  for (int other = threadIdx.x; other < seq; other += kJoinThreads) before += p.query_lens[other];
  atomicAdd(&query_start, before);
  __syncthreads();
  s.query_start = query_start;
  const auto chunks = [&](int k) {
    return p.partials + (int64_t{item} * kMaxChunks + k) * Partial<kHead, kColumns>::kFloats;
  };
  __shared__ float2 states[kColumns][kMaxJoined];
  join<kHead, kColumns, kJoinThreads>(p, s, (tiles + chunk - 1) / chunk, chunks, nullptr, states);
}

}  // namespace kvservice::decode
