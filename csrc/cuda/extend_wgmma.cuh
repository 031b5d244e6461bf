// The extend kernel for Hopper, after FlashAttention-3: one group of four warps copies, two compute.
//
// A tile has 128 rows, 64 for each computing group. Queries, keys and values come through shared memory, in steps of
// kKeys tokens, kStages steps of each in flight; barriers in shared memory say what is there (full) and what has been
// used (empty). A group starts the next step's product with the keys before it turns this step's logits into weights,
// and the groups take turns at the multiplier, so that one's exponentials run beside the other's products.
//
// Head sizes under kHead are padded: with zeros in queries and keys, with anything in values, whose columns are
// dropped.
#pragma once

#include "cuda/extend_load.cuh"
#include "cuda/wgmma.cuh"

namespace kvservice {
namespace extend {

constexpr int kStages = 2;
constexpr int kGroupThreads = 128, kGroupRows = 64, kComputeWarps = 8;
constexpr int kWgmmaThreads = 3 * kGroupThreads;
static_assert(kGroupThreads == kLoadThreads, "the first group loads");
static_assert(kWgmmaRows == 2 * kGroupRows, "two groups compute");

// Registers of a thread that loads and of one that computes: together no more than a multiprocessor has.
constexpr int kLoadRegisters = 40, kComputeRegisters = 232;

template <int kHead>
struct WgmmaShape {
  static constexpr int kKeys = kHead > 128 ? 64 : 128;
  static constexpr int kTileBytes = kHead * kKeys * 2;
  static constexpr int kQueryBytes = kWgmmaRows * kHead * 2;
  static constexpr int kKeysOffset = kQueryBytes;
  static constexpr int kValuesOffset = kKeysOffset + kStages * kTileBytes;
  static constexpr int kSharedBytes = kValuesOffset + kStages * kTileBytes;
  // Columns of one product with the values, and how many make up a head.
  static constexpr int kColumns = kHead > 128 ? 128 : kHead;
  static constexpr int kParts = kHead / kColumns;
};

struct Signals {
  uint64_t query_full;
  uint64_t query_empty;
  uint64_t keys_full[kStages];
  uint64_t keys_empty[kStages];
  uint64_t values_full[kStages];
  uint64_t values_empty[kStages];
  // What the loading group works on, in turns, and what the others do.
  Tile loading[2];
  bool loading_found[2];
  Tile computing;
  bool computing_found;
};

enum NamedBarrier : int { kLoaders = 1, kFirstTurn = 2 };

#ifdef KVSERVICE_WGMMA

// Which of the stages comes next, and the parity of its barriers.
struct Turn {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    const bool last = stage == kStages - 1;
    stage = last ? 0 : stage + 1;
    parity ^= last ? 1 : 0;
  }
};

// The steps of a tile: from the first key that its first row sees to the last that its last row does.
template <int kKeys>
struct Steps {
  int begin;  // visible keys
  int end;
  int first;  // key of the first step
  int count;

  __device__ Steps(const Args& a, const Tile& tile)
      : begin(tile.first_visible(a, tile.position(a, tile.first_row))),
        end(tile.position(a, tile.first_row + kWgmmaRows - 1) + 1),
        first(begin / kKeys * kKeys),
        count((end - first + kKeys - 1) / kKeys) {}
};

template <int kHead>
class WgmmaLoader {
  using Shape = WgmmaShape<kHead>;
  static constexpr int kKeys = Shape::kKeys;

 public:
  __device__ WgmmaLoader(const Args& a, char* shared, Signals* signals)
      : a_(a), address_(ptx::shared_address(shared)), signals_(signals) {}

  __device__ void run() {
    int64_t index = blockIdx.x;
    int slot = 0;
    for (; find(&index, slot); slot ^= 1) load(signals_->loading[slot]);
    wait_for_compute();
    announce(nullptr);
    arrive_when_copied(&signals_->query_full);
    if (threadIdx.x == 0) leave_counters(a_);
  }

