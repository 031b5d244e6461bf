// The prefix index: which block has the content with this chain hash.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "store/key_hash.h"
#include "store/key_table.h"

namespace kvservice {

constexpr int64_t kNoBlock = -1;

// Each hash has at most one block, and each block at most one hash.
class BlockIndex {
 public:
  // The seed is secret, because clients choose the content of blocks.
  BlockIndex(int64_t num_blocks, uint64_t seed0, uint64_t seed1) : hash_(seed0, seed1), slots_(num_blocks) {}
  BlockIndex(const BlockIndex&) = delete;
  BlockIndex& operator=(const BlockIndex&) = delete;

  size_t size() const { return table_.size(); }
  int64_t num_blocks() const { return static_cast<int64_t>(slots_.size()); }

  // Returns the block, or kNoBlock.
  int64_t find(const Key& key) const;

  // Appends the blocks of these chain hashes up to the first one that is missing.
  void match(const std::vector<Key>& keys, std::vector<int64_t>& blocks) const;

  // Returns false, and changes nothing, if the hash has a block already. Throws ArgumentError if the block has a hash.
  bool insert(const Key& key, int64_t block);

  // Returns false if the hash is not in the index.
  bool erase(const Key& key);

  // Returns the hash of a block, or nullptr.
  const Key* hash_of(int64_t block) const;

 private:
  struct Slot {
    Key key = {};
    bool used = false;
  };

  Slot* slot(const Key& key, uint64_t hash) const {
    return table_.find(hash, [&key](const Slot& slot) { return slot.key == key; });
  }

  KeyHash hash_;
  std::vector<Slot> slots_;  // one for each block
  KeyTable<Slot> table_;
};

}  // namespace kvservice
