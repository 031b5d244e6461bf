// The extend kernel for Ampere and later, after FlashAttention-2. A warp has 16 rows of a tile. Keys and values pass
// through shared memory in steps of kKeys tokens, double-buffered.
//
// FP8 keys and values are copied as they are and then converted to float16. Queries are float16 in that case too: a
// power of two scales each bfloat16 row into the range.
#pragma once

#include "cuda/extend_load.cuh"

namespace kvservice {
namespace extend {

constexpr int kMmaWarps = kMmaRows / 16, kMmaThreads = 32 * kMmaWarps;
static_assert(kMmaThreads == kLoadThreads, "all threads of the block load");

// kHead is the head size, or a larger size to which loops are unrolled.
template <int kHead, bool kFloat8>
struct MmaShape {
  static constexpr int kKeys = kHead > 128 ? 32 : 64;
  static constexpr int kTileBytes = kHead * kKeys * 2;  // of K or V in the layout of the MMAs
  static constexpr int kRawBytes = kHead * kKeys;       // of FP8 K or V
  static constexpr int kStageBytes = kFloat8 ? 2 * kRawBytes : 2 * kTileBytes;
  static constexpr int kQueryStride = kHead * 2 + 16;
  static constexpr int kQueryBytes = kMmaRows * kQueryStride;
  static constexpr int kStages = 2;
  static constexpr int kSharedBytes = kQueryBytes + kStages * kStageBytes + (kFloat8 ? 2 * kTileBytes : 0);
  static constexpr bool kQueryInRegisters = kHead <= 128;
  static constexpr int kBlocksPerSm = kHead > 128 ? 1 : 2;
};

template <typename T, int kHead, bool kFloat8>
class MmaTile {
  using Shape = MmaShape<kHead, kFloat8>;
  static constexpr int kKeys = Shape::kKeys, kOctets = kKeys / 8;

 public:
  __device__ MmaTile(const Args& a, const Tile& tile, char* shared)
      : a_(a),
        tile_(tile),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32),
        shared_(shared),
        address_(ptx::shared_address(shared)),
        query_(warp_ * 16 * Shape::kQueryStride),
        warp_row_(tile.first_row + 16 * warp_),
        loader_(a, tile) {
    for (int i = 0; i < 2; ++i) {
      position_[i] = tile.position(a, row(i));
      visible_[i] = tile.first_visible(a, position_[i]);
    }
  }

  __device__ void attend() {
    look_up(tile_.first_key);
    load_stage(0, tile_.first_key);
    load_queries();
    set_options();
    int stage = 0;
    for (int key = tile_.first_key; key < tile_.end; key += kKeys, stage ^= 1) {
      if (key + kKeys < tile_.end) {
        load_stage(stage ^ 1, key + kKeys);
        wait_copies<1>();
      } else {
        wait_copies<0>();
      }
      __syncthreads();
      if constexpr (kFloat8) convert(stage);
      if (warp_row_ < tile_.num_rows(a_)) step(stage, key);
      __syncthreads();
    }
    store();
  }

 private:
  __device__ int row(int i) const { return warp_row_ + lane_ / 4 + 8 * i; }
  __device__ uint32_t stage_address(int stage) const {
    return address_ + Shape::kQueryBytes + stage * Shape::kStageBytes;
  }
  __device__ uint32_t key_address(int stage) const { return stage_address(kFloat8 ? Shape::kStages : stage); }
  __device__ uint32_t value_address(int stage) const { return key_address(stage) + Shape::kTileBytes; }

  // Starts the copies of a step and looks up the blocks of the next step.
  __device__ void load_stage(int stage, int key) {
    loader_.load_keys(stage_address(stage), loader_.keys_at(key));
    loader_.load_values(stage_address(stage) + (kFloat8 ? Shape::kRawBytes : Shape::kTileBytes),
                        loader_.values_at(key));
    commit_copies();
    look_up(key + kKeys);
  }

  __device__ void look_up(int key) {
    loader_.look_up_keys(key);
    loader_.look_up_values(key);
  }

  __device__ void to_halves(uint32_t bytes, uint32_t& first, uint32_t& second) const {
    if (a_.pool_dtype == DType::kFloat8E4M3) {
      ptx::e4m3_to_half(bytes, first, second);
    } else {
      ptx::e5m2_to_half(bytes, first, second);
    }
  }

