// The index of an earlier process, rebuilt from headers and records.
#include <algorithm>
#include <utility>
#include <vector>

#include "disk/index.h"

namespace kvservice::disk {

bool DiskIndex::is_valid(const Geometry& geometry, uint32_t slab, const SlabHeader& header) {
  return header.magic == kHeaderMagic && header.checksum == own_checksum(header) && header.slab == slab &&
         header.stride > 0 && header.stride % kSectorBytes == 0 && header.stride <= geometry.slab_bytes;
}

int64_t DiskIndex::num_sectors(const Geometry& geometry, const SlabHeader& header) {
  return (geometry.slab_bytes / header.stride + kSectorRecords - 1) / kSectorRecords;
}

std::vector<uint32_t> DiskIndex::valid_records(const Geometry& geometry, const SlabHeader& header,
                                               const Record* records) {
  std::vector<uint32_t> valid;
  const auto num_slots = static_cast<uint32_t>(geometry.slab_bytes / header.stride);
  for (uint32_t i = 0; i < num_slots; ++i) {
    const Record& record = records[i];
    const bool here = record.epoch == header.epoch && record.place == place_of(header.slab, i);
    if (!here || record.checksum != own_checksum(record)) continue;
    if (record.num_bytes > 0 && stride_of(record.num_bytes) == header.stride) valid.push_back(i);
  }
  return valid;
}

void DiskIndex::recover_slab(const SlabHeader& header, const Record* records, const std::vector<uint32_t>& valid) {
  Slab& slab = slabs_[header.slab];
  if (valid.empty()) return;
  slab.state = SlabState::kInUse;
  slab.epoch = header.epoch;
  lay_out(slab, class_of(header.stride));
  slab.num_fresh = valid.back() + 1;
  idle_.add(slab);
  for (uint32_t i = 0; i < slab.num_fresh; ++i) {
    slab.slots[i] = {};
    slab.slots[i].slab = slab.number;
  }
  for (const uint32_t i : valid) recover_slot(slab, slab.slots[i], records[i]);
  recover_free(slab);
}

// Of two records of a key, which a crash between their writes can leave, the older one is invalidated.
void DiskIndex::recover_slot(Slab& slab, Slot& slot, const Record& record) {
  const SpaceName name = {record.digest, record.num_bytes};
  ++slab.num_used;
  tick_ = std::max(tick_, record.used);
  const uint32_t space = make_space(name);
  const uint64_t hash = hash_(record.key, space);
  Slot* other = find_in(space, hash, record.key);
  slot.key = record.key;
  slot.space = space;
  if (other != nullptr && other->used >= record.used) return invalidate(slot);
  ++spaces_.at(space).num_slots;
  if (other != nullptr) {
    forget(*other);
    invalidate(*other);
  }
  slot.value_checksum = record.value_checksum;
  slot.used = record.used;
  table_.make_room(hash);
  table_.insert(hash, slot);
  slot.state = SlotState::kStored;
  ++counts_.num_values;
  counts_.used_bytes += name.num_bytes;
  class_of(slot).evictable.add(slot);
  slab.newest = std::max(slab.newest, slot.used);
}

void DiskIndex::recover_free(Slab& slab) {
  for (uint32_t i = slab.num_fresh; i-- > 0;) {
    Slot& slot = slab.slots[i];
    if (slot.state != SlotState::kFree) continue;
    slot.links.older = slab.free;
    slab.free = &slot;
  }
  SizeClass& size_class = *slab.size_class;
  size_class.num_free += slab.num_slots - slab.num_used;
  if (slab.has_room()) size_class.with_room.add(slab);
}

// Sorts values and slabs by their last use.
void DiskIndex::end_recovery() {
  std::vector<std::pair<uint64_t, Slot*>> slots;
  std::vector<std::pair<uint64_t, Slab*>> slabs;
  slots.reserve(static_cast<size_t>(counts_.num_values));
  for (auto& [stride, size_class] : classes_) size_class.evictable = {};
  idle_ = {};
  for (Slab& slab : slabs_) {
    if (slab.state == SlabState::kInUse && slab.num_busy == 0) slabs.emplace_back(slab.newest, &slab);
    for (uint32_t i = 0; i < slab.num_fresh; ++i) {
      Slot& slot = slab.slots[i];
      if (slot.state == SlotState::kStored) slots.emplace_back(slot.used, &slot);
    }
  }
  std::sort(slots.begin(), slots.end());
  std::sort(slabs.begin(), slabs.end());
  for (const auto& [used, slot] : slots) class_of(*slot).evictable.add(*slot);
  for (const auto& [newest, slab] : slabs) idle_.add(*slab);
  for (auto slab = slabs_.rbegin(); slab != slabs_.rend(); ++slab) {
    if (slab->state == SlabState::kUnused) free_slabs_.push_back(slab->number);
  }
}

}  // namespace kvservice::disk
