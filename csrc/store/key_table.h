// A hash table from keys to slots: open addressing, linear probing, backward-shift deletion.
//
// It has 256 parts, chosen by the highest bits of the hash, and each part grows by itself, so that no insertion moves
// more than a part. An entry has the whole hash, so that a part grows, and most other keys are passed over, without
// access to slots. Parts never shrink.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvservice {

template <class Slot>
class KeyTable {
 public:
  // Returns the slot with this hash for which `same` is true, or nullptr.
  template <class Same>
  Slot* find(uint64_t hash, const Same& same) const {
    const Part& part = parts_[hash >> kShift];
    for (size_t i = hash & part.mask();; i = (i + 1) & part.mask()) {
      const Entry& entry = part.entries[i];
      if (entry.slot == nullptr || (entry.hash == hash && same(*entry.slot))) return entry.slot;
    }
  }

  // Loads the first entry that find() reads into the cache.
  void prefetch(uint64_t hash) const {
    const Part& part = parts_[hash >> kShift];
    __builtin_prefetch(&part.entries[hash & part.mask()]);
  }

  // Grows the table, if necessary, so that the next insert() of this hash succeeds. Throws std::bad_alloc.
  void make_room(uint64_t hash) {
    Part& part = parts_[hash >> kShift];
    if ((part.size + 1) * 4 > part.entries.size() * 3) part.grow();
  }

  // The slot must not be in the table, and there must be room.
  void insert(uint64_t hash, Slot& slot) {
    Part& part = parts_[hash >> kShift];
    part.place({hash, &slot});
    ++part.size;
  }

  // The slot must be in the table.
  void erase(uint64_t hash, const Slot& slot) {
    Part& part = parts_[hash >> kShift];
    size_t gap = hash & part.mask();
    while (part.entries[gap].slot != &slot) gap = (gap + 1) & part.mask();
    // Moves each later entry of the cluster into the gap, unless the gap is before the first place for its hash.
    for (size_t i = (gap + 1) & part.mask(); part.entries[i].slot != nullptr; i = (i + 1) & part.mask()) {
      const size_t first = part.entries[i].hash & part.mask();
      if (((i - first) & part.mask()) < ((i - gap) & part.mask())) continue;
      part.entries[gap] = part.entries[i];
      gap = i;
    }
    part.entries[gap] = {};
    --part.size;
  }

  size_t size() const {
    size_t size = 0;
    for (const Part& part : parts_) size += part.size;
    return size;
  }

 private:
  static constexpr int kShift = 56;

  struct Entry {
    uint64_t hash = 0;
    Slot* slot = nullptr;  // nullptr: no entry
  };

  struct Part {
    std::vector<Entry> entries = std::vector<Entry>(16);
    size_t size = 0;

    size_t mask() const { return entries.size() - 1; }

    void place(const Entry& entry) {
      size_t i = entry.hash & mask();
      while (entries[i].slot != nullptr) i = (i + 1) & mask();
      entries[i] = entry;
    }

    void grow() {
      std::vector<Entry> before(entries.size() * 2);
      before.swap(entries);
      for (const Entry& entry : before) {
        if (entry.slot != nullptr) place(entry);
      }
    }
  };

  std::vector<Part> parts_ = std::vector<Part>(256);
};

}  // namespace kvservice