 private:
  // The next tile to signals_->loading[slot]; true if there is one.
  __device__ bool find(int64_t* index, int slot) {
    if (threadIdx.x < 32) {
      Tile tile;
      const bool found = finder_.find(a_, *index, &tile);
      if (threadIdx.x == 0) {
        signals_->loading[slot] = tile;
        signals_->loading_found[slot] = found;
        if (found) *index = next_tile(a_);
      }
      *index = __shfl_sync(~0U, *index, 0);
    }
    ptx::named_barrier(kLoaders, kLoadThreads);
    return signals_->loading_found[slot];
  }

  __device__ void load(const Tile& tile) {
    const Steps<kKeys> steps(a_, tile);
    KeyLoader<kHead, kKeys, false> loader(a_, tile, steps.begin, steps.end, threadIdx.x);
    loader.look_up_keys(steps.first);
    loader.look_up_values(steps.first);
    load_keys(loader, steps.first);
    wait_for_compute();
    announce(&tile);
    load_queries(tile);
    arrive_when_copied(&signals_->query_full);
    int key = steps.first;
    for (int i = 1; i < steps.count; ++i, key += kKeys) {
      load_keys(loader, key + kKeys);
      load_values(loader, key);
    }
    load_values(loader, key);
  }

  __device__ void load_keys(KeyLoader<kHead, kKeys, false>& loader, int key) {
    const int stage = keys_.stage;
    ptx::mbarrier_wait(ptx::shared_address(&signals_->keys_empty[stage]), keys_.parity ^ 1);
    loader.fill_keys(address_ + Shape::kKeysOffset + stage * Shape::kTileBytes, key);
    arrive_when_copied(&signals_->keys_full[stage]);
    loader.look_up_keys(key + kKeys);
    keys_.advance();
  }

  __device__ void load_values(KeyLoader<kHead, kKeys, false>& loader, int key) {
    const int stage = values_.stage;
    ptx::mbarrier_wait(ptx::shared_address(&signals_->values_empty[stage]), values_.parity ^ 1);
    loader.fill_values(address_ + Shape::kValuesOffset + stage * Shape::kTileBytes, key);
    arrive_when_copied(&signals_->values_full[stage]);
    loader.look_up_values(key + kKeys);
    values_.advance();
  }

  // Until the queries of the tile before are used.
  __device__ void wait_for_compute() {
    ptx::mbarrier_wait(ptx::shared_address(&signals_->query_empty), query_parity_ ^ 1);
    query_parity_ ^= 1;
  }

  // Tells the computing groups of their next tile, or that there is none.
  __device__ void announce(const Tile* tile) {
    if (threadIdx.x != 0) return;
    signals_->computing_found = tile != nullptr;
    if (tile != nullptr) signals_->computing = *tile;
    ptx::mbarrier_arrive(ptx::shared_address(&signals_->query_full));
  }

  // As matrices: [head_size/8][128 rows][8]. Eight lanes have rows that follow each other, so that they store 128
  // bytes.
  __device__ void load_queries(const Tile& tile) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pieces = a_.head_size / 8;
    for (int octet = warp; octet < kWgmmaRows / 8; octet += kLoadThreads / 32) {
      const int row = tile.first_row + octet * 8 + lane % 8;
      const bool copy = row < tile.num_rows(a_);
      const char* source = static_cast<const char*>(a_.query);
      if (copy) source += tile.query_row(a_, row) * a_.head_size * 2;
      const uint32_t dst = address_ + (octet * 8 + lane % 8) * 16;
      for (int piece = lane / 8; piece < pieces; piece += 4) {
        copy_16_or_zeros(dst + piece * kWgmmaRows * 16, source + (copy ? piece * 16 : 0), copy);
      }
    }
  }

  static __device__ void arrive_when_copied(uint64_t* barrier) {
    ptx::mbarrier_arrive_after_copies(ptx::shared_address(barrier));
  }

  const Args& a_;
  const uint32_t address_;
  Signals* const signals_;
  TileFinder<kWgmmaRows> finder_;
  Turn keys_;
  Turn values_;
  uint32_t query_parity_ = 0;
};

template <typename T, int kHead>
class WgmmaCompute {
  using Shape = WgmmaShape<kHead>;
  static constexpr int kKeys = Shape::kKeys, kLogits = kKeys / 2, kParts = Shape::kParts;
  static constexpr int kPartAcc = Shape::kColumns / 2;

