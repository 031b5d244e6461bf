#include "store/mirror.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <utility>

#include "errors.h"
#include "store/shared_lease.h"

namespace kvservice {
namespace {

// Changes that are noted, before it is simpler to begin anew.
constexpr size_t kMostChanges = size_t{1} << 20;

// As many keys are looked up at a time, so that their accesses to memory overlap.
constexpr size_t kTogether = 16;

// Keys are chosen by all clients of the store, who must not be able to choose collisions.
KeyHash secret_hash() {
  std::random_device random;
  const auto word = [&] { return uint64_t{random()} << 32 | random(); };
  const uint64_t first = word();
  return {first, word()};
}

}  // namespace

StoreMirror::StoreMirror(char* memory, int64_t num_bytes, int64_t slab_bytes, const SlabLayout& layout,
                         uint32_t namespace_number)
    : memory_(memory),
      slab_bytes_(slab_bytes),
      layout_(layout),
      namespace_number_(namespace_number),
      hash_(secret_hash()),
      slabs_(static_cast<size_t>(num_bytes / slab_bytes)) {
  require(layout.blocks_per_slab <= slab_bytes / kRecordBytes && layout.first_block <= slab_bytes &&
              layout.first_block >= layout.blocks_per_slab * kRecordBytes &&
              layout.block_stride <= (slab_bytes - layout.first_block) / layout.blocks_per_slab,
          "blocks_per_slab", "does not fit into a slab");
}

size_t StoreMirror::refresh(int64_t most) {
  const std::lock_guard looking(looking_);
  for (size_t count = 0; count < slabs_.size() && most > 0; ++count, next_ = (next_ + 1) % slabs_.size()) {
    look_at(static_cast<uint32_t>(next_));
    most -= static_cast<int64_t>(slabs_[next_].size()) + 1;
  }
  const std::lock_guard lock(mutex_);
  return table_.size();
}

void StoreMirror::look_at(uint32_t slab) {
  const Record* const first = records(slab);
  std::vector<Block>& blocks = slabs_[slab];
  const bool is_own =
      first->block_stride.load(std::memory_order_acquire) == static_cast<uint32_t>(layout_.block_stride) &&
      first->namespace_number == namespace_number_;
  if (!is_own && blocks.empty()) return;
  if (!is_own || blocks.empty()) {
    const std::lock_guard lock(mutex_);
    for (Block& block : blocks) forget(block);
    std::vector<Block>(is_own ? static_cast<size_t>(layout_.blocks_per_slab) : 0).swap(blocks);
  }
  for (uint32_t i = 0; i < blocks.size(); ++i) {
    Block& block = blocks[i];
    const uint64_t version = first[i].version.load(std::memory_order_acquire);
    // A block that was removed keeps its version while it is leased.
    if (version == block.version && (version == 0 || first[i].state == kRecordCommitted)) continue;
    Key key;
    std::memcpy(&key, first[i].key, sizeof(key));
    const Block seen = {version, hash_(key, namespace_number_), slab, i};
    const bool is_readable = version != 0 && is_there(seen, key);  // otherwise it is being written
    const std::lock_guard lock(mutex_);
    forget(block);
    if (is_readable) add(seen, key);
  }
}

void StoreMirror::add(const Block& seen, const Key& key) {
  Block& block = slabs_[seen.slab][seen.index] = seen;
  table_.make_room(block.hash);
  table_.insert(block.hash, block);
  if (!records_) return;
  keys_[seen.slab].resize(slabs_[seen.slab].size());
  keys_[seen.slab][seen.index] = key;
  note(changes_.come, key);
}

void StoreMirror::note(std::vector<Key>& list, const Key& key) {
  list.push_back(key);
  if (changes_.come.size() + changes_.gone.size() <= kMostChanges) return;
  records_ = false;
  keys_.clear();
  changes_ = {};
}

void StoreMirror::forget(Block& block) {
  if (block.version == 0) return;
  table_.erase(block.hash, block);
  block.version = 0;
  if (records_) note(changes_.gone, Key(keys_[block.slab][block.index]));
}

MirrorChanges StoreMirror::take_changes() {
  const std::lock_guard lock(mutex_);
  MirrorChanges taken;
  if (records_) {
    std::swap(taken, changes_);
    // A key that has come may have gone since.
    const auto is_gone = [&](const Key& key) { return find(key, hash_(key, namespace_number_)) == nullptr; };
    taken.come.erase(std::remove_if(taken.come.begin(), taken.come.end(), is_gone), taken.come.end());
    return taken;
  }
  taken.is_all = records_ = true;
  keys_.resize(slabs_.size());
  for (size_t slab = 0; slab < slabs_.size(); ++slab) {
    keys_[slab].resize(slabs_[slab].size());
    for (const Block& block : slabs_[slab]) {
      if (block.version == 0) continue;
      Key& key = keys_[slab][block.index];
      std::memcpy(&key, records(block.slab)[block.index].key, sizeof(key));
      if (is_there(block, key)) taken.come.push_back(key);
    }
  }
  return taken;
}

const StoreMirror::Block* StoreMirror::find(const Key& key, uint64_t hash) const {
  return table_.find(hash, [&](const Block& block) { return is_there(block, key); });
}

// Whether a record has this version and key, and its block can be read.
bool StoreMirror::is_there(const Block& block, const Key& key) const {
  const Record& record = records(block.slab)[block.index];
  const bool same = record.namespace_number == namespace_number_ && record.state == kRecordCommitted &&
                    std::memcmp(record.key, &key, sizeof(key)) == 0;
  return same &&
         current_version(memory_ + block.slab * slab_bytes_, block.index, layout_.block_stride) == block.version;
}

MirroredBlocks StoreMirror::find(const char* keys, size_t num_keys, bool leading_only) {
  return find_all(keys, num_keys, leading_only, false);
}

MirroredBlocks StoreMirror::lease(const char* keys, size_t num_keys, bool leading_only) {
  return find_all(keys, num_keys, leading_only, true);
}

// Loads what find_all() reads for these keys into the cache, most of which was last used long ago. Sets their hashes.
void StoreMirror::prefetch(const char* keys, size_t num_keys, uint64_t* hashes) const {
  std::array<const Block*, kTogether> blocks;
  for (size_t i = 0; i < num_keys; ++i) {
    hashes[i] = hash_(Key::load(keys + i * kKeyBytes), namespace_number_);
    table_.prefetch(hashes[i]);
  }
  for (size_t i = 0; i < num_keys; ++i) {
    blocks[i] = table_.find(hashes[i], [](const Block&) { return true; });
    __builtin_prefetch(blocks[i]);
  }
  for (size_t i = 0; i < num_keys; ++i) {
    if (blocks[i] != nullptr) __builtin_prefetch(&records(blocks[i]->slab)[blocks[i]->index], 1);
  }
}

MirroredBlocks StoreMirror::find_all(const char* keys, size_t num_keys, bool leading_only, bool leases) {
  MirroredBlocks result;
  result.found.resize(num_keys);
  const std::lock_guard lock(mutex_);
  const uint32_t began = leases ? SharedLease::clock() : 0;
  std::array<uint64_t, kTogether> hashes;
  size_t first = 0, num_prefetched = 0;
  for (size_t i = 0; i < num_keys; ++i) {
    if (i == num_prefetched) {
      // Most prompts are new: without the first block, nothing else is looked at.
      const size_t count = std::min(num_keys - i, leading_only && i == 0 ? 1 : kTogether);
      prefetch(keys + i * kKeyBytes, count, hashes.data());
      first = i;
      num_prefetched += count;
    }
    const Key key = Key::load(keys + i * kKeyBytes);
    const Block* block = find(key, hashes[i - first]);
    if (block != nullptr && leases) {
      SharedLease lease(records(block->slab)[block->index].shared_lease);
      const uint32_t before = lease.take(began);
      std::atomic_thread_fence(std::memory_order_seq_cst);
      if (before == SharedLease::kFull) {
        block = nullptr;
      } else if (!is_there(*block, key)) {
        lease.undo(before, began);
        block = nullptr;
      }
    }
    if (block == nullptr) {
      if (leading_only) break;
      continue;
    }
    result.found[i] = 1;
    result.offsets.push_back(
        static_cast<uint64_t>(block->slab * slab_bytes_ + layout_.first_block + block->index * layout_.block_stride));
    result.versions.push_back(block->version);
  }
  // If the process was stopped meanwhile, its leases end when their time is over, or have ended.
  if (leases && SharedLease::is_long_ago(began)) return {std::vector<char>(num_keys), {}, {}};
  return result;
}

bool StoreMirror::renew(const std::vector<uint64_t>& offsets, const std::vector<uint64_t>& versions) {
  require(offsets.size() == versions.size(), "versions", "is not one per block");
  const uint32_t began = SharedLease::clock();
  bool all = true;
  for (size_t i = 0; i < offsets.size(); ++i) {
    Record* const record = record_of(offsets[i], versions[i]);
    all = record != nullptr && SharedLease(record->shared_lease).renew(began) && all;
  }
  return all && !SharedLease::is_long_ago(began);
}

void StoreMirror::release(const std::vector<uint64_t>& offsets, const std::vector<uint64_t>& versions) {
  require(offsets.size() == versions.size(), "versions", "is not one per block");
  for (size_t i = 0; i < offsets.size(); ++i) {
    if (Record* const record = record_of(offsets[i], versions[i])) SharedLease(record->shared_lease).release();
  }
}

// Returns nullptr if the block has gone: there may be bytes of another block where its record was.
Record* StoreMirror::record_of(uint64_t offset, uint64_t version) const {
  Record& record = record_at(offset);
  const uint64_t slab = offset / static_cast<uint64_t>(slab_bytes_);
  const char* const start = memory_ + slab * static_cast<uint64_t>(slab_bytes_);
  const int64_t index = &record - reinterpret_cast<const Record*>(start);
  return current_version(start, index, layout_.block_stride) == version ? &record : nullptr;
}

Record& StoreMirror::record_at(uint64_t offset) const {
  const auto slab_bytes = static_cast<uint64_t>(slab_bytes_), first = static_cast<uint64_t>(layout_.first_block);
  const uint64_t slab = offset / slab_bytes, in_slab = offset % slab_bytes;
  require(slab < slabs_.size() && in_slab >= first, "offsets", "has one that is not of a block");
  const uint64_t index = (in_slab - first) / static_cast<uint64_t>(layout_.block_stride);
  require(index < static_cast<uint64_t>(layout_.blocks_per_slab), "offsets", "has one that is not of a block");
  return reinterpret_cast<Record*>(memory_ + slab * slab_bytes)[index];
}

}  // namespace kvservice
