// Consistency checks of the index of the disk tier.
#include <stdexcept>

#include "disk/index.h"

namespace kvservice::disk {
namespace {

void expect(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

}  // namespace

void DiskIndex::check_slab(const Slab& slab) const {
  uint32_t used = 0, busy = 0;
  for (uint32_t i = 0; i < slab.num_fresh; ++i) {
    const Slot& slot = slab.slots[i];
    if (slot.state != SlotState::kFree) ++used;
    if (slot.busy) ++busy;
    const bool in_table =
        slot.state == SlotState::kWriting || slot.state == SlotState::kRecording || slot.state == SlotState::kStored;
    if (in_table) expect(find_in(slot.space, hash_(slot.key, slot.space), slot.key) == &slot, "a value is lost");
    expect(slot.state != SlotState::kInvalid || slot.pins > 0, "a slot waits for no reader");
    expect(slot.slab == slab.number, "a slot has another slab");
    const bool idle = slot.state == SlotState::kFree || (slot.state == SlotState::kStored && slot.pins == 0);
    expect(slot.busy == !idle, "a slot is busy or is not");
    if (slot.state == SlotState::kBroken) expect(slab.size_class->broken.contains(slot), "a slot is never tried again");
    if (slot.state == SlotState::kFailed) {
      const auto sector = static_cast<uint32_t>(1 + i / kSectorRecords);
      expect(failed_.count(place_of(slab.number, sector)) == 1, "a record is never written again");
    }
    if (slot.state == SlotState::kStored && slot.pins == 0) {
      expect(slab.size_class->evictable.contains(slot), "a value cannot be evicted");
    }
  }
  expect(used == slab.num_used && busy == slab.num_busy, "the counts of a slab are wrong");
  if (slab.state == SlabState::kInUse && busy == 0) expect(idle_.contains(slab), "a slab is not idle");
}

void DiskIndex::check() const {
  std::map<const SizeClass*, int64_t> free, slots, coming;
  int64_t stored = 0, broken_bytes = 0;
  for (const Slab& slab : slabs_) {
    if (slab.state == SlabState::kUnused) continue;
    check_slab(slab);
    for (uint32_t i = 0; i < slab.num_fresh; ++i) {
      const SlotState state = slab.slots[i].state;
      if (state == SlotState::kStored) ++stored;
      if (state == SlotState::kInvalidating || state == SlotState::kInvalid) ++coming[slab.size_class];
      if (state == SlotState::kBroken || state == SlotState::kFailed) broken_bytes += slab.size_class->stride;
    }
    slots[slab.size_class] += slab.num_slots;
    const bool failed = failed_.count(place_of(slab.number, 0)) == 1;
    if (failed) broken_bytes += geometry_.slab_bytes;
    if (slab.state == SlabState::kAssigning && !failed) coming[slab.size_class] += slab.num_slots;
    if (slab.state == SlabState::kInUse) free[slab.size_class] += slab.num_slots - slab.num_used;
  }
  expect(stored == counts_.num_values, "the number of values is wrong");
  expect(broken_bytes == counts_.broken_bytes, "the room that failed is wrong");
  for (const auto& [stride, size_class] : classes_) {
    expect(slots[&size_class] == size_class.num_slots, "the number of slots is wrong");
    expect(coming[&size_class] == size_class.num_coming, "the number of slots to come is wrong");
    expect(free[&size_class] == size_class.num_free, "the number of free slots is wrong");
  }
  int64_t in_table = 0;
  for (const auto& [number, space] : spaces_) in_table += space.num_slots;
  expect(in_table == static_cast<int64_t>(table_.size()), "the spaces have other values than the table");
}

}  // namespace kvservice::disk
