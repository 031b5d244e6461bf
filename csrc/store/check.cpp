// The consistency of the bookkeeping, checked in slices.
#include <stdexcept>
#include <string>

#include "store/index.h"

namespace kvservice {
namespace {

void expect(bool condition, const Slab& slab, const char* what) {
  if (!condition) throw std::runtime_error("slab " + std::to_string(slab.number) + " of the store: " + what);
}

}  // namespace

bool StoreIndex::check(int64_t most) {
  end_lingering();
  if (next_check_ == slabs_.size()) next_check_ = 0;
  if (next_check_ == 0) check_counts();
  for (int64_t checked = 0; next_check_ < slabs_.size() && (checked == 0 || checked < most); ++next_check_) {
    const Slab& slab = slabs_[next_check_];
    if (slab.owner != nullptr) {
      check_slab(slab);
    } else {
      expect(kept(slab).owner == 0, slab, "it is free, but not in the kept memory");
    }
    checked += 1 + slab.num_fresh;
  }
  return next_check_ == slabs_.size();
}

void StoreIndex::check_slab(const Slab& slab) const {
  uint32_t used = 0, busy = 0, free = 0;
  expect(kept(slab).owner == slab.owner->number, slab, "the kept memory names another namespace");
  expect(kept(slab).num_fresh == slab.num_fresh, slab, "the kept memory has another number of slots");
  for (uint32_t i = 0; i < slab.num_fresh; ++i) {
    const Slot& slot = slab.slots[i];
    if (state(slot) == SlotState::kFree) continue;
    check_slot(slab, slot);
    ++used;
    if (state(slot) == SlotState::kReserved || slot.pins > 0) ++busy;
  }
  for (const Slot* slot = slab.free; slot != nullptr && free <= slab.num_fresh; slot = slot->links.older) {
    expect(state(*slot) == SlotState::kFree, slab, "a slot is in use and in the list of free ones");
    ++free;
  }
  expect(used > 0, slab, "it belongs to a namespace without having a block");
  expect(used == slab.num_used && busy == slab.num_busy, slab, "the counts of its blocks are wrong");
  expect(used + free == slab.num_fresh, slab, "a slot is neither free nor in use");
  expect(busy > 0 || idle_.contains(slab), slab, "it is idle, but not in the list of idle ones");
  expect(!slab.has_room() || slab.owner->with_room.contains(slab), slab, "it has room, but is not in its list");
}

void StoreIndex::check_slot(const Slab& slab, const Slot& slot) const {
  const Namespace& space = *slab.owner;
  const KeptSlot& kept = this->kept(slot);
  const bool in_table = kept.state != SlotState::kCondemned;
  expect(slot.hash == hash_(kept.key, space.number), slab, "the hash of a block is wrong");
  expect((find(space, slot.hash, kept.key) == &slot) == in_table, slab, "the table refers to the wrong block of a key");
  expect(kept.version <= kept_.header->version, slab, "a version is newer than the newest");
  expect(kept.state != SlotState::kReserved || slot.pins == 0, slab, "a reserved block is leased");
  expect(kept.state != SlotState::kCondemned || slot.pins > 0, slab, "a removed block without leases is not free");
  if (kept.state == SlotState::kCommitted) {
    expect((slot.pins > 0 ? space.leased : space.evictable).contains(slot), slab, "a block is not in its list");
  }
  if (kept.state == SlotState::kCommitted && slot.pins == 0) {
    expect(kept.used <= slab.newest, slab, "a block is newer than its slab");
  }
}

void StoreIndex::check_counts() const {
  size_t in_table = 0, num_slabs = 0, num_idle = 0;
  for (const auto& [number, space] : namespaces_) {
    const bool any_offered = space->num_offered > 0;
    if (any_offered != (space->last_offered != nullptr) || (any_offered && !space->last_offered->offered)) {
      throw std::runtime_error("the store has lost which blocks it has offered");
    }
    in_table += static_cast<size_t>(space->counts.committed + space->counts.reserved);
    num_slabs += static_cast<size_t>(space->counts.slabs);
    num_idle += static_cast<size_t>(space->counts.slabs - space->counts.busy_slabs);
  }
  if (in_table != table_.size()) throw std::runtime_error("the store's table has a wrong number of keys");
  for (const Slab* slab = idle_.oldest(); slab != nullptr; slab = slab->idle_links.newer) --num_idle;
  if (num_idle != 0) throw std::runtime_error("the store has lost which slabs are idle");
  for (size_t i = num_ready_; i < slabs_.size(); ++i) num_slabs += slabs_[i].owner == nullptr ? 1 : 0;
  if (num_slabs + free_slabs_.size() != slabs_.size()) throw std::runtime_error("a slab of the store is lost");
}

}  // namespace kvservice
