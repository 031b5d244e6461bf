// The bookkeeping of the disk tier: which value is in which slot, and what must be written next.
//
// It does no input or output. A caller writes values into the slots that it gets, and the sectors of records that
// take_sector() returns, and reports each end, in any order. format.h has the order of writes per slot, which the
// states of slots keep.
//
// A value takes the first of these that there is:
//   1. a free slot of its stride
//   2. a free slab
//   3. the least recently used slab of another stride, if none of its values is newer than the least recently used
//   value
//      of this stride
//   4. the slot of that value
// All but the first need a write before, so that some slots of each stride are freed ahead. A value that is being read
// is not evicted, and neither is a slab with such a value.
//
// Room whose write failed is tried again, one slot and one sector at a time: mend() says when. Until then nothing else
// is evicted for it, and a slot is not used before a sector without its record is on disk.
//
// The writes of a sector are grouped: a sector waits while values are written whose records it will have, up to a
// limit.
//
// For one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <unordered_map>
#include <vector>

#include "disk/format.h"
#include "disk/slab.h"
#include "store/key_table.h"

namespace kvservice::disk {

enum class Begun {
  kBegun,
  kPresent,
  kBeingWritten,
  kWait,    // there will be room when sectors are written
  kNoRoom,  // all slots are in use
};

struct Begin {
  Begun status;
  Slot* slot;  // unless there is none
};

// A write of a sector that is to be done.
struct SectorWrite {
  Slab* slab;
  uint32_t sector;
  uint64_t change;
  std::vector<std::pair<Slot*, SlotState>> slots;  // those that wait for it
};

// A slot whose wait has ended.
struct Recorded {
  Slot* slot;
  bool stored;
};

struct IndexCounts {
  int64_t num_values = 0;  // stored
  int64_t used_bytes = 0;
  uint64_t evicted = 0, removed = 0, corrupt = 0;
  int64_t broken_bytes = 0;  // room whose last write failed
};

class DiskIndex {
 public:
  DiskIndex(const Geometry& geometry, uint64_t seed);
  DiskIndex(const DiskIndex&) = delete;
  DiskIndex& operator=(const DiskIndex&) = delete;

  // Recovery, before anything else: recover_slab() for each slab, then end_recovery().
  static bool is_valid(const Geometry& geometry, uint32_t slab, const SlabHeader& header);
  static int64_t num_sectors(const Geometry& geometry, const SlabHeader& header);
  // Returns the indices of the records that count. The header is valid. Reads nothing else.
  static std::vector<uint32_t> valid_records(const Geometry& geometry, const SlabHeader& header, const Record* records);
  void recover_slab(const SlabHeader& header, const Record* records, const std::vector<uint32_t>& valid);
  // A slab whose header or records cannot be read gets a new header.
  void discard_slab(uint32_t slab) { assign(slabs_[slab], nullptr); }
  void end_recovery();

  bool contains(const SpaceName& name, const Key& key) const;
  // Returns the slot of a stored value, which has a reader until unpin(), or nullptr.
  Slot* pin(const SpaceName& name, const Key& key);
  // A value is given up if its read fails twice, and another one did not fail in between: otherwise the disk failed.
  enum class Read { kRight, kCorrupt, kFailed };
  void unpin(Slot& slot, Read outcome);

  // Reserves a slot, into which the caller writes the value. Frees slots ahead, or evicts for this value only.
  Begin begin_put(const SpaceName& name, const Key& key, uint64_t value_checksum, bool ahead = true);
  // Returns whether a record will be written: then the slot is reported by end_sector() or remove().
  bool end_write(Slot& slot, bool written);

  struct Removed {
    bool stored = false;
    Slot* unrecorded = nullptr;  // a slot that waited for its record, which is not written any more
  };
  Removed remove(const SpaceName& name, const Key& key);
  // The values of a space are not found any more. sweep() removes them, slab by slab.
  void clear(const SpaceName& name, std::vector<uint32_t>& cleared);
  void sweep(uint32_t space, uint32_t number, std::vector<Slot*>& unrecorded);

