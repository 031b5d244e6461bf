// The work of one warp of write_kv and read_kv.
//
// A warp takes a patch: kTokens consecutive tokens of `slots`, and kPieces pieces (16 bytes) of each token's row of one
// head. It moves the keys and the values of the patch, and does not wait for other warps.
//
// Keys move through registers, since a piece is a contiguous part of 16 bytes of the pool. Values are transposed in
// shared memory, in words of 4 bytes that hold adjacent tokens of a dimension. If kVector tokens (16 bytes of the pool)
// are contiguous in the pool, as in a prompt, they move as one vector; otherwise they move one by one, with tokens
// along the lanes, so that adjacent tokens still share a memory transaction.
#pragma once

#include "cuda/kv_slots_convert.cuh"
#include "cuda/ptx.cuh"
#include "kv_slots.h"

namespace kvservice::slots {

constexpr int kTokens = 16;
constexpr int kPieces = 8;                      // 128 bytes of a row
constexpr int kLoads = kTokens * kPieces / 32;  // pieces of a lane
constexpr unsigned kAllLanes = ~0U;

// One layer of the pool, in strides.
struct Layer {
  char* data;
  int64_t num_blocks, block_bytes, value_bytes;  // value_bytes: from the keys of a head to its values
  int head_bytes, block_size, block_shift;
};

inline Layer layer_of(const PoolView& pool, int64_t layer) {
  Layer of{pool.key(0, layer, 0), pool.num_blocks, pool.block_bytes(), pool.num_kv_heads * pool.head_bytes()};
  of.head_bytes = static_cast<int>(pool.head_bytes());
  of.block_size = static_cast<int>(pool.block_size);
  while (1 << of.block_shift < of.block_size) ++of.block_shift;
  return of;
}

// Where the tokens of a patch are in the pool. Lanes `token` and `token + kTokens` hold the place of a token. All lanes
// call the functions together.
template <class P>
class Places {
  static constexpr int kVector = 16 / sizeof(P);

 public:
  __device__ Places(const Layer& layer, int head, int64_t slot) {
    const int token = threadIdx.x % kTokens;
    const int64_t block = slot >> layer.block_shift;
    const int offset = static_cast<int>(slot) & (layer.block_size - 1);
    const bool inside = slot >= 0 && block < layer.num_blocks;
    const int64_t keys = (inside ? block : 0) * layer.block_bytes + int64_t{head} * layer.head_bytes;
    key_ = keys + offset * 16;
    value_ = keys + layer.value_bytes + offset * static_cast<int>(sizeof(P));
    inside_ = __ballot_sync(kAllLanes, inside);
    const int64_t first = __shfl_sync(kAllLanes, slot, token / kVector * kVector);
    const bool follows = slot == first + token % kVector && first % kVector == 0;
    follows_ = __ballot_sync(kAllLanes, inside && follows && layer.block_size >= kVector);
  }

  // Whether the slot is inside the pool.
  __device__ bool has(int token) const { return (inside_ >> token & 1U) != 0; }

  // Whether the tokens [token, token + kVector) are 16 aligned bytes of every dimension's values.
  __device__ bool has_vector(int token) const {
    constexpr unsigned kOnes = (1U << kVector) - 1;
    return (follows_ >> token & kOnes) == kOnes;
  }

  // Return bytes from the layer's data to the first vector of a token's key, or to the first dimension of its value.
  __device__ int64_t key(int token) const { return __shfl_sync(kAllLanes, key_, token); }
  __device__ int64_t value(int token) const { return __shfl_sync(kAllLanes, value_, token); }

 private:
  int64_t key_, value_;
  unsigned inside_, follows_;
};

template <class P, class T>
class Patch {
  static constexpr int kVector = 16 / sizeof(P);
  static constexpr int kVectors = kTokens / kVector;  // of a dimension
  static constexpr int kPiece = 16 / sizeof(T);       // dimensions
  static constexpr int kPiecesOfVector = sizeof(T) / sizeof(P);
  static constexpr int kWordTokens = 4 / sizeof(P);
  static constexpr int kWords = kTokens / kWordTokens;  // of a dimension
  static constexpr int kDims = kPieces * kPiece;
  static constexpr int kVectorsOfLane = kDims * kVectors / 32;
  // Between the dimensions of adjacent pieces, so that eight lanes along the pieces and four along the words of a
  // dimension use different banks.
  static constexpr int kPadWords = 4;
  using Outer = Pack<T, kPiece>;
  using Inner = Pack<P, kPiece>;
  using Word = Pack<P, kWordTokens>;

