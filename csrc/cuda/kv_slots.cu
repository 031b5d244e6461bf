// Keys and values by slot: scattered into the pool, with conversion to FP8 if the pool is FP8, and gathered back.
//
//   slots       [num_tokens]
//   key, value  [num_tokens, num_kv_heads, head_size]
//   pool        K of one (block, layer, head): [head_size/x][block_size][x], V: [head_size][block_size]
//
// A thread block takes kTile consecutive tokens of `slots`, of one head. Keys move through registers, 16 bytes of the
// pool at a time. Values are transposed in shared memory. If kVector tokens (16 bytes of the pool) are contiguous in
// the pool, as in a prompt, they move as one vector; otherwise they move one by one, with tokens along the lanes, so
// that adjacent tokens still share a memory transaction.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "cuda/kv_slots.h"
#include "errors.h"

namespace kvservice {
namespace {

constexpr int kTile = 16;
constexpr int kThreads = 128;
constexpr int kHeadSizeMax = 256;
constexpr int64_t kVectorBytes = sizeof(uint4);

template <__nv_fp8_interpretation_t kind>
struct Float8 {
  static constexpr __nv_fp8_interpretation_t kKind = kind;
  __nv_fp8_storage_t bits;
};

using E4M3 = Float8<__NV_E4M3>;
using E5M2 = Float8<__NV_E5M2>;

__device__ float to_float(float x) { return x; }
__device__ float to_float(__half x) { return __half2float(x); }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ void from_float(float x, float& out) { out = x; }
__device__ void from_float(float x, __half& out) { out = __float2half_rn(x); }
__device__ void from_float(float x, __nv_bfloat16& out) { out = __float2bfloat16_rn(x); }

// P is the element type of the pool, T that of the tensor. Equal types are copied as bits.
template <class P, class T>
__device__ P to_pool(T x, float scale) {
  if constexpr (std::is_same_v<P, T>) {
    return x;
  } else {
    return P{__nv_cvt_float_to_fp8(to_float(x) / scale, __NV_SATFINITE, P::kKind)};
  }
}

template <class P, class T>
__device__ T to_tensor(P x, float scale) {
  if constexpr (std::is_same_v<P, T>) {
    return x;
  } else {
    T out;
    from_float(__half2float(__half(__nv_cvt_fp8_to_halfraw(x.bits, P::kKind))) * scale, out);
    return out;
  }
}

// kCount elements, loaded and stored 16 bytes at a time.
template <class E, int kCount>
struct alignas(16) Pack {
  E at[kCount];
  __device__ static Pack load(const E* from) {
    Pack pack;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Pack) / 16); ++i) {
      reinterpret_cast<uint4*>(&pack)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
    return pack;
  }
  __device__ void store(E* to) const {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Pack) / 16); ++i) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(this)[i];
    }
  }
};

template <class P, class T>
struct Tile {
  static constexpr int kVector = 16 / sizeof(P);  // pool elements in 16 bytes: dimensions of a key, or adjacent tokens
  static constexpr int kPiece = 16 / sizeof(T);   // tensor elements in 16 bytes
  // Padding between the dimensions that a thread transposes at a time, so that eight lanes along the tokens and four
  // along the dimensions use different banks.
  static constexpr int kPad = sizeof(P) == 1 ? 16 : 8;

  __device__ static int row(int dim) { return dim * kTile + dim / kPiece * kPad; }
  static constexpr int kElements = kHeadSizeMax * kTile + kHeadSizeMax / kPiece * kPad;
};

// The locations of the tile's tokens in the pool. In shared memory.
template <class P>
struct Places {
  int64_t slot[kTile];  // negative: skip the token
  P* key[kTile];
  P* value[kTile];
};

// The work of one thread block.
template <class P, class T>
struct TileJob {
  using Layout = Tile<P, T>;
  const KvSlotsParams& p;
  Places<P>& places;
  int64_t first;
  int head;

  __device__ void find_place(int token) const {
    const int64_t slot = first + token < p.num_tokens ? p.slots[first + token] : -1;
    const bool inside = slot >= 0 && slot < p.pool.num_blocks * p.pool.block_size;
    places.slot[token] = inside ? slot : -1;
    if (!inside) return;
    const int64_t block = slot / p.pool.block_size, offset = slot % p.pool.block_size;
    places.key[token] = reinterpret_cast<P*>(p.pool.key(block, p.layer, head)) + offset * Layout::kVector;
    places.value[token] = reinterpret_cast<P*>(p.pool.value(block, p.layer, head)) + offset;
  }
  __device__ T* tensor(char* base, int token) const {
    return reinterpret_cast<T*>(base) + ((first + token) * p.pool.num_kv_heads + head) * p.pool.head_size;
  }
  // Whether the tokens [token, token + kVector) are 16 aligned bytes of every dimension's values.
  __device__ bool is_contiguous(int token) const {
    const int64_t slot = places.slot[token];
    bool contiguous = slot >= 0 && slot % Layout::kVector == 0 && p.pool.block_size >= Layout::kVector;
    for (int i = 1; i < Layout::kVector; ++i) contiguous = contiguous && places.slot[token + i] == slot + i;
    return contiguous;
  }
};

