// The bookkeeping of the block store: which block is where, who uses it, and which one is evicted.
//
// A reservation takes the first of these that there is:
//   1. a free slot in a slab of the namespace
//   2. a free slab
//   3. the least recently used slab of another namespace, if none of its blocks is newer than the namespace's own least
//      recently used block
//   4. the slot of that block
// At the quota, it takes only the last. Above the quota, because that was lowered, it also evicts the least recently
// used block of the namespace. A block that is leased or reserved is never evicted, and neither is a slab with such a
// block. One with a shared lease (shared_lease.h) counts as used when its turn comes.
//
// Within a call the first key counts as the most recently used, because keys are chains of blocks: a block is of no use
// without those before it. All calls take time proportional to their keys, except that giving a slab to another
// namespace takes time proportional to its blocks.
//
// coldest() offers blocks to the caller before they are evicted, each once after its last use, and gives them the same
// place in the order afterwards unless they were used meanwhile.
//
// A process that opens the kept memory of an earlier one finds its committed blocks with their places, versions and
// order of use, see recover().
//
// For one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "store/kept.h"
#include "store/key_table.h"
#include "store/slab.h"
#include "store/sparse_array.h"

namespace kvservice {

// Keys, one after the other.
struct Keys {
  const char* data;
  size_t size;

  Key operator[](size_t i) const { return Key::load(data + i * kKeyBytes); }
};

// The values of PutStatus in store.proto.
enum class PutStatus : char { kDone = 1, kPresent = 2, kBeingWritten = 3, kNoRoom = 4 };

struct Acquired {
  std::vector<char> found;  // per key: 1 or 0
  std::vector<uint64_t> slots, offsets, versions;
};

// Blocks that are pinned, without a use.
struct Coldest {
  std::string keys;
  std::vector<uint64_t> slots, offsets, checksums;
  std::vector<uint64_t> uses;
};

struct Reserved {
  std::vector<PutStatus> statuses;  // per key
  std::vector<uint64_t> slots, offsets;
};

struct RemovedKey {
  uint32_t namespace_number;
  Key key;
};

struct NamespaceSize {
  uint32_t number;
  int64_t block_bytes, quota_bytes;
};

// Slots that belonged to somebody in the process before.
struct Recovered {
  std::vector<uint64_t> reserved, condemned;
};

struct Places {
  std::string keys;
  std::vector<uint64_t> offsets;
};

// This is what blocks with some keys need: how many are neither there nor being written, and how many that are there
// could be evicted.
struct Needed {
  int64_t missing, evictable;
};

// Slabs that lost their blocks, and how many blocks that were.
struct Emptied {
  int64_t slabs, blocks;
};

// Wrong slots throw std::runtime_error: only the daemon passes them. Other wrong arguments throw ArgumentError.
class StoreIndex {
 public:
  static constexpr int64_t kMaxSlabs = int64_t{1} << 31;

  StoreIndex(char* memory, int64_t num_bytes, int64_t slab_bytes, uint64_t seed, char* kept);
  // Says how much of the memory is there: all at first. The slabs behind it are not given to a namespace; those that
  // have one stay. Called after recover().
  void set_ready(int64_t num_bytes);
  // The size of the kept memory: a multiple of kPageBytes. Only its parts in use are ever touched.
  static int64_t kept_bytes(int64_t num_bytes, int64_t slab_bytes);
  StoreIndex(const StoreIndex&) = delete;
  StoreIndex& operator=(const StoreIndex&) = delete;

  Recovered recover(const std::vector<NamespaceSize>& sizes);
  uint64_t generation() const { return kept_.header->generation; }

  uint32_t open(int64_t block_bytes, int64_t quota_bytes);
  void close(uint32_t number);
  void set_quota(uint32_t number, int64_t quota_bytes);
  Namespace& find_namespace(uint32_t number) const;

  std::vector<char> lookup(uint32_t number, const Keys& keys);
  Needed needed(uint32_t number, const Keys& keys);
  Acquired acquire(uint32_t number, const Keys& keys, bool leading_only, bool counted);
  Coldest coldest(uint32_t number, int64_t most, bool newest_first);
  void lease(const std::vector<uint64_t>& slots);
  void release(const std::vector<uint64_t>& slots);
  Reserved reserve(uint32_t number, const Keys& keys);
  void commit(const std::vector<uint64_t>& slots, const std::vector<uint64_t>& checksums);
  void abort(const std::vector<uint64_t>& slots);
  void condemn(const std::vector<uint64_t>& slots);
  int64_t touch(uint32_t number, const Keys& keys);
  int64_t remove(uint32_t number, const Keys& keys);
  int64_t clear(uint32_t number, int64_t most);
  int64_t evict_blocks(uint32_t number, int64_t most);
  Emptied empty_slabs(uint32_t number, int64_t most_slabs, int64_t most_blocks);
  std::vector<uint64_t> checksums(const std::vector<uint64_t>& slots) const;
  Places places(const std::vector<uint64_t>& slots) const;