  // Fills the image of a sector to be written, kSectorBytes. Returns whether there is one.
  bool take_sector(SectorWrite& write, char* image);
  void end_sector(const SectorWrite& write, bool written, std::vector<Recorded>& recorded);
  // All changes up to this number...
  uint64_t last_change() const { return change_; }
  // ...are on disk if the oldest change that is not is newer.
  uint64_t oldest_change() const { return outstanding_.empty() ? change_ + 1 : *outstanding_.begin(); }
  // Sectors that could not be written are to be written again.
  void retry_sectors();
  // Tries again what failed first: a slot of this stride, and a sector of any. Now and then, when other writes succeed,
  // the index does that itself.
  void mend(int64_t stride) { mend(class_of(stride)); }
  bool has_failed_sectors() const { return !failed_.empty(); }
  bool has_sectors() const { return !outstanding_.empty(); }

  const Geometry& geometry() const { return geometry_; }
  int64_t offset_in_file(const Slot& slot) const;
  const IndexCounts& counts() const { return counts_; }
  // The number of values that may get room if they have waited for it.
  size_t num_admitted(int64_t stride) const;

  // Throws std::runtime_error with what is wrong.
  void check() const;

 private:
  SizeClass& class_of(int64_t stride);
  uint32_t space_number(const SpaceName& name) const;
  uint32_t make_space(const SpaceName& name);
  Slot* find(const SpaceName& name, const Key& key) const;
  Slot* find_in(uint32_t space, uint64_t hash, const Key& key) const;
  Slab& slab_of(const Slot& slot) { return slabs_[slot.slab]; }
  SizeClass& class_of(const Slot& slot) { return *slab_of(slot).size_class; }

  static int64_t reserve_of(const SizeClass& size_class);
  void make_room(SizeClass& size_class, int64_t wanted);
  void assign(Slab& slab, SizeClass* size_class);
  void lay_out(Slab& slab, SizeClass& size_class) const;
  void detach(Slab& slab);
  void return_slab(Slab& slab);
  Slot& take_free_slot(SizeClass& size_class);
  void free_slot(Slot& slot);
  void break_slot(Slot& slot);
  void mend(SizeClass& size_class);
  void release(Slot& slot);
  void forget(Slot& slot);
  void invalidate(Slot& slot);
  void store(Slot& slot);
  void use(Slot& slot);
  void set_busy(Slot& slot);
  void clear_busy(Slot& slot);

  void mark(Slab& slab, uint32_t number);
  void queue(Slab& slab, uint32_t number);
  void rewrite(uint64_t place);
  bool revive(Slab& slab, uint32_t number);
  void fail_record(Slot& slot);
  static bool is_ready(const Sector& sector);
  void encode(Slab& slab, uint32_t number, char* image, SectorWrite& write) const;
  void end_header(Slab& slab, bool written);
  void end_record(Slot& slot, SlotState before, bool written, std::vector<Recorded>& recorded);
  void recover_slot(Slab& slab, Slot& slot, const Record& record);
  void recover_free(Slab& slab);
  void check_slab(const Slab& slab) const;

  const Geometry geometry_;
  std::mt19937_64 random_;
  const KeyHash hash_;
  uint64_t tick_ = 0;
  std::vector<Slab> slabs_;
  std::vector<uint32_t> free_slabs_;          // the last one is used first
  LinkedList<Slab, &Slab::idle_links> idle_;  // in use, without busy slots
  std::map<int64_t, SizeClass> classes_;
  KeyTable<Slot> table_;
  std::map<SpaceName, uint32_t> names_;
  std::unordered_map<uint32_t, Space> spaces_;
  uint32_t last_space_ = 0;
  uint64_t change_ = 0;
  std::multiset<uint64_t> outstanding_;  // changes of sectors that are not on disk
  std::deque<uint64_t> queue_;           // sectors to write
  std::set<uint64_t> failed_;            // sectors that could not be written
  uint64_t last_mended_ = 0;             // one of them
  uint64_t num_written_ = 0;             // values
  bool read_failed_ = false;             // the last one
  IndexCounts counts_;
};

}  // namespace kvservice::disk