 public:
  static constexpr int kSharedWords = kDims * kWords + kPieces * kPadWords;

  __device__ Patch(const KvSlotsParams& p, const Layer& layer, uint32_t* shared, int64_t first, int head,
                   int first_piece)
      : p_(p),
        layer_(layer),
        shared_(shared),
        head_(head),
        lane_(static_cast<int>(threadIdx.x % 32)),
        first_(first),
        num_tokens_(static_cast<int>(min(p.num_tokens - first, int64_t{kTokens}))),
        first_dim_(first_piece * kPiece),
        num_dims_(min(static_cast<int>(p.pool.head_size) - first_dim_, kDims)),
        begin_((first * p.pool.num_kv_heads + head) * p.pool.head_size + first_dim_),
        token_stride_(static_cast<int>(p.pool.num_kv_heads * p.pool.head_size)) {}

  __device__ void write() const {
    // All loads are in flight at once, since the rows do not depend on the slots.
    const int64_t slot = load_slot();
    uint4 keys[kLoads], values[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) keys[k] = load_piece(p_.key, key_token(k), key_piece(k));
#pragma unroll
    for (int k = 0; k < kLoads; ++k) values[k] = load_piece(p_.value, value_token(k), value_piece());
    if (num_tokens_ <= 0) return;  // never: keeps the compiler from waiting for the slots before it issues the loads
    const Places<P> places(layer_, head_, slot);
    const float k_scale = scale_of(p_.k_scale), v_scale = scale_of(p_.v_scale);
    const int64_t at[2] = {places.key(key_token(0)), places.key(key_token(1))};
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const Inner key = to_pool<P>(reinterpret_cast<const Outer&>(keys[k]), k_scale);
      Inner* to = stored_key(at[k % 2], k);
      if (in_row(key_piece(k)) && places.has(key_token(k))) *to = key;
    }
    transpose_in(values, v_scale);
    __syncwarp();
    move_values<true>(places);
  }