  // Converts a stage to the layout of the MMAs.
  __device__ void convert(int stage) {
    const char* raw = shared_ + Shape::kQueryBytes + stage * Shape::kStageBytes;
    char* keys = shared_ + Shape::kQueryBytes + Shape::kStages * Shape::kStageBytes;
    const int token = threadIdx.x % kKeys;
    for (int piece = threadIdx.x / kKeys; piece < a_.head_size / 16; piece += kMmaThreads / kKeys) {
      const uint4 in = *reinterpret_cast<const uint4*>(raw + (piece * kKeys + token) * 16);
      uint4 low, high;
      to_halves(in.x, low.x, low.y);
      to_halves(in.y, low.z, low.w);
      to_halves(in.z, high.x, high.y);
      to_halves(in.w, high.z, high.w);
      *reinterpret_cast<uint4*>(keys + (2 * piece * kKeys + token) * 16) = low;
      *reinterpret_cast<uint4*>(keys + ((2 * piece + 1) * kKeys + token) * 16) = high;
    }
    // Converts sixteen tokens of a dimension and swaps their octets.
    for (int i = threadIdx.x; i < kKeys / 16 * kHead; i += kMmaThreads) {
      const int swapped = i / 4 % 2;
      if (i % kHead >= a_.head_size) continue;
      const uint4 in = *reinterpret_cast<const uint4*>(raw + Shape::kRawBytes + i * 16);
      uint4 out[2];
      to_halves(in.x, out[0].x, out[0].y);
      to_halves(in.y, out[0].z, out[0].w);
      to_halves(in.z, out[1].x, out[1].y);
      to_halves(in.w, out[1].z, out[1].w);
      auto* values = reinterpret_cast<uint4*>(keys + Shape::kTileBytes + i * 32);
      values[swapped] = out[0];
      values[swapped ^ 1] = out[1];
    }
    __syncthreads();
  }

  // Loads a warp's rows to shared memory, padded against bank conflicts, and to registers if these suffice.
  __device__ void load_queries() {
#pragma unroll 4
    for (int r = 0; r < 16; ++r) {
      uint4 numbers = make_uint4(0, 0, 0, 0);
      if (warp_row_ + r < tile_.num_rows(a_) && lane_ < a_.head_size / 8) {
        const int64_t offset = tile_.query_row(a_, warp_row_ + r) * a_.head_size;
        numbers = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(a_.query) + offset)[lane_];
      }
      if constexpr (kFloat8) fit_into_halves(r, numbers);
      if (lane_ < kHead / 8) {
        *reinterpret_cast<uint4*>(shared_ + query_ + r * Shape::kQueryStride + lane_ * 16) = numbers;
      }
    }
    __syncwarp();
    if constexpr (Shape::kQueryInRegisters) {
#pragma unroll
      for (int k = 0; k < kHead / 16; ++k) query_fragment(k, queries_[k]);
    }
  }

  __device__ void fit_into_halves(int r, uint4& numbers) {
    float largest = largest_of_8(numbers, a_.dtype);
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, step));
    const PowerOfTwo power(largest);
    if (r == lane_ / 4) row_scale_[0] = power.up;
    if (r == lane_ / 4 + 8) row_scale_[1] = power.up;
    numbers = scaled_halves(numbers, a_.dtype, power.down);
  }

  __device__ void query_fragment(int k, uint32_t (&fragment)[4]) const {
    const int offset = lane_ % 16 * Shape::kQueryStride + lane_ / 16 * 16;
    ptx::ldmatrix_4(fragment, address_ + query_ + offset + k * 32);
  }

  __device__ void set_options() {
    const float k_scale = a_.k_scale != nullptr ? a_.k_scale[tile_.kv_head] : 1.0F;
    const float scale = a_.scale * k_scale;
    plain_ = a_.soft_cap <= 0.0F && a_.alibi_slopes == nullptr && scale > 0.0F;
    for (int i = 0; i < 2; ++i) {
      const int head = tile_.kv_head * a_.group + row(i) % a_.group;
      options_[i] = {scale * row_scale_[i], a_.soft_cap,
                     a_.alibi_slopes != nullptr ? a_.alibi_slopes[head] * kLog2E : 0.0F};
      // The exponential applies the scale of a plain logit.
      factor_[i] = plain_ ? options_[i].scale * kLog2E : 1.0F;
    }
  }

  __device__ void step(int stage, int key) {
    float logits[kOctets][4];
    multiply_keys(key_address(stage), logits);
    if (!plain_) apply_options(key, logits);
    const bool all_visible = key + kKeys - 1 <= tile_.position(a_, warp_row_) &&
                             key >= tile_.first_visible(a_, tile_.position(a_, warp_row_ + 15));
    if (!all_visible) mask(key, logits);
    online_softmax(logits);
    multiply_values(value_address(stage), logits);
  }

  __device__ void multiply_keys(uint32_t keys, float (&logits)[kOctets][4]) {
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      for (float& x : logits[n]) x = 0.0F;
    }
    const uint32_t address = keys + (lane_ / 8 % 2 * kKeys + lane_ / 16 * 8 + lane_ % 8) * 16;
