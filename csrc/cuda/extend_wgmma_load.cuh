// The loading group of the extend kernel for Hopper.
#pragma once

#include "cuda/extend_convert.cuh"
#include "cuda/extend_wgmma.cuh"

namespace kvservice {
namespace extend {

#ifdef KVSERVICE_WGMMA

// The loading group: takes tiles, and brings in their queries, keys and values.
template <int kHead, bool kFloat8>
class WgmmaLoader {
  using Shape = WgmmaShape<kHead>;
  static constexpr int kKeys = Shape::kKeys;
  template <int kShift>
  using Loader = KeyLoader<kHead, kKeys, false, kShift>;
  using Converter = KeyConverter<kHead, kKeys>;
  using Finder = TileFinder<kWgmmaRows, kKeys>;

 public:
  __device__ WgmmaLoader(const Args& a, char* shared, Signals<kKeys>* signals)
      : a_(a), address_(ptx::shared_address(shared)), signals_(signals) {}

  __device__ void run() {
    if (threadIdx.x < 32) {
      Finder finder;
      finder.start(a_);
      if (threadIdx.x == 0) signals_->finder = finder;
    }
    int64_t index = blockIdx.x;
    int slot = 0;
    bool shared = false;
    for (; find(&index, slot); slot ^= 1) {
      const Tile& tile = signals_->loading[slot];
      load(tile, shared);
      shared = tile.first_row + kGroupRows >= tile.num_rows(a_);
    }
    wait_for_compute();
    announce(nullptr);
    arrive_when_copied(&signals_->query_full);
    if (threadIdx.x == 0) leave_counters(a_);
  }

 private:
  // The next tile to signals_->loading[slot]; true if there is one.
  __device__ bool find(int64_t* index, int slot) {
    if (threadIdx.x < 32) {
      __syncwarp();
      Finder finder = signals_->finder;
      Tile tile;
      bool found, empty;
      do {
        found = finder.find(a_, *index, &tile);
        empty = found && Steps<kWgmmaRows, kKeys>(a_, tile).count <= 0;
        if (found && threadIdx.x == 0) *index = next_tile(a_);
        *index = __shfl_sync(~0U, *index, 0);
      } while (empty);
      if (threadIdx.x == 0) {
        signals_->finder = finder;
        signals_->loading[slot] = tile;
        signals_->loading_found[slot] = found;
      }
    }
    ptx::named_barrier(kLoaders, kLoadThreads);
    return signals_->loading_found[slot];
  }

  __device__ void load(const Tile& tile, bool late) {
    const Steps<kWgmmaRows, kKeys> steps(a_, tile);
    if constexpr (kFloat8) {
      Converter converter(a_, tile, steps.begin, steps.end, threadIdx.x);
      load_converting(converter, tile, steps);
    } else {
      switch (a_.head_size == kHead ? a_.block_shift : 0) {
        case 4:
          return load_copying(Loader<4>(a_, tile, steps.begin, steps.end, threadIdx.x), tile, steps, late);
        case 5:
          return load_copying(Loader<5>(a_, tile, steps.begin, steps.end, threadIdx.x), tile, steps, late);
        case 6:
          return load_copying(Loader<6>(a_, tile, steps.begin, steps.end, threadIdx.x), tile, steps, late);
        case 7:
          return load_copying(Loader<7>(a_, tile, steps.begin, steps.end, threadIdx.x), tile, steps, late);
        default:
          return load_copying(Loader<0>(a_, tile, steps.begin, steps.end, threadIdx.x), tile, steps, late);
      }
    }
  }

  // `late`: the tile before holds on to its queries to the end, so that more is loaded before these are.
  template <typename L>
  __device__ void load_copying(L loader, const Tile& tile, const Steps<kWgmmaRows, kKeys>& steps, bool late) {
    loader.look_up_keys(steps.first);
    loader.look_up_values(steps.first);
    copy_keys(loader, steps.first);
    int i = 1, key = steps.first;
    const auto next = [&] {
      copy_keys(loader, key + kKeys);
      copy_values(loader, key);
      ++i;
      key += kKeys;
    };
    if (late && steps.count > 1) next();
    wait_for_compute();
    announce(&tile);
    copy_queries(tile);
    arrive_when_copied(&signals_->query_full);
    while (i < steps.count) next();
    copy_values(loader, key);
  }

