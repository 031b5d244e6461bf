// Attention of few queries per sequence (decode, speculative verification), bound by memory bandwidth.
//
// The operands of both products are swapped: rows are tokens, and columns are the queries of a KV head (of one or
// several query tokens), kColumnTiles * 8 at a time. The kernel is warp-specialized. One producer warp copies tiles of
// K and V into pipeline stages in shared memory (cp.async.bulk on Hopper and later, otherwise cp.async). Four consumer
// warps take 16 tokens of each tile; each warp keeps its own maximum, sum and output, and the epilogue combines them at
// the end of a work tile.
//
// The KV tiles of all sequences and KV heads form one list, which is divided into equal ranges, one per thread block
// (split-KV). A range may end in the middle of a sequence, so that unequal lengths cost nothing. The thread blocks that
// share a sequence write partial results and wait for each other (a meeting). Then each reduces a slice of the output:
// one alone would load for longer than a short decode takes.
//
// Batch-invariant mode: a sequence is divided into at most kMaxChunks chunks, which depend on its own length alone. The
// last thread block to finish a chunk of a sequence reduces all of them, in an order that depends on their number.
#pragma once

#include "cuda/decode_consumer.cuh"
#include "cuda/decode_producer.cuh"
#include "cuda/decode_split_kv.cuh"

namespace kvservice::decode {

// One warp is the producer, the others are consumers. All parts refer to one Block, which is the producer's base class:
// copies of it make the compiler order the instructions differently.
template <typename K>
class ThreadBlock : Producer {
 public:
  __device__ ThreadBlock(const Params& params, char* shared)
      : Producer(params, *reinterpret_cast<typename K::Shared*>(shared),
                 ptx::shared_address(reinterpret_cast<typename K::Shared*>(shared)->rows),
                 ptx::shared_address(shared + K::kStagesOffset), K::kColumnTiles),
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

}  // namespace kvservice::decode