 public:
  __device__ WgmmaCompute(const Args& a, char* shared, Signals* signals)
      : a_(a),
        signals_(signals),
        // Equal in all lanes, which the compiler cannot know otherwise: descriptors live in registers of the warp.
        group_(__shfl_sync(~0U, static_cast<int>(threadIdx.x) / kGroupThreads - 1, 0)),
        warp_row_(group_ * kGroupRows + threadIdx.x % kGroupThreads / 32 * 16),
        lane_(threadIdx.x % 32) {
    const uint32_t address = ptx::shared_address(shared);
    queries_ = ptx::matrix_descriptor(address + group_ * kGroupRows * 16, kWgmmaRows * 16, 128);
    keys_tile_ = ptx::matrix_descriptor(address + Shape::kKeysOffset, kKeys * 16, 128);
    values_tile_ = ptx::swizzled_32_descriptor(address + Shape::kValuesOffset);
  }

  __device__ void run() {
    if (group_ == 1) pass_turn();  // the first group has it
    uint32_t parity = 0;
    while (true) {
      ptx::mbarrier_wait(ptx::shared_address(&signals_->query_full), parity);
      parity ^= 1;
      if (!signals_->computing_found) break;
      tile_ = signals_->computing;
      if (tile_.first_row + group_ * kGroupRows < tile_.num_rows(a_)) {
        attend();
      } else {
        pass_by();
      }
    }
  }

 private:
  __device__ int row(int i) const { return tile_.first_row + warp_row_ + lane_ / 4 + 8 * i; }

  __device__ void take_turn() const { ptx::named_barrier(kFirstTurn + group_, 2 * kGroupThreads); }
  __device__ void pass_turn() const {
    asm volatile("bar.arrive %0, %1;" ::"r"(kFirstTurn + 1 - group_), "n"(2 * kGroupThreads) : "memory");
  }

  __device__ void release(uint64_t* barrier) const {
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(ptx::shared_address(barrier));
  }
  __device__ void wait_keys() const {
    ptx::mbarrier_wait(ptx::shared_address(&signals_->keys_full[keys_.stage]), keys_.parity);
  }
  __device__ void wait_values() const {
    ptx::mbarrier_wait(ptx::shared_address(&signals_->values_full[values_.stage]), values_.parity);
  }
  // For the keys of the next step or, when there is none, the values of this one.
  __device__ void wait_next(bool last) const {
    Turn values = values_;
    values.advance();
    const uint64_t* barrier = last ? &signals_->values_full[values.stage] : &signals_->keys_full[keys_.stage];
    ptx::mbarrier_wait(ptx::shared_address(barrier), last ? values.parity : keys_.parity);
  }
  __device__ void release_keys() {
    release(&signals_->keys_empty[keys_.stage]);
    keys_.advance();
  }
  __device__ void release_values() {
    release(&signals_->values_empty[values_.stage]);
    values_.advance();
  }

  // A tile that has no rows for this group.
  __device__ void pass_by() {
    const Steps<kKeys> steps(a_, tile_);
    for (int i = 0; i < steps.count; ++i) {
      wait_keys();
      release_keys();
      wait_values();
      release_values();
    }
    release(&signals_->query_empty);
  }