// Calls body(token, part) for the tile's tokens and `parts` parts of each, with eight tokens side by side.
template <class Body>
__device__ void for_each_part(int parts, const Body& body) {
  for (int i = threadIdx.x; i < parts * kTile; i += kThreads) {
    body(i % 8 + i / (8 * parts) * 8, i / 8 % parts);
  }
}

template <bool kWrite, class P, class T>
__device__ void move_keys(const TileJob<P, T>& job, float scale) {
  using Layout = Tile<P, T>;
  const int64_t stride = job.p.pool.block_size * Layout::kVector;
  for_each_part(static_cast<int>(job.p.pool.head_size) / Layout::kVector, [&](int token, int part) {
    if (job.places.slot[token] < 0) return;
    P* stored = job.places.key[token] + part * stride;
    T* outside = job.tensor(job.p.key, token) + part * Layout::kVector;
    if constexpr (kWrite) {
      const auto outer = Pack<T, Layout::kVector>::load(outside);
      Pack<P, Layout::kVector> inner;
#pragma unroll
      for (int i = 0; i < Layout::kVector; ++i) inner.at[i] = to_pool<P, T>(outer.at[i], scale);
      inner.store(stored);
    } else {
      const auto inner = Pack<P, Layout::kVector>::load(stored);
      Pack<T, Layout::kVector> outer;
#pragma unroll
      for (int i = 0; i < Layout::kVector; ++i) outer.at[i] = to_tensor<P, T>(inner.at[i], scale);
      outer.store(outside);
    }
  });
}

// Between the tensor, 16 bytes at a time, and shared memory.
template <bool kWrite, class P, class T>
__device__ void move_values_outside(const TileJob<P, T>& job, float scale, P* shared) {
  using Layout = Tile<P, T>;
  for_each_part(static_cast<int>(job.p.pool.head_size) / Layout::kPiece, [&](int token, int part) {
    if (job.places.slot[token] < 0) return;
    T* outside = job.tensor(job.p.value, token) + part * Layout::kPiece;
    P* row = shared + Layout::row(part * Layout::kPiece) + token;
    if constexpr (kWrite) {
      const auto pack = Pack<T, Layout::kPiece>::load(outside);
#pragma unroll
      for (int i = 0; i < Layout::kPiece; ++i) row[i * kTile] = to_pool<P, T>(pack.at[i], scale);
    } else {
      Pack<T, Layout::kPiece> pack;
#pragma unroll
      for (int i = 0; i < Layout::kPiece; ++i) pack.at[i] = to_tensor<P, T>(row[i * kTile], scale);
      pack.store(outside);
    }
  });
}

// Between shared memory and the pool: kVector tokens of one dimension.
template <bool kWrite, class P, class T>
__device__ void move_vector(const TileJob<P, T>& job, int dim, int token, P* shared) {
  using Layout = Tile<P, T>;
  P* stored = job.places.value[token] + dim * job.p.pool.block_size;
  P* row = shared + Layout::row(dim) + token;
  if constexpr (kWrite) {
    Pack<P, Layout::kVector>::load(row).store(stored);
  } else {
    Pack<P, Layout::kVector>::load(stored).store(row);
  }
}

template <bool kWrite, class P, class T>
__device__ void move_values_inside(const TileJob<P, T>& job, P* shared) {
  using Layout = Tile<P, T>;
  constexpr int kVectors = kTile / Layout::kVector;
  const int head_size = static_cast<int>(job.p.pool.head_size);
  bool contiguous[kVectors];
#pragma unroll
  for (int r = 0; r < kVectors; ++r) contiguous[r] = job.is_contiguous(r * Layout::kVector);
  for (int i = threadIdx.x; i < head_size * kVectors; i += kThreads) {
    bool vector = false;
#pragma unroll
    for (int r = 0; r < kVectors; ++r) vector = vector || (contiguous[r] && i % kVectors == r);
    if (vector) move_vector<kWrite>(job, i / kVectors, i % kVectors * Layout::kVector, shared);
  }
  for (int i = threadIdx.x; i < head_size * kTile; i += kThreads) {
    const int dim = i / kTile, token = i % kTile;
    bool single = job.places.slot[token] >= 0;
#pragma unroll
    for (int r = 0; r < kVectors; ++r) single = single && !(contiguous[r] && token / Layout::kVector == r);
    if (!single) continue;
    P* stored = job.places.value[token] + dim * job.p.pool.block_size;
    P* row = shared + Layout::row(dim) + token;
    if constexpr (kWrite) {
      *stored = *row;
    } else {
      *row = *stored;
    }
  }
}

// Runs on the thread blocks behind those of the heads, one vector per thread, so that all loads over the host link are
// in flight at once.
__device__ void fused_copy(const FusedCopy& copy, int64_t block) {
  const int64_t i = block * kThreads + threadIdx.x;
  if (i < copy.bytes / kVectorBytes) static_cast<uint4*>(copy.to)[i] = static_cast<const uint4*>(copy.from)[i];
}

