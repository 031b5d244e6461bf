#include "disk/index.h"

#include <algorithm>
#include <limits>

namespace kvservice::disk {
namespace {

// So many values are written for one slot that is tried again: a slot that fails for ever costs little.
constexpr uint64_t kMendEvery = 16;

}  // namespace

DiskIndex::DiskIndex(const Geometry& geometry, uint64_t seed)
    : geometry_(geometry), random_(seed), hash_(random_(), random_()), slabs_(static_cast<size_t>(geometry.num_slabs)) {
  for (size_t i = 0; i < slabs_.size(); ++i) slabs_[i].number = static_cast<uint32_t>(i);
}

SizeClass& DiskIndex::class_of(int64_t stride) {
  SizeClass& size_class = classes_[stride];
  size_class.stride = stride;
  return size_class;
}

// Returns 0, which is no number, if the space has no values.
uint32_t DiskIndex::space_number(const SpaceName& name) const {
  const auto found = names_.find(name);
  return found == names_.end() ? 0 : found->second;
}

uint32_t DiskIndex::make_space(const SpaceName& name) {
  uint32_t& number = names_[name];
  if (number == 0) {
    do {
      ++last_space_;
    } while (last_space_ == 0 || spaces_.count(last_space_) != 0);
    number = last_space_;
    spaces_[number].name = name;
  }
  return number;
}

Slot* DiskIndex::find_in(uint32_t space, uint64_t hash, const Key& key) const {
  return table_.find(hash, [&](const Slot& slot) { return slot.space == space && slot.key == key; });
}

// Returns the slot of a value that is stored or will be, or nullptr.
Slot* DiskIndex::find(const SpaceName& name, const Key& key) const {
  const uint32_t space = space_number(name);
  return space == 0 ? nullptr : find_in(space, hash_(key, space), key);
}

bool DiskIndex::contains(const SpaceName& name, const Key& key) const {
  const Slot* slot = find(name, key);
  return slot != nullptr && slot->state == SlotState::kStored;
}

Slot* DiskIndex::pin(const SpaceName& name, const Key& key) {
  Slot* slot = find(name, key);
  if (slot == nullptr || slot->state != SlotState::kStored) return nullptr;
  if (slot->pins++ == 0) {
    class_of(*slot).evictable.remove(*slot);
    set_busy(*slot);
  }
  return slot;
}

void DiskIndex::unpin(Slot& slot, Read outcome) {
  const bool failed = outcome == Read::kFailed;
  const bool lost = failed && slot.doubtful && !read_failed_;
  slot.doubtful = read_failed_ = failed;
  if (outcome == Read::kCorrupt) ++counts_.corrupt;
  if (lost) slot.unusable = true;
  if ((lost || outcome == Read::kCorrupt) && slot.state == SlotState::kStored) {
    forget(slot);
    invalidate(slot);
  }
  if (--slot.pins > 0) return;
  if (slot.state == SlotState::kStored) {
    class_of(slot).evictable.add(slot);
    use(slot);
    clear_busy(slot);
  } else if (slot.state == SlotState::kInvalid) {
    release(slot);
  }
}

Begin DiskIndex::begin_put(const SpaceName& name, const Key& key, uint64_t value_checksum, bool ahead) {
  if (Slot* slot = find(name, key)) {
    if (slot->state != SlotState::kStored) return {Begun::kBeingWritten, slot};
    if (slot->pins == 0) {
      class_of(*slot).evictable.remove(*slot);
      class_of(*slot).evictable.add(*slot);
      use(*slot);
    }
    return {Begun::kPresent, slot};
  }
  SizeClass& size_class = class_of(stride_of(name.num_bytes));
  const int64_t reserve = ahead ? reserve_of(size_class) : 0;
  if (size_class.num_free == 0) make_room(size_class, std::max<int64_t>(1, reserve));
  if (size_class.num_free == 0 && size_class.num_coming == 0) mend(size_class);
  if (size_class.num_free == 0) return {size_class.num_coming > 0 ? Begun::kWait : Begun::kNoRoom, nullptr};
  const uint32_t space = make_space(name);
  const uint64_t hash = hash_(key, space);
  table_.make_room(hash);
  Slot& slot = take_free_slot(size_class);
  slot.key = key;
  slot.value_checksum = value_checksum;
  slot.used = ++tick_;
  slot.space = space;
  slot.doubtful = false;
  slot.state = SlotState::kWriting;
  set_busy(slot);
  ++slab_of(slot).sector_of(slot).num_writing;
  table_.insert(hash, slot);
  ++spaces_.at(space).num_slots;
  make_room(size_class, reserve);
  return {Begun::kBegun, &slot};
}

bool DiskIndex::end_write(Slot& slot, bool written) {
  Slab& slab = slab_of(slot);
  SizeClass& size_class = *slab.size_class;
  Sector& sector = slab.sector_of(slot);
  --sector.num_writing;
  const auto number = static_cast<uint32_t>(&sector - slab.sectors.data());
  const bool dropped = slot.state == SlotState::kDropped;
  if (!written) {
    if (!dropped) forget(slot);
    break_slot(slot);
  } else if (dropped) {
    free_slot(slot);
  } else {
    slot.state = SlotState::kRecording;
    mark(slab, number);
  }
  if (sector.dirty) queue(slab, number);
  if (written && ++num_written_ % kMendEvery == 0) mend(size_class);
  return written && !dropped;
}

DiskIndex::Removed DiskIndex::remove(const SpaceName& name, const Key& key) {
  Slot* slot = find(name, key);
  if (slot == nullptr) return {};
  forget(*slot);
  if (slot->state == SlotState::kWriting) {
    slot->state = SlotState::kDropped;
    return {};
  }
  const bool stored = slot->state == SlotState::kStored;
  if (stored) ++counts_.removed;
  invalidate(*slot);
  return {stored, stored ? nullptr : slot};
}

void DiskIndex::clear(const SpaceName& name, std::vector<uint32_t>& cleared) {
  const auto found = names_.find(name);
  if (found == names_.end()) return;
  cleared.push_back(found->second);
  names_.erase(found);
}

void DiskIndex::sweep(uint32_t space, uint32_t number, std::vector<Slot*>& unrecorded) {
  Slab& slab = slabs_[number];
  if (slab.state != SlabState::kInUse || spaces_.count(space) == 0) return;
  const auto has_space = [&](const Slot& slot) {
    const bool in_table =
        slot.state == SlotState::kWriting || slot.state == SlotState::kRecording || slot.state == SlotState::kStored;
    return in_table && slot.space == space;
  };
  Slot* const end = slab.slots.get() + slab.num_fresh;
  const auto found = std::count_if(slab.slots.get(), end, has_space);
  if (found == 0) return;
  if (slab.num_busy == 0 && found == slab.num_used) {
    counts_.removed += static_cast<uint64_t>(found);
    detach(slab);
    assign(slab, nullptr);
    return;
  }
  for (Slot* slot = slab.slots.get(); slot != end; ++slot) {
    if (!has_space(*slot)) continue;
    forget(*slot);
    if (slot->state == SlotState::kWriting) {
      slot->state = SlotState::kDropped;
      continue;
    }
    if (slot->state == SlotState::kStored) ++counts_.removed;
    if (slot->state == SlotState::kRecording) unrecorded.push_back(slot);
    invalidate(*slot);
  }
}

int64_t DiskIndex::offset_in_file(const Slot& slot) const {
  const Slab& slab = slabs_[slot.slab];
  return geometry_.slab_at(slot.slab) + slab.index_of(slot) * slab.size_class->stride;
}

// When nothing more comes, all may try again, and be refused.
size_t DiskIndex::num_admitted(int64_t stride) const {
  const auto found = classes_.find(stride);
  const bool none_come = found == classes_.end() || found->second.num_coming == 0;
  return none_come ? std::numeric_limits<size_t>::max() : static_cast<size_t>(found->second.num_free);
}

}  // namespace kvservice::disk
