// The slots of the disk tier: where a value goes, and what is evicted for it.
#include <algorithm>

#include "disk/index.h"

namespace kvservice::disk {
namespace {

constexpr int64_t kMaxReserve = 64;
constexpr int64_t kReservedShift = 3;  // up to 1 / 8 of the slots are free ahead

}  // namespace

// The number of slots that are freed ahead.
int64_t DiskIndex::reserve_of(const SizeClass& size_class) {
  return std::min(size_class.num_slots >> kReservedShift, kMaxReserve);
}

// Begins to free slots until so many are free or will be, or nothing can be evicted.
void DiskIndex::make_room(SizeClass& size_class, int64_t wanted) {
  while (size_class.num_free + size_class.num_coming < wanted) {
    Slot* own = size_class.evictable.oldest();
    Slab* other = idle_.oldest();
    if (!free_slabs_.empty()) {
      Slab& slab = slabs_[free_slabs_.back()];
      free_slabs_.pop_back();
      assign(slab, &size_class);
    } else if (other != nullptr && other->size_class != &size_class && (own == nullptr || other->newest < own->used)) {
      counts_.evicted += other->num_used;
      detach(*other);
      assign(*other, &size_class);
    } else if (own != nullptr) {
      ++counts_.evicted;
      forget(*own);
      invalidate(*own);
    } else {
      return;
    }
  }
}

// Begins to write a new header. With no size class, the slab is unused afterwards.
void DiskIndex::assign(Slab& slab, SizeClass* size_class) {
  slab.state = SlabState::kAssigning;
  slab.epoch = random_();
  slab.size_class = size_class;
  if (size_class != nullptr) {
    lay_out(slab, *size_class);
    size_class->num_coming += slab.num_slots;
  } else {
    slab.sectors.assign(1, {});
    slab.slots.reset();
    slab.num_slots = 0;
  }
  mark(slab, 0);
  queue(slab, 0);
}

void DiskIndex::lay_out(Slab& slab, SizeClass& size_class) const {
  slab.size_class = &size_class;
  slab.num_slots = static_cast<uint32_t>(geometry_.slab_bytes / size_class.stride);
  slab.slots.reset(new Slot[slab.num_slots]);  // NOLINT(modernize-make-unique): it would initialize them
  slab.sectors.assign(1 + (slab.num_slots + kSectorRecords - 1) / kSectorRecords, {});
  slab.free = nullptr;
  slab.num_fresh = slab.num_used = slab.num_busy = 0;
  size_class.num_slots += slab.num_slots;
}

// Takes an idle slab from its size class, and its values from the table.
void DiskIndex::detach(Slab& slab) {
  for (uint32_t i = 0; i < slab.num_fresh; ++i) {
    if (slab.slots[i].state == SlotState::kStored) forget(slab.slots[i]);
  }
  return_slab(slab);
}

void DiskIndex::return_slab(Slab& slab) {
  SizeClass& size_class = *slab.size_class;
  idle_.remove(slab);
  if (slab.has_room()) size_class.with_room.remove(slab);
  size_class.num_slots -= slab.num_slots;
  size_class.num_free -= slab.num_slots - slab.num_used;
  slab.size_class = nullptr;
  slab.state = SlabState::kUnused;
  slab.slots.reset();
  slab.num_fresh = slab.num_used = 0;
  slab.free = nullptr;
}

Slot& DiskIndex::take_free_slot(SizeClass& size_class) {
  Slab& slab = *size_class.with_room.newest();
  Slot* slot = slab.free;
  if (slot != nullptr) {
    slab.free = slot->links.older;
  } else {
    slot = &slab.slots[slab.num_fresh++];
    *slot = {};
    slot->slab = slab.number;
  }
  ++slab.num_used;
  --size_class.num_free;
  if (!slab.has_room()) size_class.with_room.remove(slab);
  return *slot;
}

// The record of the slot does not count. A slab that is empty then is unused, if its size class has room without it.
void DiskIndex::free_slot(Slot& slot) {
  Slab& slab = slab_of(slot);
  SizeClass& size_class = *slab.size_class;
  if (!slab.has_room()) size_class.with_room.add(slab);
  slot.state = SlotState::kFree;
  slot.links.older = slab.free;
  slab.free = &slot;
  --slab.num_used;
  ++size_class.num_free;
  clear_busy(slot);
  if (slab.num_used > 0 || size_class.num_free - slab.num_slots < reserve_of(size_class)) return;
  if (size_class.num_free == slab.num_slots) return;
  return_slab(slab);
  free_slabs_.push_back(slab.number);
}

// It stays busy, so that its slab is not used for anything else.
void DiskIndex::break_slot(Slot& slot) {
  slot.state = SlotState::kBroken;
  slot.unusable = false;
  SizeClass& size_class = class_of(slot);
  size_class.broken.add(slot);
  counts_.broken_bytes += size_class.stride;
}

void DiskIndex::mend(SizeClass& size_class) {
  if (Slot* slot = size_class.broken.oldest()) {
    size_class.broken.remove(*slot);
    counts_.broken_bytes -= size_class.stride;
    free_slot(*slot);
  }
  if (failed_.empty()) return;
  const auto next = failed_.upper_bound(last_mended_);
  last_mended_ = next == failed_.end() ? *failed_.begin() : *next;
  rewrite(last_mended_);
}

// Ends a slot whose record does not count and that has no readers.
void DiskIndex::release(Slot& slot) {
  --class_of(slot).num_coming;
  if (slot.unusable) {
    break_slot(slot);
  } else {
    free_slot(slot);
  }
}

// Takes a value from the table.
void DiskIndex::forget(Slot& slot) {
  table_.erase(hash_(slot.key, slot.space), slot);
  if (slot.state == SlotState::kStored) {
    if (slot.pins == 0) class_of(slot).evictable.remove(slot);
    --counts_.num_values;
    counts_.used_bytes -= spaces_.at(slot.space).name.num_bytes;
  }
  const auto space = spaces_.find(slot.space);
  if (--space->second.num_slots > 0) return;
  const auto name = names_.find(space->second.name);
  if (name != names_.end() && name->second == slot.space) names_.erase(name);
  spaces_.erase(space);
}

// Begins to overwrite the record of a value that is not in the table any more.
void DiskIndex::invalidate(Slot& slot) {
  Slab& slab = slab_of(slot);
  const auto number = static_cast<uint32_t>(&slab.sector_of(slot) - slab.sectors.data());
  slot.state = SlotState::kInvalidating;
  ++slab.size_class->num_coming;
  set_busy(slot);
  mark(slab, number);
  queue(slab, number);
}

// The record of a value is written.
void DiskIndex::store(Slot& slot) {
  slot.state = SlotState::kStored;
  ++counts_.num_values;
  counts_.used_bytes += spaces_.at(slot.space).name.num_bytes;
  class_of(slot).evictable.add(slot);
  use(slot);
  clear_busy(slot);
}

void DiskIndex::use(Slot& slot) {
  Slab& slab = slab_of(slot);
  slot.used = slab.newest = ++tick_;
  if (slab.num_busy > 0) return;
  idle_.remove(slab);
  idle_.add(slab);
}

void DiskIndex::set_busy(Slot& slot) {
  if (slot.busy) return;
  slot.busy = true;
  Slab& slab = slab_of(slot);
  if (slab.num_busy++ == 0) idle_.remove(slab);
}

void DiskIndex::clear_busy(Slot& slot) {
  slot.busy = false;
  Slab& slab = slab_of(slot);
  if (--slab.num_busy > 0) return;
  slab.newest = ++tick_;
  idle_.add(slab);
}

}  // namespace kvservice::disk
