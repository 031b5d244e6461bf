// The bookkeeping of an earlier process, rebuilt from the kept memory.
#include <algorithm>
#include <utility>
#include <vector>

#include "store/index.h"

namespace kvservice {

// Opens the namespaces of the process before with their numbers, and finds their blocks. Slabs of other namespaces are
// free. Nobody has a lease yet. A condemned block has one, which the caller ends. Called once, first of all.
Recovered StoreIndex::recover(const std::vector<NamespaceSize>& sizes) {
  for (const NamespaceSize& size : sizes) add_namespace(size);
  free_slabs_.clear();
  Recovered recovered;
  for (Slab& slab : slabs_) {
    const auto owner = namespaces_.find(kept(slab).owner);
    if (owner != namespaces_.end()) {
      slab.owner = owner->second.get();
      recover_slab(slab, recovered);
    }
    if (slab.num_used > 0) continue;
    slab.owner = nullptr;
    slab.free = nullptr;
    slab.num_fresh = 0;
    keep(kept(slab).owner, uint32_t{0});
    free_slabs_.push_back(slab.number);
  }
  std::reverse(free_slabs_.begin(), free_slabs_.end());
  recover_order();
  return recovered;
}

void StoreIndex::recover_slab(Slab& slab, Recovered& recovered) {
  Namespace& space = *slab.owner;
  slab.num_slots = static_cast<uint32_t>(space.layout.blocks_per_slab);
  slab.num_fresh = std::min(kept(slab).num_fresh, slab.num_slots);
  for (uint32_t i = slab.num_fresh; i-- > 0;) recover_slot(slab, slab.slots[i], recovered);
  if (slab.num_used == 0) return;
  ++space.counts.slabs;
  if (slab.num_busy > 0) ++space.counts.busy_slabs;
  if (slab.has_room()) space.with_room.add(slab);
}

void StoreIndex::recover_slot(Slab& slab, Slot& slot, Recovered& recovered) {
  const KeptSlot& kept = this->kept(slot);
  BlockCounts& counts = slab.owner->counts;
  slot.pins = kept.state == SlotState::kCondemned ? 1 : 0;
  if (kept.state == SlotState::kFree) {
    slot.links.older = slab.free;
    slab.free = &slot;
    return;
  }
  ++slab.num_used;
  slot.hash = hash_(kept.key, slab.owner->number);
  if (kept.state == SlotState::kCommitted) {
    ++counts.committed;
    show(slot);
    slab.newest = std::max(slab.newest, kept.used);
  } else if (kept.state == SlotState::kReserved) {
    ++counts.reserved;
    ++slab.num_busy;
    recovered.reserved.push_back(slot_number(slot));
  } else {
    ++counts.condemned;
    ++counts.leased;
    ++slab.num_busy;
    recovered.condemned.push_back(slot_number(slot));
    return;
  }
  table_.make_room(slot.hash);
  table_.insert(slot.hash, slot);
}

// Sorts blocks and slabs by their last use.
void StoreIndex::recover_order() {
  std::vector<std::pair<uint64_t, Slot*>> blocks;  // by their last use
  std::vector<Slab*> idle;
  for (Slab& slab : slabs_) {
    if (slab.owner == nullptr) continue;
    if (slab.num_busy == 0) idle.push_back(&slab);
    for (uint32_t i = 0; i < slab.num_fresh; ++i) {
      const KeptSlot& slot = kept(slab.slots[i]);
      if (slot.state == SlotState::kCommitted) blocks.emplace_back(slot.used, &slab.slots[i]);
    }
  }
  std::sort(blocks.begin(), blocks.end());
  std::sort(idle.begin(), idle.end(), [](const Slab* a, const Slab* b) { return a->newest < b->newest; });
  for (const auto& [used, slot] : blocks) slab_of(*slot).owner->evictable.add(*slot);
  for (Slab* slab : idle) idle_.add(*slab);
  if (!blocks.empty()) tick_ = blocks.back().first;
}

}  // namespace kvservice