#pragma unroll
    for (int k = 0; k < kHead / 16; ++k) {
      if (k * 16 >= a_.head_size) break;
      uint32_t query[4];
      if constexpr (Shape::kQueryInRegisters) {
        for (int i = 0; i < 4; ++i) query[i] = queries_[k][i];
      } else {
        query_fragment(k, query);
      }
#pragma unroll
      for (int n = 0; n < kOctets; n += 2) {
        uint32_t b[4];
        ptx::ldmatrix_4(b, address + (2 * k * kKeys + n * 8) * 16);
        ptx::mma<T>(logits[n], query, b[0], b[1]);
        ptx::mma<T>(logits[n + 1], query, b[2], b[3]);
      }
    }
  }

  __device__ int key_of(int key, int octet, int element) const { return key + octet * 8 + lane_ % 4 * 2 + element % 2; }

  __device__ void apply_options(int key, float (&logits)[kOctets][4]) const {
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        logits[n][e] = options_[e / 2].apply(logits[n][e], key_of(key, n, e) - position_[e / 2]);
      }
    }
  }

  __device__ void mask(int key, float (&logits)[kOctets][4]) const {
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int position = key_of(key, n, e);
        if (position > position_[e / 2] || position < visible_[e / 2]) logits[n][e] = -INFINITY;
      }
    }
  }

  // Converts logits to weights and rescales the accumulators to the new maxima.
  __device__ void online_softmax(float (&logits)[kOctets][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float largest = max_[i];
#pragma unroll
      for (int n = 0; n < kOctets; ++n) largest = fmaxf(largest, fmaxf(logits[n][2 * i], logits[n][2 * i + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 2));
      // No key was visible so far: any finite number works.
      const float shift = largest == -INFINITY ? 0.0F : largest * factor_[i];
      const float decay = ptx::exp2_fast(max_[i] * factor_[i] - shift);
      max_[i] = largest;
      float sum = 0.0F;
#pragma unroll
      for (int n = 0; n < kOctets; ++n) {
#pragma unroll
        for (int e = 2 * i; e < 2 * i + 2; ++e) {
          logits[n][e] = ptx::exp2_fast(logits[n][e] * factor_[i] - shift);
          sum += logits[n][e];
        }
      }
      sum_[i] = sum_[i] * decay + sum;
#pragma unroll
      for (int n = 0; n < kHead / 8; ++n) {
        acc_[n][2 * i] *= decay;
        acc_[n][2 * i + 1] *= decay;
      }
    }
  }

  __device__ void multiply_values(uint32_t values, const float (&weights)[kOctets][4]) {
    const uint32_t address = values + (lane_ / 16 * 8 + lane_ % 8) * 32 + (lane_ / 8 % 2 ^ lane_ / 4 % 2) * 16;
#pragma unroll
    for (int k = 0; k < kOctets / 2; ++k) {
      const uint32_t a[4] = {ptx::pack<T>(weights[2 * k][0], weights[2 * k][1]),
                             ptx::pack<T>(weights[2 * k][2], weights[2 * k][3]),
                             ptx::pack<T>(weights[2 * k + 1][0], weights[2 * k + 1][1]),
                             ptx::pack<T>(weights[2 * k + 1][2], weights[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < kHead / 8; n += 2) {
        if (n * 8 >= a_.head_size) break;
        uint32_t b[4];
        ptx::ldmatrix_4(b, address + (k * kHead + n * 8) * 32);
        ptx::mma<T>(acc_[n], a, b[0], b[1]);
        ptx::mma<T>(acc_[n + 1], a, b[2], b[3]);
      }
    }
  }

  // Stages the output in the warp's part of the query memory, so that lanes store 16 contiguous bytes.
  __device__ void store() {
    const float v_scale = a_.v_scale != nullptr ? a_.v_scale[tile_.kv_head] : 1.0F;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum_[i] += __shfl_xor_sync(~0U, sum_[i], 1);
      sum_[i] += __shfl_xor_sync(~0U, sum_[i], 2);
      const float factor = v_scale / sum_[i];
      char* out = shared_ + query_ + (lane_ / 4 + 8 * i) * Shape::kQueryStride + lane_ % 4 * 4;
#pragma unroll
      for (int n = 0; n < kHead / 8; ++n) {
        *reinterpret_cast<uint32_t*>(out + n * 16) =
            pack_as(acc_[n][2 * i] * factor, acc_[n][2 * i + 1] * factor, a_.dtype);
      }
      if (a_.lse != nullptr && lane_ % 4 == 0 && row(i) < tile_.num_rows(a_)) {
        a_.lse[tile_.query_row(a_, row(i))] = (max_[i] * factor_[i] + log2f(sum_[i])) * kLn2;
      }
    }
    __syncwarp();
    for (int r = 0; r < 16 && warp_row_ + r < tile_.num_rows(a_); ++r) {
      if (lane_ >= a_.head_size / 8) break;
      const int64_t offset = tile_.query_row(a_, warp_row_ + r) * a_.head_size;
      reinterpret_cast<uint4*>(static_cast<uint16_t*>(a_.out) + offset)[lane_] =
          *reinterpret_cast<const uint4*>(shared_ + query_ + r * Shape::kQueryStride + lane_ * 16);
    }
  }

  const Args& a_;
  const Tile tile_;
  const int warp_;
  const int lane_;
  char* const shared_;
  const uint32_t address_;
  const int query_;  // offset of the warp's rows in shared memory
  const int warp_row_;
  KvLoader<kHead, kKeys, kFloat8> loader_;
  bool plain_ = true;
  // State of the two rows of this thread:
  int position_[2];
  int visible_[2];
  LogitOptions options_[2];
  float row_scale_[2] = {1.0F, 1.0F};
  float factor_[2];
  float max_[2] = {-INFINITY, -INFINITY};
  float sum_[2] = {0.0F, 0.0F};
  float acc_[kHead / 8][4] = {};
  uint32_t queries_[Shape::kQueryInRegisters ? kHead / 16 : 1][4];
};

template <typename T, int kHead, bool kFloat8>
__global__ void __launch_bounds__(kMmaThreads, (MmaShape<kHead, kFloat8>::kBlocksPerSm))
    extend_mma(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char shared[];
  __shared__ Tile tile;
  using Scheduler = TileScheduler<kMmaRows, MmaShape<kHead, kFloat8>::kKeys>;
  __shared__ typename Scheduler::Sequences sequences;
  Scheduler scheduler(a, &sequences);
  if (threadIdx.x < 32) scheduler.start();
  while (true) {
    if (threadIdx.x < 32) scheduler.next(&tile);
    __syncthreads();
    if (tile.num_steps <= 0) break;
    MmaTile<T, kHead, kFloat8>(a, tile, shared).attend();
    __syncthreads();
  }
  if (threadIdx.x == 0) reset_counters(a);
}

template <typename T, int kHead, bool kFloat8>
void launch_mma_as(const Args& args, cudaStream_t stream, int64_t tiles) {
  using Shape = MmaShape<kHead, kFloat8>;
  const auto kernel = extend_mma<T, kHead, kFloat8>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes),
             "cudaFuncSetAttribute(extend_mma)");
  const int64_t resident = static_cast<int64_t>(current_device_properties().num_sms) * Shape::kBlocksPerSm;
  const auto blocks = static_cast<unsigned>(tiles < resident ? tiles : resident);
  kernel<<<blocks, kMmaThreads, Shape::kSharedBytes, stream>>>(args);
  check_launch("extend_mma");
}

template <typename T, bool kFloat8>
void launch_mma_of(const Args& args, cudaStream_t stream, int64_t tiles) {
  if (args.head_size <= 64) {
    launch_mma_as<T, 64, kFloat8>(args, stream, tiles);
  } else if (args.head_size <= 128) {
    launch_mma_as<T, 128, kFloat8>(args, stream, tiles);
  } else {
    launch_mma_as<T, 256, kFloat8>(args, stream, tiles);
  }
}

}  // namespace extend
}  // namespace kvservice
