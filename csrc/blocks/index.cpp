#include "blocks/index.h"

#include "errors.h"

namespace kvservice {

int64_t BlockIndex::find(const Key& key) const {
  const Slot* found = slot(key, hash_(key, 0));
  return found == nullptr ? kNoBlock : found - slots_.data();
}

void BlockIndex::match(const std::vector<Key>& keys, std::vector<int64_t>& blocks) const {
  if (keys.empty() || find(keys[0]) == kNoBlock) return;
  std::vector<uint64_t> hashes;
  hashes.reserve(keys.size());
  for (const Key& key : keys) {
    hashes.push_back(hash_(key, 0));
    table_.prefetch(hashes.back());
  }
  for (const uint64_t hash : hashes) {
    const Slot* candidate = table_.find(hash, [](const Slot&) { return true; });
    if (candidate != nullptr) __builtin_prefetch(candidate);
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    const Slot* found = slot(keys[i], hashes[i]);
    if (found == nullptr) return;
    blocks.push_back(found - slots_.data());
  }
}

bool BlockIndex::insert(const Key& key, int64_t block) {
  require(block >= 0 && block < num_blocks(), "blocks", "is outside the pool");
  const uint64_t hash = hash_(key, 0);
  if (slot(key, hash) != nullptr) return false;
  Slot& mine = slots_[static_cast<size_t>(block)];
  require(!mine.used, "blocks", "has a hash in the index");
  table_.make_room(hash);
  mine = {key, true};
  table_.insert(hash, mine);
  return true;
}

bool BlockIndex::erase(const Key& key) {
  const uint64_t hash = hash_(key, 0);
  Slot* found = slot(key, hash);
  if (found == nullptr) return false;
  table_.erase(hash, *found);
  found->used = false;
  return true;
}

const Key* BlockIndex::hash_of(int64_t block) const {
  require(block >= 0 && block < num_blocks(), "block", "is outside the pool");
  const Slot& mine = slots_[static_cast<size_t>(block)];
  return mine.used ? &mine.key : nullptr;
}

}  // namespace kvservice
