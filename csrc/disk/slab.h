// What the index of the disk tier knows in memory about slabs, slots and spaces.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "disk/format.h"
#include "store/linked_list.h"

namespace kvservice::disk {

// The name of a space: the values of a namespace.
struct SpaceName {
  std::array<char, kDigestBytes> digest;
  int64_t num_bytes;  // of each value

  bool operator<(const SpaceName& other) const {
    return std::tie(digest, num_bytes) < std::tie(other.digest, other.num_bytes);
  }
};

enum class SlotState : uint8_t {
  kFree,          // its record on disk does not count
  kWriting,       // the value is being written, and in the table
  kDropped,       // the same, but removed meanwhile
  kRecording,     // the value is written, its record is not yet
  kStored,        // the value can be read
  kInvalidating,  // the record is to be overwritten
  kInvalid,       // the record is overwritten, but a reader is left
  kFailed,        // the write of its record failed, so that the disk may have the one before or the one after
  kBroken,        // its record on disk does not count, and its bytes could not be written or read
};

// No initializers: slots that were never used are not touched.
struct Slot {
  Links<Slot> links;  // `older` is the next free slot if this one is free
  Key key;
  uint64_t value_checksum;
  uint64_t used;
  uint32_t space;
  uint32_t slab;
  uint32_t pins;  // readers
  SlotState state;
  bool busy;      // counted in num_busy of the slab
  bool unusable;  // becomes broken instead of free
  bool doubtful;  // its last read failed
};

// A sector of the records of a slab, or its header.
struct Sector {
  uint64_t since = 0;       // its first change that is not on disk and not being written
  uint8_t num_writing = 0;  // values being written whose records are here
  uint8_t num_pending = 0;  // changes since the last write
  bool dirty = false;
  bool queued = false;
  bool in_flight = false;
};

enum class SlabState : uint8_t {
  kUnused,
  kAssigning,  // its header is being written, or that failed
  kInUse,
};

struct SizeClass;

struct Slab {
  uint32_t number = 0;
  SlabState state = SlabState::kUnused;
  SizeClass* size_class = nullptr;
  uint64_t epoch = 0;
  std::unique_ptr<Slot[]> slots;
  std::vector<Sector> sectors;
  uint32_t num_slots = 0;
  Slot* free = nullptr;    // slots that were used before, the last one first
  uint32_t num_fresh = 0;  // the first slot that has never been used
  uint32_t num_used = 0;   // slots that are not free
  uint32_t num_busy = 0;   // slots that are neither free nor stored, or have a reader
  uint64_t newest = 0;     // when a value was last used
  Links<Slab> idle_links{};
  Links<Slab> room_links{};

  uint32_t index_of(const Slot& slot) const { return static_cast<uint32_t>(&slot - slots.get()); }
  Sector& sector_of(const Slot& slot) { return sectors[1 + index_of(slot) / kSectorRecords]; }
  bool has_room() const { return free != nullptr || num_fresh < num_slots; }
};

// The slabs of one stride.
struct SizeClass {
  int64_t stride = 0;
  int64_t num_slots = 0;
  int64_t num_free = 0;
  int64_t num_coming = 0;                         // slots that will be free when records or headers are written
  LinkedList<Slot, &Slot::links> evictable;       // stored, without readers
  LinkedList<Slot, &Slot::links> broken;          // the oldest is tried again first
  LinkedList<Slab, &Slab::room_links> with_room;  // the newest is used first
};

// A space that was cleared keeps its number until its last value is gone, and has no name.
struct Space {
  SpaceName name;
  int64_t num_slots = 0;  // in the table
};

}  // namespace kvservice::disk