  __device__ void attend() {
    const Steps<kKeys> steps(a_, tile_);
    const bool both = tile_.first_row + kGroupRows < tile_.num_rows(a_);
    start_tile();
    float logits[kLogits], decay[2];
    uint32_t weights[kKeys / 16][4];
    wait_keys();
    ptx::fence_for_wgmma();
    ptx::wgmma_fence();
    multiply_keys(logits);
    ptx::wgmma_wait<0>();
    ptx::pin(logits);
    release_keys();
    if (steps.count == 1) release(&signals_->query_empty);
    soften(steps.first, logits, decay);
    pack(logits, weights);
    if (steps.count > 1) wait_keys();
    for (int left = steps.count - 1, key = steps.first + kKeys; left > 0; --left, key += kKeys) {
      wait_values();
      ptx::fence_for_wgmma();
      if (both) take_turn();
      pin_acc();
      ptx::wgmma_fence();
      multiply_keys(logits);
      multiply_values(weights);
      if (both) pass_turn();
      ptx::wgmma_wait<1>();
      ptx::pin(logits);
      release_keys();
      if (left == 1) release(&signals_->query_empty);
      soften(key, logits, decay);
      ptx::pin(logits);
      ptx::pin(decay);
      // The assembler would move the wait for the product up before the exponentials, but not past another wait.
      wait_next(left == 1);
      ptx::wgmma_wait<0>();
      pin_acc();
      ptx::pin(logits);
      release_values();
      rescale(decay);
      pack(logits, weights);
    }
    wait_values();
    ptx::fence_for_wgmma();
    pin_acc();
    ptx::wgmma_fence();
    multiply_values(weights);
    ptx::wgmma_wait<0>();
    pin_acc();
    release_values();
    store();
  }

  __device__ void start_tile() {
    const float k_scale = a_.k_scale != nullptr ? a_.k_scale[tile_.kv_head] : 1.0F;
    scale_ = a_.scale * k_scale;
    plain_ = a_.soft_cap <= 0.0F && a_.alibi_slopes == nullptr && scale_ > 0.0F;
    // Of a plain logit the scale is applied on the way into the exponential.
    factor_ = plain_ ? scale_ * kLog2E : 1.0F;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      max_[i] = -INFINITY;
      sum_[i] = 0.0F;
    }
#pragma unroll
    for (auto& part : acc_) {
#pragma unroll
      for (float& x : part) x = 0.0F;
    }
    all_visible_end_ = tile_.position(a_, tile_.first_row + warp_row_) + 1;
    all_visible_begin_ = tile_.first_visible(a_, tile_.position(a_, tile_.first_row + warp_row_ + 15));
  }

  __device__ void multiply_keys(float (&logits)[kLogits]) {
    const uint64_t keys = keys_tile_ + keys_.stage * (Shape::kTileBytes / 16);
#pragma unroll
    for (int k = 0; k < kHead / 16; ++k) {
      ptx::wgmma<T>(logits, queries_ + k * (2 * kWgmmaRows), keys + k * (2 * kKeys), k > 0);
    }
    ptx::wgmma_commit();
  }

  __device__ void multiply_values(const uint32_t (&weights)[kKeys / 16][4]) {
    const uint64_t values = values_tile_ + values_.stage * (Shape::kTileBytes / 16);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        ptx::wgmma<T>(acc_[part], weights[k], values + (k * kHead + part * Shape::kColumns) * 2);
      }
    }
    ptx::wgmma_commit();
  }

  __device__ void pin_acc() {
#pragma unroll
    for (auto& part : acc_) ptx::pin(part);
  }

  // Logits of the step at `key` to weights; what was summed before is to be multiplied by `decay`.
  __device__ void soften(int key, float (&logits)[kLogits], float (&decay)[2]) {
    if (!plain_) apply_options(key, logits);
    if (key + kKeys > all_visible_end_ || key < all_visible_begin_) mask(key, logits);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float largest = max_[i];
#pragma unroll
      for (int n = 0; n < kLogits; n += 4) {
        largest = fmaxf(largest, fmaxf(logits[n + 2 * i], logits[n + 2 * i + 1]));
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 2));
      // Nothing visible so far: any finite number will do.
      const float shift = largest == -INFINITY ? 0.0F : largest * factor_;
      decay[i] = ptx::exp2_fast(max_[i] * factor_ - shift);
      max_[i] = largest;
      float sum = 0.0F;