  // Frees removed blocks that only waited for shared leases. Calls that change the store do so, too.
  void end_lingering();

  void record_removed(bool enabled);
  std::vector<RemovedKey> take_removed();

  const std::map<uint32_t, std::unique_ptr<Namespace>>& namespaces() const { return namespaces_; }
  uint64_t num_evicted() const { return num_evicted_; }
  uint64_t num_unoffered() const { return num_unoffered_; }
  size_t num_slabs() const { return slabs_.size(); }
  size_t num_free_slabs() const { return free_slabs_.size(); }

  // Checks the next slabs, see _ext.pyi. Throws std::runtime_error.
  bool check(int64_t most);

 private:
  const std::vector<Slot*>& find_all(const Namespace& space, const Keys& keys);
  void prefetch(const std::vector<uint64_t>& slots) const;
  Slot* find(const Namespace& space, uint64_t hash, const Key& key) const;
  Slot* find_committed(const Namespace& space, uint64_t hash, const Key& key) const;
  Slot* find_slot(uint64_t number) const;
  Slot& slot_at(uint64_t number) const;
  Slot& reserved_at(uint64_t number) const;
  uint64_t slot_number(const Slot& slot) const;
  uint64_t offset(const Slot& slot) const;

  size_t place(const Slot& slot) const { return static_cast<size_t>(&slot - slots_.data()); }
  KeptSlot& kept(const Slot& slot) const { return kept_.slots[place(slot)]; }
  KeptSlab& kept(const Slab& slab) const { return kept_.slabs[slab.number]; }
  SlotState state(const Slot& slot) const { return kept(slot).state; }
  Slab& slab_of(const Slot& slot) { return slabs_[place(slot) >> kept_.slot_bits]; }
  const Slab& slab_of(const Slot& slot) const { return slabs_[place(slot) >> kept_.slot_bits]; }
  void prefetch(const Slot& slot) const;

  void add_namespace(const NamespaceSize& size);
  void recover_slab(Slab& slab, Recovered& recovered);
  void recover_slot(Slab& slab, Slot& slot, Recovered& recovered);
  void recover_order();

  // How many blocks and slabs with shared leases the current call may still pass over.
  struct Passes {
    int64_t blocks, slabs;
  };

  Slot* take_slot(Namespace& space);
  Slot* hide_oldest(Namespace& space);
  bool shrink(Namespace& space);
  void empty_another_slab(const Slot* own);
  void empty(Slab& slab);
  bool hide(Slot& slot);
  bool hide(Slab& slab);
  void show(Slot& slot);
  void linger(Slot& slot);
  void assign(Namespace& space);
  Slot& take_free_slot(Slab& slab);
  void fill(Slot& slot, const Key& key, uint64_t hash);
  void evict(Slot& slot);
  void count_eviction(const Slot& slot);
  void vacate(Slot& slot);
  void forget(Slot& slot);
  void drop(Slot& slot);
  void free_slot(Slot& slot);
  void return_slab(Slab& slab);

  void leave_evictable(Slot& slot);
  void return_cold(Slot& slot);
  void count_use(Slot& slot);
  void pin(Slot& slot);
  void unpin(Slot& slot);
  void end_last_lease(Slot& slot);
  void use(Slot& slot);
  void begin_busy(Slab& slab);
  void end_busy(Slab& slab);

  Record* records(const Slab& slab) const;
  Record& record(const Slot& slot) const;
  void renew_version(Slot& slot);

  void check_slab(const Slab& slab) const;
  void check_slot(const Slab& slab, const Slot& slot) const;
  void check_counts() const;

  char* const memory_;
  const int64_t slab_bytes_;
  const KeyHash hash_;
  const KeptMemory kept_;
  SparseArray<Slot> slots_;  // at the same indices as kept_.slots
  uint64_t tick_ = 0;
  std::vector<Slab> slabs_;
  std::vector<uint32_t> free_slabs_;          // the last one is used first; all of them are ready
  size_t num_ready_;                          // slabs from here on are not free, even if they have no namespace
  LinkedList<Slab, &Slab::idle_links> idle_;  // slabs of namespaces, without reserved or leased blocks
  KeyTable<Slot> table_;
  std::map<uint32_t, std::unique_ptr<Namespace>> namespaces_;
  uint64_t num_evicted_ = 0, num_unoffered_ = 0;
  std::vector<uint64_t> hashes_;  // of the keys of the current call
  std::vector<Slot*> found_;      // their committed blocks when the call began, or nullptr
  Passes passes_{};
  std::deque<uint64_t> lingering_;  // condemned slots with shared leases, each pinned once
  bool recording_ = false;
  std::vector<RemovedKey> removed_;
  size_t next_check_ = 0;
};

}  // namespace kvservice
