// The slots of the store: where a block goes, and what is evicted for it.
#include <sys/mman.h>

#include <cstring>
#include <limits>
#include <stdexcept>

#include "store/index.h"
#include "store/shared_lease.h"

namespace kvservice {
namespace {

// A free slab gives the memory of its slots back if more than 1 / 16 of those for the smallest blocks were used.
constexpr int kDiscardedShift = 4;
static_assert((sizeof(Slot) << KeptSizes::kMinSlotBits) % kPageBytes == 0, "two slabs have slots in the same page");

}  // namespace

// Returns a slot for a new block, or nullptr if there is no room.
Slot* StoreIndex::take_slot(Namespace& space) {
  if (space.counts.used() > space.max_blocks) shrink(space);
  Slot* own = space.evictable.oldest();
  if (space.counts.used() < space.max_blocks) {
    if (space.with_room.empty() && free_slabs_.empty()) empty_another_slab(own);
    if (space.with_room.empty() && !free_slabs_.empty()) assign(space);
    if (!space.with_room.empty()) return &take_free_slot(*space.with_room.newest());
  }
  own = hide_oldest(space);
  if (own == nullptr) return nullptr;
  evict(*own);
  if (const Slot* next = space.evictable.oldest()) {  // probably the next victim
    table_.prefetch(next->hash);
    if (next->links.newer != nullptr) prefetch(*next->links.newer);
  }
  return own;
}

// Hides the least recently used block of a namespace and returns it. Those with shared leases become the newest.
Slot* StoreIndex::hide_oldest(Namespace& space) {
  while (true) {
    Slot* oldest = space.evictable.oldest();
    if (oldest == nullptr || hide(*oldest)) return oldest;
    if (passes_.blocks-- <= 0) return nullptr;
    leave_evictable(*oldest);
    use(*oldest);
  }
}

// Evicts the least recently used block of a namespace and frees its slot. Returns whether there was one.
bool StoreIndex::shrink(Namespace& space) {
  Slot* oldest = hide_oldest(space);
  if (oldest == nullptr) return false;
  count_eviction(*oldest);
  forget(*oldest);
  free_slot(*oldest);
  return true;
}

// Evicts the least recently used slab, unless the block `own` is older. If it is of own's namespace, `own` is older.
void StoreIndex::empty_another_slab(const Slot* own) {
  while (true) {
    Slab* slab = idle_.oldest();
    if (slab == nullptr || (own != nullptr && kept(*own).used <= slab->newest)) return;
    if (hide(*slab)) return empty(*slab);
    if (passes_.slabs-- <= 0) return;
    slab->newest = ++tick_;
    idle_.remove(*slab);
    idle_.add(*slab);
  }
}

// Evicts all blocks of a hidden slab, and takes it from its namespace.
void StoreIndex::empty(Slab& slab) {
  for (uint32_t i = 0; i < slab.num_fresh; ++i) {
    if (state(slab.slots[i]) == SlotState::kCommitted) evict(slab.slots[i]);
  }
  return_slab(slab);
}

// Takes the version of a block from its record, unless there is a shared lease: from now on none can be taken.
bool StoreIndex::hide(Slot& slot) {
  Record& out = record(slot);
  const SharedLease lease(out.shared_lease);
  if (lease.exists()) return false;  // its owner must not see the block go
  out.version.store(0, std::memory_order_seq_cst);
  if (!lease.exists()) return true;
  show(slot);
  return false;
}

// Hides the blocks of a slab, or none of them.
bool StoreIndex::hide(Slab& slab) {
  for (uint32_t i = 0; i < slab.num_fresh; ++i) {
    if (state(slab.slots[i]) != SlotState::kCommitted || hide(slab.slots[i])) continue;
    while (i-- > 0) {
      if (state(slab.slots[i]) == SlotState::kCommitted) show(slab.slots[i]);
    }
    return false;
  }
  return true;
}

void StoreIndex::show(Slot& slot) { record(slot).version.store(kept(slot).version, std::memory_order_release); }

// Gives a free slab to a namespace. The versions of its former blocks have changed already.
void StoreIndex::assign(Namespace& space) {
  Slab& slab = slabs_[free_slabs_.back()];
  free_slabs_.pop_back();
  slab.num_slots = static_cast<uint32_t>(space.layout.blocks_per_slab);
  slab.owner = &space;
  ++space.counts.slabs;
  space.with_room.add(slab);
  idle_.add(slab);
  Record* const first = records(slab);
  first->block_stride.store(static_cast<uint32_t>(space.layout.block_stride), std::memory_order_release);
  for (int64_t i = 0; i < space.layout.blocks_per_slab; ++i) {
    Record& record = first[i];
    record.version.store(0, std::memory_order_release);
    record.checksum = 0;
    std::memset(record.key, 0, sizeof(record.key));
    record.namespace_number = space.number;
    record.state = kRecordFree;
    record.block_stride.store(static_cast<uint32_t>(space.layout.block_stride), std::memory_order_relaxed);
    record.shared_lease.store(0, std::memory_order_relaxed);
  }
  keep(kept(slab).num_fresh, uint32_t{0});
  keep(kept(slab).owner, space.number);
}

Slot& StoreIndex::take_free_slot(Slab& slab) {
  Slot* slot = slab.free;
  if (slot != nullptr) {
    slab.free = slot->links.older;
  } else {
    slot = &slab.slots[slab.num_fresh++];
    slot->pins = 0;
    keep(kept(*slot).state, SlotState::kFree);
    keep(kept(slab).num_fresh, slab.num_fresh);
  }
  ++slab.num_used;
  if (!slab.has_room()) slab.owner->with_room.remove(slab);
  return *slot;
}

// Reserves a slot for a key.
void StoreIndex::fill(Slot& slot, const Key& key, uint64_t hash) {
  Slab& slab = slab_of(slot);
  KeptSlot& kept = this->kept(slot);
  slot.hash = hash;
  slot.used = slot.offered = false;
  keep(kept.uses, uint32_t{0});
  for (int i = 0; i < kKeyBytes / 8; ++i) keep(kept.key.words[i], key.words[i]);
  keep(kept.checksum, uint64_t{0});
  renew_version(slot);
  Record& out = record(slot);
  std::memcpy(out.key, &key, sizeof(key));
  out.checksum = 0;
  out.namespace_number = slab.owner->number;
  out.state = kRecordReserved;
  keep(kept.state, SlotState::kReserved);
  table_.insert(hash, slot);
  ++slab.owner->counts.reserved;
  begin_busy(slab);
}

// Makes a committed block without leases a slot that is neither used nor in a list of free ones.
void StoreIndex::evict(Slot& slot) {
  count_eviction(slot);
  forget(slot);
  vacate(slot);
}

void StoreIndex::count_eviction(const Slot& slot) {
  Namespace& space = *slab_of(slot).owner;
  ++space.num_evicted;
  ++num_evicted_;
  if (slot.offered) return;
  ++space.num_unoffered;
  ++num_unoffered_;
}

// Ends the block of a slot, so that its bytes may change.
void StoreIndex::vacate(Slot& slot) {
  keep(kept(slot).state, SlotState::kFree);
  record(slot).state = kRecordFree;
  renew_version(slot);
}

// Removes the key of a committed block.
void StoreIndex::forget(Slot& slot) {
  Namespace& space = *slab_of(slot).owner;
  table_.erase(slot.hash, slot);
  if (slot.pins > 0) {
    space.leased.remove(slot);
  } else {
    leave_evictable(slot);
  }
  --space.counts.committed;
  if (recording_) removed_.push_back({space.number, kept(slot).key});
}

// Removes a committed block. If it is leased, the last release frees it.
void StoreIndex::drop(Slot& slot) {
  const bool lingers = slot.pins == 0 && !hide(slot);
  forget(slot);
  if (lingers) linger(slot);
  if (slot.pins == 0) {
    free_slot(slot);
  } else {
    keep(kept(slot).state, SlotState::kCondemned);
    record(slot).state = kRecordFree;
    ++slab_of(slot).owner->counts.condemned;
  }
}

// Leases a block that is being removed: the last release waits for its shared leases.
void StoreIndex::linger(Slot& slot) {
  slot.pins = 1;
  ++slab_of(slot).owner->counts.leased;
  begin_busy(slab_of(slot));
  lingering_.push_back(slot_number(slot));
}

// Frees removed blocks whose shared leases have ended.
void StoreIndex::end_lingering() {
  for (size_t left = lingering_.size(); left > 0; --left) {
    const uint64_t number = lingering_.front();
    lingering_.pop_front();
    Slot& slot = slot_at(number);
    if (SharedLease(record(slot).shared_lease).exists()) {
      lingering_.push_back(number);
    } else {
      end_last_lease(slot);
    }
  }
}

void StoreIndex::free_slot(Slot& slot) {
  Slab& slab = slab_of(slot);
  vacate(slot);
  if (!slab.has_room()) slab.owner->with_room.add(slab);
  slot.links.older = slab.free;
  slab.free = &slot;
  if (--slab.num_used == 0) return_slab(slab);
}

// Takes a slab without blocks from its namespace.
void StoreIndex::return_slab(Slab& slab) {
  idle_.remove(slab);
  if (slab.has_room()) slab.owner->with_room.remove(slab);
  --slab.owner->counts.slabs;
  slab.owner = nullptr;
  keep(kept(slab).owner, uint32_t{0});
  if (slab.num_fresh >> (kept_.slot_bits - kDiscardedShift) != 0) {
    madvise(&kept(*slab.slots), slab.num_fresh * sizeof(KeptSlot), MADV_REMOVE);
    madvise(slab.slots, slab.num_fresh * sizeof(Slot), MADV_DONTNEED);
  }
  slab.free = nullptr;
  slab.num_fresh = slab.num_used = 0;
  if (slab.number < num_ready_) free_slabs_.push_back(slab.number);
}

void StoreIndex::count_use(Slot& slot) {
  KeptSlot& kept = this->kept(slot);
  if (kept.uses != std::numeric_limits<uint32_t>::max()) keep(kept.uses, kept.uses + 1);
}

void StoreIndex::leave_evictable(Slot& slot) {
  Namespace& space = *slab_of(slot).owner;
  if (slot.offered) {
    --space.num_offered;
    if (space.last_offered == &slot) space.last_offered = slot.links.older;
    if (space.last_returned == &slot) space.last_returned = slot.links.older;
  }
  space.evictable.remove(slot);
}

void StoreIndex::pin(Slot& slot) {
  slot.used = true;
  if (slot.pins == std::numeric_limits<uint32_t>::max()) throw std::runtime_error("a block has too many leases");
  if (slot.pins++ > 0) return;
  Namespace& space = *slab_of(slot).owner;
  leave_evictable(slot);
  space.leased.add(slot);
  ++space.counts.leased;
  begin_busy(slab_of(slot));
}

void StoreIndex::unpin(Slot& slot) {
  if (slot.pins > 1) {
    --slot.pins;
  } else if (state(slot) == SlotState::kCondemned && SharedLease(record(slot).shared_lease).exists()) {
    lingering_.push_back(slot_number(slot));
  } else {
    end_last_lease(slot);
  }
}

void StoreIndex::end_last_lease(Slot& slot) {
  slot.pins = 0;
  Namespace& space = *slab_of(slot).owner;
  --space.counts.leased;
  if (state(slot) == SlotState::kCondemned) {
    end_busy(slab_of(slot));
    --space.counts.condemned;
    free_slot(slot);
  } else {
    space.leased.remove(slot);
    if (!slot.used) return return_cold(slot);
    end_busy(slab_of(slot));
    use(slot);
  }
}

// Gives a block, which is in no list, and its slab their places in the order of use again, after coldest(). Offered
// blocks are evicted before all others. Those of a batch have their places beside each other.
void StoreIndex::return_cold(Slot& slot) {
  Slab& slab = slab_of(slot);
  Namespace& space = *slab.owner;
  const uint64_t used = kept(slot).used;
  Slot* before = space.last_returned == nullptr ? space.last_offered : space.last_returned;
  while (before != nullptr && kept(*before).used > used) before = before->links.older;
  Slot* after = before == nullptr ? space.evictable.oldest() : before->links.newer;
  while (after != nullptr && after->offered && kept(*after).used < used) after = after->links.newer;
  space.evictable.add_before(after, slot);
  if (space.last_offered == nullptr || space.last_offered->links.newer == &slot) space.last_offered = &slot;
  space.last_returned = &slot;
  ++space.num_offered;
  if (--slab.num_busy > 0) return;
  --space.counts.busy_slabs;
  Slab* newer = idle_.oldest();
  while (newer != nullptr && newer->newest < slab.newest) newer = newer->idle_links.newer;
  idle_.add_before(newer, slab);
}

// Makes a block, which is in no list, the most recently used, and its slab too.
void StoreIndex::use(Slot& slot) {
  Slab& slab = slab_of(slot);
  slot.offered = false;
  slab.newest = ++tick_;
  keep(kept(slot).used, tick_);
  slab.owner->evictable.add(slot);
  if (slab.num_busy > 0) return;
  idle_.remove(slab);
  idle_.add(slab);
}

void StoreIndex::begin_busy(Slab& slab) {
  if (slab.num_busy++ > 0) return;
  ++slab.owner->counts.busy_slabs;
  idle_.remove(slab);
}

void StoreIndex::end_busy(Slab& slab) {
  if (--slab.num_busy > 0) return;
  --slab.owner->counts.busy_slabs;
  slab.newest = ++tick_;
  idle_.add(slab);
}

Record* StoreIndex::records(const Slab& slab) const {
  return reinterpret_cast<Record*>(memory_ + slab.number * slab_bytes_);
}

Record& StoreIndex::record(const Slot& slot) const {
  const Slab& slab = slab_of(slot);
  return records(slab)[slab.index_of(slot)];
}

// Tells readers of the memory that the bytes of a block may change from now on.
void StoreIndex::renew_version(Slot& slot) {
  const uint64_t version = kept_.header->version + 1;
  keep(kept_.header->version, version);
  keep(kept(slot).version, version);
  before_store();
  record(slot).version.store(version, std::memory_order_release);
}

}  // namespace kvservice