  template <typename L>
  __device__ void copy_keys(L& loader, int key) {
    loader.fill_keys(free_keys(), key);
    arrive_when_copied(&signals_->keys_full[keys_.stage()]);
    loader.look_up_keys(key + kKeys);
    ++keys_.steps;
  }

  template <typename L>
  __device__ void copy_values(L& loader, int key) {
    loader.fill_values(free_values(), key);
    arrive_when_copied(&signals_->values_full[values_.stage()]);
    loader.look_up_values(key + kKeys);
    ++values_.steps;
  }

  // While keys are converted values are on their way, and the other way round.
  __device__ void load_converting(Converter& converter, const Tile& tile, const Steps<kWgmmaRows, kKeys>& steps) {
    int key = steps.first;
    converter.look_up(key);
    converter.fetch_keys(key);
    wait_for_compute();
    announce(&tile);
    convert_queries(tile);
    arrive_when_stored(&signals_->query_full);
    for (int i = 0; i < steps.count; ++i, key += kKeys) {
      const bool more = i + 1 < steps.count;
      if (Converter::kOverlaps) converter.fetch_values(key);
      converter.put_keys(free_keys());
      arrive_when_stored(&signals_->keys_full[keys_.stage()]);
      ++keys_.steps;
      if (!Converter::kOverlaps) converter.fetch_values(key);
      converter.look_up(key + kKeys);
      if (Converter::kOverlaps && more) converter.fetch_keys(key + kKeys);
      converter.put_values(free_values(), key);
      arrive_when_stored(&signals_->values_full[values_.stage()]);
      ++values_.steps;
      if (!Converter::kOverlaps && more) converter.fetch_keys(key + kKeys);
    }
  }

  // Waits for a stage to be free, and gives its address.
  __device__ uint32_t free_keys() const {
    ptx::mbarrier_wait(ptx::shared_address(&signals_->keys_empty[keys_.stage()]), keys_.parity() ^ 1);
    return address_ + Shape::kKeysOffset + keys_.stage() * Shape::kTileBytes;
  }
  __device__ uint32_t free_values() const {
    ptx::mbarrier_wait(ptx::shared_address(&signals_->values_empty[values_.stage()]), values_.parity() ^ 1);
    return address_ + Shape::kValuesOffset + values_.stage() * Shape::kTileBytes;
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
  __device__ void copy_queries(const Tile& tile) {
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

  // The same with halves, each row times a power of two that brings it into their range.
  __device__ void convert_queries(const Tile& tile) {
    constexpr int kPieces = kHead / 32;  // of a lane
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int octet = warp; octet < kWgmmaRows / 8; octet += kLoadThreads / 32) {
      const int row = tile.first_row + octet * 8 + lane % 8;
      const bool valid = row < tile.num_rows(a_);
      const auto* source = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(a_.query) +
                                                          (valid ? tile.query_row(a_, row) * a_.head_size : 0));
      uint4 numbers[kPieces];
      float largest = 0.0F;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int piece = lane / 8 + 4 * i;
        numbers[i] = valid && piece < a_.head_size / 8 ? source[piece] : make_uint4(0, 0, 0, 0);
        largest = fmaxf(largest, largest_of_8(numbers[i], a_.dtype));
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 8));
      largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 16));
      const PowerOfTwo power(largest);
      if (lane < 8) signals_->row_scale[octet * 8 + lane] = power.up;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const uint32_t dst = address_ + ((lane / 8 + 4 * i) * kWgmmaRows + octet * 8 + lane % 8) * 16;
        ptx::store_shared_16(dst, scaled_halves(numbers[i], a_.dtype, power.down));
      }
    }
  }

  static __device__ void arrive_when_copied(uint64_t* barrier) {
    ptx::mbarrier_arrive_after_copies(ptx::shared_address(barrier));
  }

  // Who waits also fences: here that would be to wait for what is on its way too.
  static __device__ void arrive_when_stored(uint64_t* barrier) { ptx::mbarrier_arrive(ptx::shared_address(barrier)); }

  const Args& a_;
  const uint32_t address_;
  Signals<kKeys>* const signals_;
  Turn keys_;
  Turn values_;
  uint32_t query_parity_ = 0;
};

#endif  // KVSERVICE_WGMMA

}  // namespace extend
}  // namespace kvservice
