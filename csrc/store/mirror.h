// A client's view of the blocks of a namespace in the mapped memory of a store: it finds them, and leases them, without
// the daemon.
//
// refresh() looks at the records of blocks and notes their keys, in a table of this process. What is found there is
// compared with the record again, so that nothing is found that has gone; what has come since the last look is not
// found yet. For several threads.
//
// It can also note which keys have come and gone between two looks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "store/key_hash.h"
#include "store/key_table.h"
#include "store/layout.h"

namespace kvservice {

struct MirroredBlocks {
  std::vector<char> found;  // per key: 1 or 0
  std::vector<uint64_t> offsets, versions;
};

// Keys, in any order. Those that have come are there; one that is in both went first. `is_all`: all blocks there are
// have come, and nothing is known of those that have gone.
struct MirrorChanges {
  std::vector<Key> gone, come;
  bool is_all = false;
};

class StoreMirror {
 public:
  // `layout` is that of the namespace's slabs.
  StoreMirror(char* memory, int64_t num_bytes, int64_t slab_bytes, const SlabLayout& layout, uint32_t namespace_number);

  // Looks at the next slabs, until that were `most` records or all; a slab counts as one record more. Returns the
  // number of blocks in the table.
  size_t refresh(int64_t most);

  // Finds the blocks of `num_keys` keys, or with `leading_only` those before the first that is missing.
  MirroredBlocks find(const char* keys, size_t num_keys, bool leading_only);

  // The same, and leases them until they are released or were not renewed for some time (shared_lease.h).
  MirroredBlocks lease(const char* keys, size_t num_keys, bool leading_only);
  // Renews leases of blocks with these versions. Returns whether all of them have lasted.
  bool renew(const std::vector<uint64_t>& offsets, const std::vector<uint64_t>& versions);
  void release(const std::vector<uint64_t>& offsets, const std::vector<uint64_t>& versions);

  // Returns what refresh() has noted since the last call. At the first call, and after too many changes, that are all
  // keys.
  MirrorChanges take_changes();

 private:
  struct Block {
    uint64_t version = 0;  // 0: it is not in the table
    uint64_t hash = 0;
    uint32_t slab = 0, index = 0;
  };

  Record* records(uint32_t slab) const { return reinterpret_cast<Record*>(memory_ + slab * slab_bytes_); }
  Record& record_at(uint64_t offset) const;
  Record* record_of(uint64_t offset, uint64_t version) const;
  void look_at(uint32_t slab);
  void add(const Block& seen, const Key& key);
  void note(std::vector<Key>& list, const Key& key);
  void forget(Block& block);
  const Block* find(const Key& key, uint64_t hash) const;
  void prefetch(const char* keys, size_t num_keys, uint64_t* hashes) const;
  bool is_there(const Block& block, const Key& key) const;
  MirroredBlocks find_all(const char* keys, size_t num_keys, bool leading_only, bool leases);

  char* const memory_;
  const int64_t slab_bytes_;
  const SlabLayout layout_;
  const uint32_t namespace_number_;
  const KeyHash hash_;
  // One thread looks at a time, and holds the other mutex only while it changes what others read.
  std::mutex looking_, mutex_;
  std::vector<std::vector<Block>> slabs_;  // empty: the slab was not of this namespace
  KeyTable<Block> table_;
  size_t next_ = 0;
  bool records_ = false;
  std::vector<std::vector<Key>> keys_;  // of the blocks of each slab, while changes are noted
  MirrorChanges changes_;
};

}  // namespace kvservice