template <bool kWrite, class P, class T>
__global__ void __launch_bounds__(kThreads)
    move_slots(const __grid_constant__ KvSlotsParams p, const __grid_constant__ FusedCopy copy) {
  if constexpr (kWrite) {
    const int64_t row = static_cast<int64_t>(blockIdx.y) - p.pool.num_kv_heads;
    if (row >= 0) return fused_copy(copy, row * gridDim.x + blockIdx.x);
  }
  __shared__ Places<P> places;
  __shared__ alignas(16) P shared[Tile<P, T>::kElements];
  const TileJob<P, T> job{p, places, static_cast<int64_t>(blockIdx.x) * kTile, static_cast<int>(blockIdx.y)};
  if (threadIdx.x < kTile) job.find_place(static_cast<int>(threadIdx.x));
  __syncthreads();
  const float k_scale = p.k_scale == nullptr ? 1.0F : p.k_scale[job.head];
  const float v_scale = p.v_scale == nullptr ? 1.0F : p.v_scale[job.head];
  move_keys<kWrite>(job, k_scale);
  if constexpr (kWrite) {
    move_values_outside<kWrite>(job, v_scale, shared);
    __syncthreads();
    move_values_inside<kWrite>(job, shared);
  } else {
    move_values_inside<kWrite>(job, shared);
    __syncthreads();
    move_values_outside<kWrite>(job, v_scale, shared);
  }
}

template <bool kWrite, class P, class T>
void launch(const KvSlotsParams& p, const FusedCopy& copy, cudaStream_t stream) {
  const int64_t num_tiles = (p.num_tokens + kTile - 1) / kTile;
  const int64_t rows = (copy.bytes + num_tiles * kThreads * kVectorBytes - 1) / (num_tiles * kThreads * kVectorBytes);
  const dim3 grid(static_cast<unsigned>(num_tiles), static_cast<unsigned>(p.pool.num_kv_heads + rows));
  move_slots<kWrite, P, T><<<grid, kThreads, 0, stream>>>(p, copy);
  check_launch(kWrite ? "write_kv" : "read_kv");
}

template <bool kWrite, class P>
void launch_converting(const KvSlotsParams& p, const FusedCopy& copy, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kFloat32:
      return launch<kWrite, P, float>(p, copy, stream);
    case DType::kFloat16:
      return launch<kWrite, P, __half>(p, copy, stream);
    default:
      return launch<kWrite, P, __nv_bfloat16>(p, copy, stream);
  }
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

void check(const KvSlotsParams& p) {
  const PoolView& pool = p.pool;
  require(pool.num_blocks > 0 && pool.num_layers > 0, "pool", "is empty");
  require(pool.num_kv_heads > 0 && pool.num_kv_heads < (1 << 16), "pool", "number of KV heads is not in [1, 65535]");
  require(
      pool.head_size > 0 && pool.head_size <= kHeadSizeMax && pool.head_size % (is_float8(pool.dtype) ? 16 : 8) == 0,
      "pool", "head size is not a multiple of 8 (of 16 in an FP8 pool) up to 256");
  require(pool.block_size > 0 && pool.block_size <= 256 && (pool.block_size & (pool.block_size - 1)) == 0, "pool",
          "block size is not a power of two up to 256");
  require(p.layer >= 0 && p.layer < pool.num_layers, "layer", "is outside the pool");
  require(!is_float8(p.dtype), "key", "has an FP8 dtype");
  require(is_float8(pool.dtype) || p.dtype == pool.dtype, "key", "does not have the pool's dtype");
  require(p.num_tokens >= 0, "num_tokens", "is negative");
  require(is_aligned(pool.data), "pool", "is not aligned to 16 bytes");
  require(is_aligned(p.key), "key", "is not aligned to 16 bytes");
  require(is_aligned(p.value), "value", "is not aligned to 16 bytes");
}

template <bool kWrite>
void move(const KvSlotsParams& p, const FusedCopy& copy, cudaStream_t stream) {
  check(p);
  require(copy.bytes >= 0 && copy.bytes <= kFusedCopyBytesMax && copy.bytes % kVectorBytes == 0, "copy",
          "is not a multiple of 16 bytes up to 1 MiB");
  if (p.num_tokens == 0) return;  // then there is nothing to copy alongside either
  switch (p.pool.dtype) {
    case DType::kFloat32:
      return launch<kWrite, uint32_t, uint32_t>(p, copy, stream);
    case DType::kFloat8E4M3:
      return launch_converting<kWrite, E4M3>(p, copy, stream);
    case DType::kFloat8E5M2:
      return launch_converting<kWrite, E5M2>(p, copy, stream);
    default:
      return launch<kWrite, uint16_t, uint16_t>(p, copy, stream);
  }
}

}  // namespace

void write_kv_cuda(const KvSlotsParams& params, cudaStream_t stream) { move<true>(params, {}, stream); }

void write_kv_cuda(const KvSlotsParams& params, const FusedCopy& copy, cudaStream_t stream) {
  move<true>(params, copy, stream);
}

void read_kv_cuda(const KvSlotsParams& params, cudaStream_t stream) { move<false>(params, {}, stream); }

}  // namespace kvservice
