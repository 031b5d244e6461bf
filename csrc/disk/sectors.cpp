// The sectors of records: when they are written, and what follows.
#include "disk/index.h"

namespace kvservice::disk {
namespace {

// A sector does not wait for more values than this.
constexpr int kMaxPending = 8;

}  // namespace

void DiskIndex::mark(Slab& slab, uint32_t number) {
  Sector& sector = slab.sectors[number];
  if (sector.num_pending < kMaxPending) ++sector.num_pending;
  if (sector.dirty) return;
  // What failed is an old change still, so that a removal that waits for it does not end before it is on disk.
  if (!revive(slab, number)) sector.since = ++change_;
  sector.dirty = true;
  outstanding_.insert(sector.since);
}

// Returns whether the sector failed: then it will be written again, and its slots are to come again.
bool DiskIndex::revive(Slab& slab, uint32_t number) {
  if (failed_.erase(place_of(slab.number, number)) == 0) return false;
  if (number == 0) {
    counts_.broken_bytes -= geometry_.slab_bytes;
    if (slab.size_class != nullptr) slab.size_class->num_coming += slab.num_slots;
    return true;
  }
  const uint32_t first = (number - 1) * kSectorRecords;
  for (uint32_t i = first; i < first + kSectorRecords && i < slab.num_fresh; ++i) {
    Slot& slot = slab.slots[i];
    if (slot.state != SlotState::kFailed) continue;
    slot.state = SlotState::kInvalidating;
    ++slab.size_class->num_coming;
    counts_.broken_bytes -= slab.size_class->stride;
  }
  return true;
}

bool DiskIndex::is_ready(const Sector& sector) {
  return !sector.in_flight && (sector.num_writing == 0 || sector.num_pending == kMaxPending);
}

// Queues a dirty sector, if it can be written now. It is tried again when one of its values is written, or itself.
void DiskIndex::queue(Slab& slab, uint32_t number) {
  Sector& sector = slab.sectors[number];
  if (sector.queued || !is_ready(sector)) return;
  sector.queued = true;
  queue_.push_back(place_of(slab.number, number));
}

bool DiskIndex::take_sector(SectorWrite& write, char* image) {
  if (queue_.empty()) return false;
  const uint64_t place = queue_.front();
  queue_.pop_front();
  Slab& slab = slabs_[place >> 32];
  write.slab = &slab;
  write.sector = static_cast<uint32_t>(place);
  write.slots.clear();
  Sector& sector = slab.sectors[write.sector];
  write.change = sector.since;
  sector.dirty = sector.queued = false;
  sector.num_pending = 0;
  sector.in_flight = true;
  std::memset(image, 0, kSectorBytes);
  if (write.sector == 0) {
    auto& header = *reinterpret_cast<SlabHeader*>(image);
    const int64_t stride = slab.size_class == nullptr ? 0 : slab.size_class->stride;
    header = {kHeaderMagic, slab.epoch, slab.number, stride, 0};
    header.checksum = own_checksum(header);
  } else {
    encode(slab, write.sector, image, write);
  }
  return true;
}

void DiskIndex::encode(Slab& slab, uint32_t number, char* image, SectorWrite& write) const {
  auto* records = reinterpret_cast<Record*>(image);
  const uint32_t first = (number - 1) * kSectorRecords;
  for (uint32_t i = first; i < first + kSectorRecords && i < slab.num_fresh; ++i) {
    Slot& slot = slab.slots[i];
    if (slot.state == SlotState::kRecording || slot.state == SlotState::kInvalidating) {
      write.slots.emplace_back(&slot, slot.state);
    }
    if (slot.state != SlotState::kRecording && slot.state != SlotState::kStored) continue;
    Record& record = records[i - first];
    const SpaceName& name = spaces_.at(slot.space).name;
    record.digest = name.digest;
    record.num_bytes = name.num_bytes;
    record.key = slot.key;
    record.value_checksum = slot.value_checksum;
    record.used = slot.used;
    record.epoch = slab.epoch;
    record.place = place_of(slab.number, i);
    record.checksum = own_checksum(record);
  }
}

void DiskIndex::end_sector(const SectorWrite& write, bool written, std::vector<Recorded>& recorded) {
  Slab& slab = *write.slab;
  Sector& sector = slab.sectors[write.sector];
  sector.in_flight = false;
  outstanding_.erase(outstanding_.find(write.change));
  const bool dirty = sector.dirty;
  if (!written) failed_.insert(place_of(slab.number, write.sector));
  if (write.sector == 0) {
    end_header(slab, written);
  } else {
    for (const auto& [slot, before] : write.slots) end_record(*slot, before, written, recorded);
  }
  if (!dirty) return;
  if (revive(slab, write.sector)) {
    outstanding_.erase(outstanding_.find(sector.since));
    outstanding_.insert(write.change);
    sector.since = write.change;
  }
  queue(slab, write.sector);
}

void DiskIndex::end_header(Slab& slab, bool written) {
  SizeClass* size_class = slab.size_class;
  if (size_class != nullptr) size_class->num_coming -= slab.num_slots;
  if (!written) {
    counts_.broken_bytes += geometry_.slab_bytes;
    return;
  }
  if (size_class == nullptr) {
    slab.state = SlabState::kUnused;
    free_slabs_.push_back(slab.number);
    return;
  }
  slab.state = SlabState::kInUse;
  size_class->num_free += slab.num_slots;
  size_class->with_room.add(slab);
  slab.newest = ++tick_;
  idle_.add(slab);
}

void DiskIndex::end_record(Slot& slot, SlotState before, bool written, std::vector<Recorded>& recorded) {
  if (before == SlotState::kInvalidating) {
    if (!written) {
      --class_of(slot).num_coming;
      return fail_record(slot);
    }
    slot.state = SlotState::kInvalid;
    if (slot.pins == 0) release(slot);
    return;
  }
  if (slot.state != SlotState::kRecording) return;  // removed meanwhile
  if (written) {
    store(slot);
  } else {
    forget(slot);
    fail_record(slot);
  }
  recorded.push_back({&slot, written});
}

void DiskIndex::fail_record(Slot& slot) {
  slot.state = SlotState::kFailed;
  counts_.broken_bytes += class_of(slot).stride;
}

void DiskIndex::rewrite(uint64_t place) {
  Slab& slab = slabs_[place >> 32];
  mark(slab, static_cast<uint32_t>(place));
  queue(slab, static_cast<uint32_t>(place));
}

void DiskIndex::retry_sectors() {
  const std::vector<uint64_t> places(failed_.begin(), failed_.end());
  for (const uint64_t place : places) rewrite(place);
}

}  // namespace kvservice::disk
