// The daemon's private bookkeeping of slabs, blocks and namespaces. Clients cannot map it.
#pragma once

#include <cstdint>
#include <memory>

#include "store/key_hash.h"
#include "store/layout.h"
#include "store/linked_list.h"

namespace kvservice {

struct Slab;

enum class SlotState : uint32_t {
  kFree,
  kReserved,   // in the table, but not found
  kCommitted,  // in the table, and in a list of its namespace
  kCondemned,  // removed while it was leased or written, and freed by the last release
};

// Room for a block. Slots of a slab that have never been used are not initialized.
struct Slot {
  Key key;
  uint64_t hash;
  Slab* slab;
  SlotState state;
  uint32_t pins;
  Links<Slot> links;  // `older` is the next free slot if this one is free
  uint64_t used;      // when it was last used, in ticks of the index
  uint64_t version;
  uint64_t checksum;

  // A slot spans two cache lines.
  void prefetch() const {
    __builtin_prefetch(this);
    __builtin_prefetch(&checksum);
  }
};

// The numbers of blocks of a namespace, by state. Leased blocks are committed or condemned.
struct BlockCounts {
  int64_t committed = 0;
  int64_t leased = 0;
  int64_t reserved = 0;
  int64_t condemned = 0;
  int64_t slabs = 0;

  int64_t used() const { return committed + reserved + condemned; }
};

struct Namespace;

struct Slab {
  uint32_t number = 0;
  Namespace* owner = nullptr;  // nullptr: the slab is free
  std::unique_ptr<Slot[]> slots;
  uint32_t num_slots = 0;
  Slot* free = nullptr;    // slots that were used before, the last one first
  uint32_t num_fresh = 0;  // the first slot that has never been used
  uint32_t num_used = 0;   // slots that are not free
  uint32_t num_busy = 0;   // slots that are reserved or leased
  uint64_t newest = 0;     // when a block was last used, or the slab became idle
  Links<Slab> idle_links{};
  Links<Slab> room_links{};

  uint32_t index_of(const Slot& slot) const { return static_cast<uint32_t>(&slot - slots.get()); }
  bool has_room() const { return free != nullptr || num_fresh < num_slots; }
};

struct Namespace {
  uint32_t number = 0;
  int64_t block_bytes = 0;
  int64_t max_blocks = 0;
  SlabLayout layout{};
  LinkedList<Slot, &Slot::links> evictable;       // committed, without a lease
  LinkedList<Slot, &Slot::links> leased;          // committed, with a lease
  LinkedList<Slab, &Slab::room_links> with_room;  // its slabs that have a free slot; the newest is used first
  BlockCounts counts;
  uint64_t num_evicted = 0;
};

}  // namespace kvservice