#pragma unroll
      for (int n = 0; n < kLogits; n += 4) {
#pragma unroll
        for (int e = n + 2 * i; e < n + 2 * i + 2; ++e) {
          logits[e] = ptx::exp2_fast(logits[e] * factor_ - shift);
          sum += logits[e];
        }
      }
      sum_[i] = sum_[i] * decay[i] + sum;
    }
  }

  // The key of element e of the logits is the step's, plus this.
  __device__ int key_offset(int e) const { return e / 4 * 8 + lane_ % 4 * 2 + e % 2; }

  __device__ void apply_options(int key, float (&logits)[kLogits]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int position = tile_.position(a_, row(i));
      const int head = tile_.kv_head * a_.group + row(i) % a_.group;
      const LogitOptions options{scale_, a_.soft_cap,
                                 a_.alibi_slopes != nullptr ? a_.alibi_slopes[head] * kLog2E : 0.0F};
#pragma unroll
      for (int n = 0; n < kLogits; n += 4) {
#pragma unroll
        for (int e = n + 2 * i; e < n + 2 * i + 2; ++e) {
          logits[e] = options.apply(logits[e], key + key_offset(e) - position);
        }
      }
    }
  }

  __device__ void mask(int key, float (&logits)[kLogits]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int position = tile_.position(a_, row(i));
      // Offsets of this lane's first key that are visible.
      const int last = position - key - lane_ % 4 * 2;
      const int first = tile_.first_visible(a_, position) - key - lane_ % 4 * 2;
#pragma unroll
      for (int n = 0; n < kLogits; n += 4) {
#pragma unroll
        for (int e = n + 2 * i; e < n + 2 * i + 2; ++e) {
          const int offset = e / 4 * 8 + e % 2;
          if (offset > last || offset < first) logits[e] = -INFINITY;
        }
      }
    }
  }

  __device__ void rescale(const float (&decay)[2]) {
#pragma unroll
    for (auto& part : acc_) {
#pragma unroll
      for (int e = 0; e < kPartAcc; ++e) part[e] *= decay[e / 2 % 2];
    }
  }

  static __device__ void pack(const float (&logits)[kLogits], uint32_t (&weights)[kKeys / 16][4]) {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[k][i] = ptx::pack<T>(logits[8 * k + 2 * i], logits[8 * k + 2 * i + 1]);
    }
  }

  __device__ void store() {
    const float v_scale = a_.v_scale != nullptr ? a_.v_scale[tile_.kv_head] : 1.0F;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum_[i] += __shfl_xor_sync(~0U, sum_[i], 1);
      sum_[i] += __shfl_xor_sync(~0U, sum_[i], 2);
      const bool valid = row(i) < tile_.num_rows(a_);
      const int64_t index = valid ? tile_.query_row(a_, row(i)) : 0;
      if (valid && a_.lse != nullptr && lane_ % 4 == 0) a_.lse[index] = (max_[i] * factor_ + log2f(sum_[i])) * kLn2;
      auto* out = reinterpret_cast<uint4*>(static_cast<uint16_t*>(a_.out) + index * a_.head_size);
      store_row(out, i, v_scale / sum_[i], valid);
    }
  }

  // Four lanes have a row, each two of every eight dimensions. They swap, so that each stores eight at once.
  __device__ void store_row(uint4* out, int i, float factor, bool valid) const {
#pragma unroll
    for (int octet = 0; octet < kHead / 8; octet += 4) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* pair = &acc_[octet * 4 / kPartAcc][(octet + j) * 4 % kPartAcc + 2 * i];
        words[j] = ptx::pack<T>(pair[0] * factor, pair[1] * factor);
      }
      transpose_by_quads(words);
      const int piece = octet + lane_ % 4;
      if (valid && piece < a_.head_size / 8) out[piece] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  // Word j of lane t of four becomes word t of lane j.
  __device__ void transpose_by_quads(uint32_t (&words)[4]) const {
    const bool odd = lane_ % 2 != 0, upper = lane_ % 4 >= 2;
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const uint32_t got = __shfl_xor_sync(~0U, odd ? words[j] : words[j + 1], 1);
      (odd ? words[j] : words[j + 1]) = got;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t got = __shfl_xor_sync(~0U, upper ? words[j] : words[j + 2], 2);
      (upper ? words[j] : words[j + 2]) = got;
    }
  }

  const Args& a_;
  Signals* const signals_;
  const int group_;
  const int warp_row_;  // of the tile
  const int lane_;
  uint64_t queries_;
  uint64_t keys_tile_;
  uint64_t values_tile_;
  Turn keys_;
  Turn values_;
  Tile tile_;
  // All rows of the warp see the keys from the one to the other.
  int all_visible_begin_;
  int all_visible_end_;
  bool plain_;
  float scale_;
  float factor_;
  // Of this thread's two rows:
  float max_[2];
  float sum_[2];
  float acc_[kParts][kPartAcc];
};