  __device__ void read() const {
    const Places<P> places(layer_, head_, load_slot());
    const int64_t at[2] = {places.key(key_token(0)), places.key(key_token(1))};
    Inner keys[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (in_row(key_piece(k)) && places.has(key_token(k))) keys[k] = *stored_key(at[k % 2], k);
    }
    move_values<false>(places);
    const float k_scale = scale_of(p_.k_scale), v_scale = scale_of(p_.v_scale);
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (!in_row(key_piece(k)) || !places.has(key_token(k))) continue;
      Outer key;
#pragma unroll
      for (int i = 0; i < kPiece; ++i) key.at[i] = to_tensor<P, T>(keys[k].at[i], k_scale);
      *row(p_.key, key_token(k), key_piece(k)) = key;
    }
    __syncwarp();
    transpose_out(places, v_scale);
  }

 private:
  // The keys of a lane: eight tokens side by side, so that 128 bytes of the pool are contiguous.
  __device__ int key_token(int k) const { return lane_ % 8 + k % 2 * 8; }
  __device__ int key_piece(int k) const { return lane_ / 8 + k / 2 * 4; }
  // The values of a lane: kWordTokens adjacent tokens of each of its words, and eight pieces side by side.
  __device__ int word(int k) const { return lane_ / 8 + k / kWordTokens * 4; }
  __device__ int value_token(int k) const { return word(k) * kWordTokens + k % kWordTokens; }
  __device__ int value_piece() const { return lane_ % 8; }

  __device__ bool in_row(int piece) const { return piece * kPiece < num_dims_; }

  __device__ int64_t load_slot() const {
    const int token = lane_ % kTokens;
    return token < num_tokens_ ? p_.slots[first_ + token] : -1;
  }

  __device__ float scale_of(const float* scales) const { return scales == nullptr ? 1.0F : scales[head_]; }

  __device__ Outer* row(char* tensor, int token, int piece) const {
    return reinterpret_cast<Outer*>(reinterpret_cast<T*>(tensor) + begin_ + (token * token_stride_ + piece * kPiece));
  }

  // Loads another piece if this one does not exist, since that costs less than a branch.
  __device__ uint4 load_piece(char* tensor, int token, int piece) const {
    return ptx::load_early_16(row(tensor, min(token, num_tokens_ - 1), in_row(piece) ? piece : 0));
  }

  // Returns where a lane's key belongs, from the place of its token.
  __device__ Inner* stored_key(int64_t at, int k) const {
    const int vector = (first_dim_ / kPiece + key_piece(k)) / kPiecesOfVector;
    auto* stored = reinterpret_cast<Inner*>(layer_.data + at + vector * layer_.block_size * 16);
    return stored + key_piece(k) % kPiecesOfVector;
  }

  // Returns where the first dimension of a token's value belongs.
  __device__ P* stored_value(int64_t at) const {
    return reinterpret_cast<P*>(layer_.data + at) + first_dim_ * layer_.block_size;
  }

  // Returns the address in shared memory of a word of dimension `dim`.
  __device__ uint32_t* word_at(int dim, int word) const {
    return shared_ + dim * kWords + dim / kPiece * kPadWords + word;
  }

  __device__ void transpose_in(const uint4 (&values)[kLoads], float scale) const {
#pragma unroll
    for (int first = 0; first < kLoads; first += kWordTokens) {
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        Pack<T, kWordTokens> tokens;
#pragma unroll
        for (int j = 0; j < kWordTokens; ++j) tokens.at[j] = reinterpret_cast<const Outer&>(values[first + j]).at[i];
        const Word word_of_dim = to_pool<P>(tokens, scale);
        *word_at(value_piece() * kPiece + i, word(first)) = reinterpret_cast<const uint32_t&>(word_of_dim);
      }
    }
  }

  __device__ void transpose_out(const Places<P>& places, float scale) const {
#pragma unroll
    for (int first = 0; first < kLoads; first += kWordTokens) {
      Outer values[kWordTokens];
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        const uint32_t bits = *word_at(value_piece() * kPiece + i, word(first));
        const Word& tokens = reinterpret_cast<const Word&>(bits);
#pragma unroll
        for (int j = 0; j < kWordTokens; ++j) values[j].at[i] = to_tensor<P, T>(tokens.at[j], scale);
      }
#pragma unroll
      for (int j = 0; j < kWordTokens; ++j) {
        const int token = value_token(first + j);
        if (in_row(value_piece()) && places.has(token)) *row(p_.value, token, value_piece()) = values[j];
      }
    }
  }

  // Between shared memory and the pool. First the vectors, all of a lane at once.
  template <bool kWrite>
  __device__ void move_values(const Places<P>& places) const {
    const int vector = lane_ % kVectors;
    const bool has_vector = places.has_vector(vector * kVector);
    P* stored = stored_value(places.value(vector * kVector));
    uint4 loaded[kVectorsOfLane];
#pragma unroll
    for (int k = 0; k < kVectorsOfLane; ++k) {
      const int dim = dim_of(k);
      if constexpr (kWrite) {
        loaded[k] = *reinterpret_cast<const uint4*>(word_at(dim, vector * 4));
      } else {
        if (has_vector && dim < num_dims_)
          loaded[k] = *reinterpret_cast<const uint4*>(stored + dim * layer_.block_size);
      }
    }
#pragma unroll
    for (int k = 0; k < kVectorsOfLane; ++k) {
      const int dim = dim_of(k);
      if (!has_vector || dim >= num_dims_) continue;
      *reinterpret_cast<uint4*>(kWrite ? stored + dim * layer_.block_size
                                       : reinterpret_cast<P*>(word_at(dim, vector * 4))) = loaded[k];
    }
    move_single_values<kWrite>(places);
  }

  // Returns the dimension of a lane's vector.
  __device__ int dim_of(int k) const { return (lane_ + k * 32) / kVectors; }

  template <bool kWrite>
  __device__ void move_single_values(const Places<P>& places) const {
    const int token = lane_ % kTokens;
    const bool single = places.has(token) && !places.has_vector(token / kVector * kVector);
    if (__ballot_sync(kAllLanes, single) == 0) return;
    P* stored = stored_value(places.value(token));
    if (!single) return;
#pragma unroll 8
    for (int dim = lane_ / kTokens; dim < num_dims_; dim += 32 / kTokens) {
      P* inside = stored + dim * layer_.block_size;
      P* between = reinterpret_cast<P*>(word_at(dim, 0)) + token;
      if constexpr (kWrite) {
        *inside = *between;
      } else {
        *between = *inside;
      }
    }
  }

  const KvSlotsParams& p_;
  const Layer& layer_;
  uint32_t* shared_;  // of this warp
  int head_, lane_;
  int64_t first_;
  int num_tokens_;
  int first_dim_, num_dims_;
  int64_t begin_;     // of the patch in the tensors, in elements
  int token_stride_;  // of the tensors, in elements
};

}  // namespace kvservice::slots
