// The part of the bookkeeping that outlives the daemon's process, in a private memory file: which slab belongs to which
// namespace, and which slot has which block. Everything else is rebuilt from it.
//
//   byte 0            KeptHeader
//   byte kPageBytes   KeptSlab [num_slabs]
//   the next page     KeptSlot [num_slabs][slots_per_slab]
//
// A file of zeros is an empty store. Most of the file is never touched: the slots of a slab have room for the smallest
// blocks.
//
// The process can be killed between any two stores, so their order matters. All stores are release stores, which keeps
// it. A slot counts while its slab has a namespace and its index is below `num_fresh`; its state is stored last when a
// block comes, and first when it goes.
#pragma once

#include <cstdint>

#include "store/key_hash.h"
#include "store/layout.h"

namespace kvservice {

enum class SlotState : uint32_t {
  kFree,
  kReserved,   // in the table, but not found
  kCommitted,  // in the table, and in a list of its namespace
  kCondemned,  // removed while it was leased or written, and freed by the last release
};

struct KeptHeader {
  uint64_t magic;    // stored last, when the file is new
  uint64_t version;  // the last one given to a block
  uint64_t num_slabs, slab_bytes;
  uint64_t generation;   // how many processes used the file before this one
  uint64_t last_number;  // the number of the newest namespace
};

struct KeptSlab {
  uint32_t owner;      // the number of its namespace; 0: the slab is free
  uint32_t num_fresh;  // the first slot that has never been used
};

struct alignas(kRecordBytes) KeptSlot {
  Key key;
  uint64_t version;
  uint64_t checksum;
  uint64_t used;  // when it was last used, in ticks of the index
  SlotState state;
  uint32_t uses;  // how often it was used since it was stored; states of earlier versions have 0 here
};

static_assert(sizeof(KeptSlot) == kRecordBytes);

#ifdef KVSERVICE_STORE_FUZZ
void before_store();  // a test looks at the memory between two stores
#else
inline void before_store() {}
#endif

// Stores a value in memory that outlives the process.
template <class T>
void keep(T& place, T value) {
  before_store();
  __atomic_store(&place, &value, __ATOMIC_RELEASE);
}

// Sizes of the parts of the file.
struct KeptSizes {
  static constexpr int kMinSlotBits = 7;  // the slots of a slab are whole pages

  int slot_bits = kMinSlotBits;  // a slab has room for 1 << slot_bits slots
  int64_t first_slot, num_slots, num_bytes;

  KeptSizes(int64_t store_bytes, int64_t slab_bytes) {
    const int64_t num_slabs = store_bytes / slab_bytes;
    while (int64_t{1} << slot_bits < slab_layout(slab_bytes, 1).blocks_per_slab) ++slot_bits;
    first_slot = kPageBytes + round_up(num_slabs * static_cast<int64_t>(sizeof(KeptSlab)), kPageBytes);
    num_slots = num_slabs << slot_bits;
    num_bytes = first_slot + num_slots * static_cast<int64_t>(sizeof(KeptSlot));
  }
};

// The parts of the file.
struct KeptMemory : KeptSizes {
  KeptHeader* header;
  KeptSlab* slabs;
  KeptSlot* slots;

  KeptMemory(char* memory, const KeptSizes& sizes)
      : KeptSizes(sizes),
        header(reinterpret_cast<KeptHeader*>(memory)),
        slabs(reinterpret_cast<KeptSlab*>(memory + kPageBytes)),
        slots(reinterpret_cast<KeptSlot*>(memory + first_slot)) {}
};

}  // namespace kvservice