template <int kHead>
__device__ void prepare(const Args& a, char* shared, Signals* signals) {
  if (a.head_size < kHead) {
    for (int i = threadIdx.x * 16; i < WgmmaShape<kHead>::kSharedBytes; i += kWgmmaThreads * 16) {
      *reinterpret_cast<uint4*>(shared + i) = make_uint4(0, 0, 0, 0);
    }
    ptx::fence_for_wgmma();
  }
  if (threadIdx.x == 0) {
    // All loading threads' copies, and one thread's word that the tile is described.
    ptx::mbarrier_init(ptx::shared_address(&signals->query_full), kLoadThreads + 1);
    ptx::mbarrier_init(ptx::shared_address(&signals->query_empty), kComputeWarps);
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&signals->keys_full[i]), kLoadThreads);
      ptx::mbarrier_init(ptx::shared_address(&signals->values_full[i]), kLoadThreads);
      ptx::mbarrier_init(ptx::shared_address(&signals->keys_empty[i]), kComputeWarps);
      ptx::mbarrier_init(ptx::shared_address(&signals->values_empty[i]), kComputeWarps);
    }
  }
  __syncthreads();
}

#endif  // KVSERVICE_WGMMA

#ifdef KVSERVICE_WGMMA
#define KVSERVICE_WGMMA_BOUNDS __launch_bounds__(kWgmmaThreads, 1)
#else
// By which the host recognizes that there is no code here.
#define KVSERVICE_WGMMA_BOUNDS __launch_bounds__(32)
#endif

template <typename T, int kHead>
__global__ void KVSERVICE_WGMMA_BOUNDS extend_wgmma(const __grid_constant__ Args a) {
#ifdef KVSERVICE_WGMMA
  extern __shared__ __align__(1024) char shared[];
  __shared__ Signals signals;
  prepare<kHead>(a, shared, &signals);
  if (threadIdx.x < kGroupThreads) {
    ptx::give_registers<kLoadRegisters>();
    WgmmaLoader<kHead>(a, shared, &signals).run();
  } else {
    ptx::keep_registers<kComputeRegisters>();
    WgmmaCompute<T, kHead>(a, shared, &signals).run();
  }
#endif
}

template <typename T, int kHead>
bool launch_wgmma_as(const Args& args, cudaStream_t stream, int64_t tiles) {
  using Shape = WgmmaShape<kHead>;
  const auto kernel = extend_wgmma<T, kHead>;
  cudaFuncAttributes facts;
  check_cuda(cudaFuncGetAttributes(&facts, kernel), "cudaFuncGetAttributes(extend_wgmma)");
  if (facts.maxThreadsPerBlock < kWgmmaThreads) return false;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes),
             "cudaFuncSetAttribute(extend_wgmma)");
  const auto resident = static_cast<int64_t>(current_device_facts().num_multiprocessors);
  const auto blocks = static_cast<unsigned>(tiles < resident ? tiles : resident);
  kernel<<<blocks, kWgmmaThreads, Shape::kSharedBytes, stream>>>(args);
  check_launch("extend_wgmma");
  return true;
}

template <typename T>
bool launch_wgmma_of(const Args& args, cudaStream_t stream, int64_t tiles) {
  if (args.head_size <= 64) return launch_wgmma_as<T, 64>(args, stream, tiles);
  if (args.head_size <= 128) return launch_wgmma_as<T, 128>(args, stream, tiles);
  return launch_wgmma_as<T, 256>(args, stream, tiles);
}

// In files of their own, so that they compile side by side. False where there is no code for this device.
bool launch_wgmma_half(const Args& args, cudaStream_t stream, int64_t tiles);
bool launch_wgmma_bfloat16(const Args& args, cudaStream_t stream, int64_t tiles);

}  // namespace extend
}  // namespace kvservice
