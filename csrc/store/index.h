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
// block.
//
// Within a call the first key counts as the most recently used, because keys are chains of blocks: a block is of no use
// without those before it. All calls take time proportional to their keys, except that giving a slab to another
// namespace takes time proportional to its blocks.
//
// For one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "store/key_table.h"
#include "store/slab.h"

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

struct Reserved {
  std::vector<PutStatus> statuses;  // per key
  std::vector<uint64_t> slots, offsets;
};

struct RemovedKey {
  uint32_t namespace_number;
  Key key;
};

// Wrong slots throw std::runtime_error: only the daemon passes them. Other wrong arguments throw ArgumentError.
class StoreIndex {
 public:
  static constexpr int64_t kMaxSlabs = int64_t{1} << 31;

  StoreIndex(char* memory, int64_t num_bytes, int64_t slab_bytes, uint64_t seed);
  StoreIndex(const StoreIndex&) = delete;
  StoreIndex& operator=(const StoreIndex&) = delete;

  uint32_t open(int64_t block_bytes, int64_t quota_bytes);
  void close(uint32_t number);
  void set_quota(uint32_t number, int64_t quota_bytes);
  Namespace& find_namespace(uint32_t number) const;

  std::vector<char> lookup(uint32_t number, const Keys& keys);
  Acquired acquire(uint32_t number, const Keys& keys, bool leading_only);
  void release(const std::vector<uint64_t>& slots);
  Reserved reserve(uint32_t number, const Keys& keys);
  void commit(const std::vector<uint64_t>& slots, const std::vector<uint64_t>& checksums);
  void abort(const std::vector<uint64_t>& slots);
  void condemn(const std::vector<uint64_t>& slots);
  int64_t touch(uint32_t number, const Keys& keys);
  int64_t remove(uint32_t number, const Keys& keys);
  int64_t clear(uint32_t number, int64_t most);
  std::vector<uint64_t> checksums(const std::vector<uint64_t>& slots) const;

  void record_removed(bool enabled);
  std::vector<RemovedKey> take_removed();

  const std::map<uint32_t, std::unique_ptr<Namespace>>& namespaces() const { return namespaces_; }
  uint64_t num_evicted() const { return num_evicted_; }
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
  uint64_t slot_number(const Slot& slot) const;
  uint64_t offset(const Slot& slot) const;

  Slot* take_slot(Namespace& space);
  void shrink(Namespace& space);
  void empty_another_slab(const Slot* own);
  void assign(Namespace& space);
  Slot& take_free_slot(Slab& slab);
  void fill(Slot& slot, const Key& key, uint64_t hash);
  void evict(Slot& slot);
  void forget(Slot& slot);
  void drop(Slot& slot);
  void free_slot(Slot& slot);
  void return_slab(Slab& slab);

  void pin(Slot& slot);
  void unpin(Slot& slot);
  void use(Slot& slot);
  void begin_busy(Slab& slab);
  void end_busy(Slab& slab);

  Record& record(const Slot& slot) const;
  void renew_version(Slot& slot);

  void check_slab(const Slab& slab) const;
  void check_slot(const Slab& slab, const Slot& slot) const;
  void check_counts() const;

  char* const memory_;
  const int64_t slab_bytes_;
  const KeyHash hash_;
  uint64_t version_;  // the last one given to a block
  uint64_t tick_ = 0;
  std::vector<Slab> slabs_;
  std::vector<uint32_t> free_slabs_;          // the last one is used first
  LinkedList<Slab, &Slab::idle_links> idle_;  // slabs of namespaces, without reserved or leased blocks
  KeyTable<Slot> table_;
  std::map<uint32_t, std::unique_ptr<Namespace>> namespaces_;
  uint32_t last_number_ = 0;
  uint64_t num_evicted_ = 0;
  std::vector<uint64_t> hashes_;  // of the keys of the current call
  std::vector<Slot*> found_;      // their committed blocks when the call began, or nullptr
  bool recording_ = false;
  std::vector<RemovedKey> removed_;
  size_t next_check_ = 0;
};

}  // namespace kvservice
