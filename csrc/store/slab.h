// The daemon's private bookkeeping of slabs, blocks and namespaces: what is rebuilt after a restart.
#pragma once

#include <cstdint>

#include "store/layout.h"
#include "store/linked_list.h"

namespace kvservice {

struct Slab;

// Room for a block: what is rebuilt after a restart. A KeptSlot has the rest.
struct Slot {
  Links<Slot> links;  // `older` is the next free slot if this one is free
  uint64_t hash;
  uint32_t pins;
  bool used;     // since it was pinned
  bool offered;  // by coldest() since its last use
};

// The numbers of blocks of a namespace, by state. Leased blocks are committed or condemned.
struct BlockCounts {
  int64_t committed = 0;
  int64_t leased = 0;
  int64_t reserved = 0;
  int64_t condemned = 0;
  int64_t slabs = 0;
  int64_t busy_slabs = 0;  // slabs with reserved or leased blocks

  int64_t used() const { return committed + reserved + condemned; }
};

struct Namespace;

struct Slab {
  uint32_t number = 0;
  Namespace* owner = nullptr;  // nullptr: the slab is free
  Slot* slots = nullptr;
  uint32_t num_slots = 0;
  Slot* free = nullptr;    // slots that were used before, the last one first
  uint32_t num_fresh = 0;  // the first slot that has never been used
  uint32_t num_used = 0;   // slots that are not free
  uint32_t num_busy = 0;   // slots that are reserved or leased
  uint64_t newest = 0;     // when a block was last used, or the slab became idle
  Links<Slab> idle_links{};
  Links<Slab> room_links{};

  uint32_t index_of(const Slot& slot) const { return static_cast<uint32_t>(&slot - slots); }
  bool has_room() const { return free != nullptr || num_fresh < num_slots; }
};

struct Namespace {
  uint32_t number = 0;
  int64_t block_bytes = 0;
  int64_t max_blocks = 0;
  SlabLayout layout{};
  LinkedList<Slot, &Slot::links> evictable;       // committed, without a lease
  Slot* last_offered = nullptr;                   // the newest evictable block that was offered; older ones were too
  Slot* last_returned = nullptr;                  // an offered one beside which the next place is looked for, if any
  int64_t num_offered = 0;                        // evictable blocks that were offered
  LinkedList<Slot, &Slot::links> leased;          // committed, with a lease
  LinkedList<Slab, &Slab::room_links> with_room;  // its slabs that have a free slot; the newest is used first
  BlockCounts counts;
  uint64_t num_evicted = 0;
  uint64_t num_unoffered = 0;  // of these, blocks that were not offered
};

}  // namespace kvservice
