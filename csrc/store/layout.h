// The memory of the block store. It consists of slabs of equal size; a slab belongs to one namespace:
//
//   byte 0            Record [blocks_per_slab]
//   byte first_block  blocks, each block_stride bytes after the one before it
//
// Little-endian. Clients map the memory. A client that copies a block compares its version afterwards: the version
// changes before the bytes of the block can change. Versions are never reused, neither for another block.
//
// The records are outputs: a client may be able to write to them, so the daemon never reads them. The one exception are
// shared leases (shared_lease.h), which can only put an eviction off.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvservice {

constexpr int64_t kKeyBytes = 32;
constexpr int64_t kRecordBytes = 64;
constexpr int64_t kPageBytes = 4096;

constexpr uint32_t kNoStride = 1;

enum RecordState : uint32_t { kRecordFree = 0, kRecordReserved = 1, kRecordCommitted = 2 };

struct Record {
  std::atomic<uint64_t> version;
  uint64_t checksum;  // 0 until the block is committed
  uint8_t key[kKeyBytes];
  uint32_t namespace_number;
  uint32_t state;  // RecordState
  // Tells a reader of the first record whether the slab still has the layout that it expects, and whether its memory is
  // there: it is 0 until then.
  std::atomic<uint32_t> block_stride;  // in bytes, the low half; kNoStride: of no layout
  std::atomic<uint32_t> shared_lease;
};

static_assert(sizeof(Record) == kRecordBytes);
static_assert(sizeof(std::atomic<uint64_t>) == 8 && std::atomic<uint64_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free);
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

// The layout of a namespace's slabs.
struct SlabLayout {
  int64_t first_block;
  int64_t block_stride;
  int64_t blocks_per_slab;
};

constexpr int64_t round_up(int64_t number, int64_t multiple) { return (number + multiple - 1) / multiple * multiple; }

// Blocks of at least a page are page-aligned. `slab_bytes` is a multiple of kPageBytes, and a block is at least a page
// smaller.
inline SlabLayout slab_layout(int64_t slab_bytes, int64_t block_bytes) {
  SlabLayout layout{};
  layout.block_stride = round_up(block_bytes, block_bytes >= kPageBytes ? kPageBytes : kRecordBytes);
  layout.blocks_per_slab = slab_bytes / (layout.block_stride + kRecordBytes);
  const auto first_block = [&] { return round_up(layout.blocks_per_slab * kRecordBytes, kPageBytes); };
  while (first_block() + layout.blocks_per_slab * layout.block_stride > slab_bytes) --layout.blocks_per_slab;
  layout.first_block = first_block();
  return layout;
}

// Returns the version of a block, read after everything that this thread has read before. Returns 0, which is no
// version, if the slab has another layout now: there may be bytes of a block where the record was.
inline uint64_t current_version(const char* slab, int64_t index, int64_t block_stride) {
  const auto* records = reinterpret_cast<const Record*>(slab);
  std::atomic_thread_fence(std::memory_order_acquire);
  const uint64_t version = records[index].version.load(std::memory_order_acquire);
  const uint32_t stride = records[0].block_stride.load(std::memory_order_acquire);
  return stride == static_cast<uint32_t>(block_stride) ? version : 0;
}

}  // namespace kvservice
