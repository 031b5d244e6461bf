// Attention of few queries per sequence (decode, speculative verification), bound by memory bandwidth.
//
// The operands of both products are swapped: rows are tokens, and columns are the queries of a KV head (of one or
// several query tokens), kColumnTiles * 8 at a time. The kernel is warp-specialized. One producer warp copies tiles of
// K and V into pipeline stages in shared memory (cp.async.bulk on Hopper and later, otherwise cp.async). Four consumer
// warps take 16 tokens of each tile; each warp keeps its own maximum, sum and output, and the epilogue combines them at
// the end of a work tile.
//
// The KV tiles of all sequences and KV heads form one list, which is divided into equal ranges, one per thread block
// (split-KV). A range may end in the middle of a sequence, so that unequal lengths cost nothing. The last thread block
// to write a partial result of a sequence reduces them: first the results of kSplitsPerGroup neighbours, then the
// results of these groups.
//
// Batch-invariant mode: a sequence is divided into at most kMaxChunks chunks, which depend on its own length alone, and
// a second kernel reduces them in order.
#pragma once

#include "cuda/decode_consumer.cuh"
#include "cuda/decode_producer.cuh"
#include "cuda/decode_split_kv.cuh"

namespace kvservice::decode {

constexpr int kReduceThreads = 128;  // of a block that only reduces chunks

// One warp is the producer, the others are consumers. All parts refer to one Block, which is the producer's base class:
// copies of it make the compiler order the instructions differently.
template <typename K>
class ThreadBlock : Producer {
 public:
  __device__ ThreadBlock(const Params& params, char* shared)
      : Producer(params, *reinterpret_cast<typename K::Shared*>(shared), ptx::shared_address(shared + K::kStagesOffset),
                 K::kColumnTiles),
        shared_(*reinterpret_cast<typename K::Shared*>(shared)) {}

  __device__ void run() {
    if (warp == K::kConsumerWarps) {
      Producer::run();
    } else {
      Consumer<K>(*this, shared_).run();
    }
  }

 private:
  typename K::Shared& shared_;
};

template <typename T, Cache kCache, int kHead, int kColumns>
__global__ void __launch_bounds__(block_threads(kColumns), blocks_per_sm(kCache, kHead, kColumns))
    decode_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char shared[];
  ThreadBlock<Kernel<T, kCache, kHead, kColumns>>(p, shared).run();
}

// One thread block per sequence, KV head and pass: reduces the chunks if there are several.
template <int kHead, int kColumns>
__global__ void __launch_bounds__(kReduceThreads) reduce_chunks_kernel(const __grid_constant__ Params p) {
  const int heads = p.num_kv_heads * p.num_passes;
  const int item = blockIdx.x, seq = item / heads, head = item - seq * heads;
  WorkTile s;
  s.seq = seq;
  s.kv_head = head / p.num_passes;
  s.first_query = (head - s.kv_head * p.num_passes) * p.columns;
  s.query_len = p.query_lens[seq];
  s.context = p.context_lens[seq];
  int first = 0;
  const int tiles = tile_count(p, s.query_len, s.context, first), chunk = chunk_tiles(p, tiles);
  if (tiles <= chunk) return;
  __shared__ int query_start;
  if (threadIdx.x == 0) query_start = 0;
  __syncthreads();
  int before = 0;
  for (int other = threadIdx.x; other < seq; other += kReduceThreads) before += p.query_lens[other];
  atomicAdd(&query_start, before);
  __syncthreads();
  s.query_start = query_start;
  const auto chunks = [&](int k) {
    return p.partials + (int64_t{item} * kMaxChunks + k) * Partial<kHead, kColumns>::kFloats;
  };
  __shared__ float2 states[kColumns][kMaxSplits];
  reduce_partials<kHead, kColumns, kReduceThreads>(p, s, (tiles + chunk - 1) / chunk, chunks, nullptr, states);
}

}  // namespace kvservice::decode
