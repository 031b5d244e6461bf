#include "store/index.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <unordered_set>

#include "errors.h"

namespace kvservice {
namespace {

constexpr int kIndexBits = 32;  // a slot's number: slab, index
// The version of this layout of the kept memory.
constexpr uint64_t kMagic = 0x3165726F7453764B;
// Blocks, besides one for each key, and slabs with shared leases that a call passes over.
constexpr int64_t kPassedBlocks = 256, kPassedSlabs = 8;

// Returns different numbers for different `i`, from a seed.
uint64_t derived(uint64_t seed, uint64_t i) {
  const Key key = {{seed, i, 0, 0}};
  return KeyHash(seed, ~seed)(key, i);
}

KeptSizes checked_sizes(int64_t num_bytes, int64_t slab_bytes) {
  require(slab_bytes >= 2 * kPageBytes && slab_bytes % kPageBytes == 0, "slab_bytes",
          "is not a multiple of 4096, at least 8192");
  require(num_bytes >= slab_bytes, "num_bytes", "is less than a slab");
  require(num_bytes / slab_bytes < StoreIndex::kMaxSlabs, "num_bytes", "is too large for these slabs");
  return {num_bytes, slab_bytes};
}

}  // namespace

// The kept memory of an earlier process has its versions and numbers, which go on.
StoreIndex::StoreIndex(char* memory, int64_t num_bytes, int64_t slab_bytes, uint64_t seed, char* kept)
    : memory_(memory),
      slab_bytes_(slab_bytes),
      hash_(derived(seed, 0), derived(seed, 1)),
      kept_(kept, checked_sizes(num_bytes, slab_bytes)),
      slots_(static_cast<size_t>(kept_.num_slots)),
      slabs_(static_cast<size_t>(num_bytes / slab_bytes)),
      num_ready_(slabs_.size()) {
  require(reinterpret_cast<uintptr_t>(memory) % kRecordBytes == 0, "address", "is not a multiple of 64");
  require(reinterpret_cast<uintptr_t>(kept) % kPageBytes == 0, "kept", "is not a multiple of 4096");
  KeptHeader& header = *kept_.header;
  if (header.magic == 0) {
    keep(header.version, derived(seed, 2) >> 2);
    keep(header.num_slabs, uint64_t{slabs_.size()});
    keep(header.slab_bytes, static_cast<uint64_t>(slab_bytes));
    keep(header.magic, kMagic);
  } else {
    const bool same = header.num_slabs == slabs_.size() && header.slab_bytes == static_cast<uint64_t>(slab_bytes);
    require(header.magic == kMagic && same, "kept", "is of another store");
    keep(header.generation, header.generation + 1);
  }
  free_slabs_.reserve(slabs_.size());
  for (size_t i = slabs_.size(); i-- > 0;) {
    slabs_[i].number = static_cast<uint32_t>(i);
    slabs_[i].slots = &slots_[i << kept_.slot_bits];
    free_slabs_.push_back(slabs_[i].number);
  }
}

void StoreIndex::set_ready(int64_t num_bytes) {
  require(num_bytes >= 0 && static_cast<size_t>(num_bytes / slab_bytes_) <= slabs_.size(), "num_bytes",
          "is not in the memory");
  num_ready_ = static_cast<size_t>(num_bytes / slab_bytes_);
  free_slabs_.clear();
  for (size_t i = num_ready_; i-- > 0;) {
    if (slabs_[i].owner != nullptr) continue;
    records(slabs_[i])->block_stride.store(kNoStride, std::memory_order_release);
    free_slabs_.push_back(slabs_[i].number);
  }
}

int64_t StoreIndex::kept_bytes(int64_t num_bytes, int64_t slab_bytes) {
  return checked_sizes(num_bytes, slab_bytes).num_bytes;
}

uint32_t StoreIndex::open(int64_t block_bytes, int64_t quota_bytes) {
  require(block_bytes >= 1, "block_bytes", "is not positive");
  require(block_bytes <= slab_bytes_ - kPageBytes, "block_bytes", "is larger than a slab without its records");
  const uint64_t number = kept_.header->last_number + 1;
  keep(kept_.header->last_number, number);
  add_namespace({static_cast<uint32_t>(number), block_bytes, quota_bytes});
  return static_cast<uint32_t>(number);
}

void StoreIndex::add_namespace(const NamespaceSize& size) {
  Namespace& space = *(namespaces_[size.number] = std::make_unique<Namespace>());
  space.number = size.number;
  space.block_bytes = size.block_bytes;
  space.layout = slab_layout(slab_bytes_, size.block_bytes);
  set_quota(size.number, size.quota_bytes);
}

// The namespace shrinks to a lower quota as it stores more blocks.
// NOLINTNEXTLINE(readability-make-member-function-const): it changes the namespace
void StoreIndex::set_quota(uint32_t number, int64_t quota_bytes) {
  Namespace& space = find_namespace(number);
  space.max_blocks = quota_bytes / space.block_bytes;
}

void StoreIndex::close(uint32_t number) {
  if (find_namespace(number).counts.used() != 0) throw std::runtime_error("the namespace has blocks");
  namespaces_.erase(number);
}

Namespace& StoreIndex::find_namespace(uint32_t number) const {
  const auto found = namespaces_.find(number);
  if (found == namespaces_.end()) throw ArgumentError("namespace", "there is no namespace " + std::to_string(number));
  return *found->second;
}

// Finding. Slots and entries of the table are seldom in the cache. Those of a group of keys are requested before the
// first is needed, so that the cache misses overlap. Groups are small enough for the first-level cache.

const std::vector<Slot*>& StoreIndex::find_all(const Namespace& space, const Keys& keys) {
  constexpr size_t kGroup = 64;
  hashes_.resize(keys.size);
  found_.resize(keys.size);
  for (size_t begin = 0; begin < keys.size; begin += kGroup) {
    const size_t end = std::min(begin + kGroup, keys.size);
    for (size_t i = begin; i < end; ++i) {
      hashes_[i] = hash_(keys[i], space.number);
      table_.prefetch(hashes_[i]);
    }
    for (size_t i = begin; i < end; ++i) {
      const Slot* candidate = table_.find(hashes_[i], [](const Slot&) { return true; });
      if (candidate != nullptr) prefetch(*candidate);
    }
    for (size_t i = begin; i < end; ++i) found_[i] = find_committed(space, hashes_[i], keys[i]);
  }
  return found_;
}

void StoreIndex::prefetch(const std::vector<uint64_t>& slots) const {
  for (const uint64_t number : slots) {
    if (const Slot* slot = find_slot(number)) prefetch(*slot);
  }
}

void StoreIndex::prefetch(const Slot& slot) const {
  __builtin_prefetch(&slot);
  __builtin_prefetch(&kept(slot));
}

Slot* StoreIndex::find(const Namespace& space, uint64_t hash, const Key& key) const {
  return table_.find(hash, [&](const Slot& slot) { return kept(slot).key == key && slab_of(slot).owner == &space; });
}

Slot* StoreIndex::find_committed(const Namespace& space, uint64_t hash, const Key& key) const {
  Slot* slot = find(space, hash, key);
  return slot != nullptr && state(*slot) == SlotState::kCommitted ? slot : nullptr;
}

// Returns nullptr if the slot has never been used.
Slot* StoreIndex::find_slot(uint64_t number) const {
  const uint64_t slab_number = number >> kIndexBits, index = number & ((uint64_t{1} << kIndexBits) - 1);
  if (slab_number >= slabs_.size() || index >= slabs_[slab_number].num_fresh) return nullptr;
  return &slabs_[slab_number].slots[index];
}

Slot& StoreIndex::slot_at(uint64_t number) const {
  Slot* slot = find_slot(number);
  if (slot == nullptr || state(*slot) == SlotState::kFree) {
    throw std::runtime_error("slot " + std::to_string(number) + " has no block");
  }
  return *slot;
}

Slot& StoreIndex::reserved_at(uint64_t number) const {
  Slot& slot = slot_at(number);
  if (state(slot) != SlotState::kReserved) {
    throw std::runtime_error("slot " + std::to_string(number) + " is not reserved");
  }
  return slot;
}

uint64_t StoreIndex::slot_number(const Slot& slot) const {
  const Slab& slab = slab_of(slot);
  return uint64_t{slab.number} << kIndexBits | slab.index_of(slot);
}

uint64_t StoreIndex::offset(const Slot& slot) const {
  const Slab& slab = slab_of(slot);
  const SlabLayout& layout = slab.owner->layout;
  return static_cast<uint64_t>(slab.number * slab_bytes_ + layout.first_block +
                               slab.index_of(slot) * layout.block_stride);
}

// Calls.

std::vector<char> StoreIndex::lookup(uint32_t number, const Keys& keys) {
  const Namespace& space = find_namespace(number);
  std::vector<char> found;
  found.reserve(keys.size);
  for (const Slot* slot : find_all(space, keys)) found.push_back(static_cast<char>(slot != nullptr));
  return found;
}

Needed StoreIndex::needed(uint32_t number, const Keys& keys) {
  const Namespace& space = find_namespace(number);
  find_all(space, keys);
  std::unordered_set<uint64_t> missing;
  std::unordered_set<const Slot*> evictable;
  for (size_t i = 0; i < keys.size; ++i) {
    if (found_[i] != nullptr) {
      if (found_[i]->pins == 0) evictable.insert(found_[i]);
    } else if (find(space, hashes_[i], keys[i]) == nullptr) {
      missing.insert(hashes_[i]);
    }
  }
  return {static_cast<int64_t>(missing.size()), static_cast<int64_t>(evictable.size())};
}

Acquired StoreIndex::acquire(uint32_t number, const Keys& keys, bool leading_only, bool counted) {
  const Namespace& space = find_namespace(number);
  find_all(space, keys);
  Acquired result;
  result.found.resize(keys.size);
  for (std::vector<uint64_t>* array : {&result.slots, &result.offsets, &result.versions}) array->reserve(keys.size);
  for (size_t i = 0; i < keys.size; ++i) {
    Slot* slot = found_[i];
    if (slot == nullptr && leading_only) break;
    if (slot == nullptr) continue;
    pin(*slot);
    if (counted) count_use(*slot);
    result.found[i] = 1;
    result.slots.push_back(slot_number(*slot));
    result.offsets.push_back(offset(*slot));
    result.versions.push_back(kept(*slot).version);
  }
  return result;
}

// Pins up to `most` evictable blocks that were not offered since their last use, the coldest first.
Coldest StoreIndex::coldest(uint32_t number, int64_t most, bool newest_first) {
  Namespace& space = find_namespace(number);
  Coldest result;
  Slot* const first_cold = space.last_offered == nullptr ? space.evictable.oldest() : space.last_offered->links.newer;
  Slot* next = newest_first ? space.evictable.newest() : first_cold;
  for (int64_t count = 0; count < most && next != nullptr && !next->offered; ++count) {
    Slot& slot = *next;
    next = newest_first ? slot.links.older : slot.links.newer;
    pin(slot);
    slot.used = false;
    slot.offered = true;
    const KeptSlot& kept = this->kept(slot);
    result.keys.append(reinterpret_cast<const char*>(&kept.key), kKeyBytes);
    result.slots.push_back(slot_number(slot));
    result.offsets.push_back(offset(slot));
    result.checksums.push_back(kept.checksum);
    result.uses.push_back(kept.uses);
  }
  return result;
}

// Adds a lease to committed or condemned blocks.
void StoreIndex::lease(const std::vector<uint64_t>& slots) {
  for (const uint64_t number : slots) {
    Slot& slot = slot_at(number);
    if (state(slot) == SlotState::kReserved) {
      throw std::runtime_error("slot " + std::to_string(number) + " is reserved");
    }
    pin(slot);
  }
}

void StoreIndex::release(const std::vector<uint64_t>& slots) {
  prefetch(slots);
  for (auto number = slots.rbegin(); number != slots.rend(); ++number) {
    Slot& slot = slot_at(*number);
    if (slot.pins == 0) throw std::runtime_error("slot " + std::to_string(*number) + " is not leased");
    unpin(slot);
  }
}

Reserved StoreIndex::reserve(uint32_t number, const Keys& keys) {
  Namespace& space = find_namespace(number);
  passes_ = {kPassedBlocks + static_cast<int64_t>(keys.size), kPassedSlabs};
  // Blocks that are there must not be evicted to make room for the others.
  touch(number, keys);
  Reserved result;
  result.statuses.reserve(keys.size);
  for (size_t i = 0; i < keys.size; ++i) {
    const Key key = keys[i];
    if (const Slot* slot = find(space, hashes_[i], key)) {
      const bool reserved = state(*slot) == SlotState::kReserved;
      result.statuses.push_back(reserved ? PutStatus::kBeingWritten : PutStatus::kPresent);
      continue;
    }
    table_.make_room(hashes_[i]);
    Slot* slot = take_slot(space);
    if (slot == nullptr) {
      result.statuses.push_back(PutStatus::kNoRoom);
      continue;
    }
    fill(*slot, key, hashes_[i]);
    result.statuses.push_back(PutStatus::kDone);
    result.slots.push_back(slot_number(*slot));
    result.offsets.push_back(offset(*slot));
  }
  return result;
}

void StoreIndex::commit(const std::vector<uint64_t>& slots, const std::vector<uint64_t>& checksums) {
  prefetch(slots);
  for (size_t i = slots.size(); i-- > 0;) {
    Slot& slot = reserved_at(slots[i]);
    Slab& slab = slab_of(slot);
    Record& out = record(slot);
    out.checksum = checksums[i];
    out.state = kRecordCommitted;
    keep(kept(slot).checksum, checksums[i]);
    --slab.owner->counts.reserved;
    ++slab.owner->counts.committed;
    end_busy(slab);
    use(slot);
    keep(kept(slot).state, SlotState::kCommitted);
  }
}

void StoreIndex::abort(const std::vector<uint64_t>& slots) {
  for (const uint64_t number : slots) {
    Slot& slot = reserved_at(number);
    Slab& slab = slab_of(slot);
    table_.erase(slot.hash, slot);
    --slab.owner->counts.reserved;
    end_busy(slab);
    free_slot(slot);
  }
}

void StoreIndex::condemn(const std::vector<uint64_t>& slots) {
  for (const uint64_t number : slots) {
    Slot& slot = reserved_at(number);
    table_.erase(slot.hash, slot);
    keep(kept(slot).state, SlotState::kCondemned);
    slot.pins = 1;
    BlockCounts& counts = slab_of(slot).owner->counts;
    --counts.reserved;
    ++counts.condemned;
    ++counts.leased;
  }
}

int64_t StoreIndex::touch(uint32_t number, const Keys& keys) {
  Namespace& space = find_namespace(number);
  end_lingering();
  find_all(space, keys);
  int64_t count = 0;
  for (size_t i = keys.size; i-- > 0;) {
    Slot* slot = found_[i];
    if (slot == nullptr) continue;
    ++count;
    count_use(*slot);
    slot->used = true;
    if (slot->pins > 0) continue;  // the release counts as the use
    leave_evictable(*slot);
    use(*slot);
  }
  return count;
}

int64_t StoreIndex::remove(uint32_t number, const Keys& keys) {
  const Namespace& space = find_namespace(number);
  find_all(space, keys);
  int64_t count = 0;
  for (size_t i = 0; i < keys.size; ++i) {
    // A key that occurs twice is not there the second time.
    Slot* slot = find_committed(space, hashes_[i], keys[i]);
    if (slot == nullptr) continue;
    drop(*slot);
    ++count;
  }
  return count;
}

int64_t StoreIndex::clear(uint32_t number, int64_t most) {
  const Namespace& space = find_namespace(number);
  end_lingering();
  int64_t count = 0;
  for (; count < most; ++count) {
    Slot* slot = space.evictable.empty() ? space.leased.oldest() : space.evictable.oldest();
    if (slot == nullptr) break;
    drop(*slot);
  }
  return count;
}

// Evicts up to `most` blocks, the least recently used first. Returns how many.
int64_t StoreIndex::evict_blocks(uint32_t number, int64_t most) {
  Namespace& space = find_namespace(number);
  end_lingering();
  passes_ = {kPassedBlocks + most, 0};
  int64_t count = 0;
  while (count < most && shrink(space)) ++count;
  return count;
}

// Evicts the blocks of slabs without reserved or leased ones, the least recently used slab first, until `most_slabs`
// are empty or `most_blocks` were evicted.
Emptied StoreIndex::empty_slabs(uint32_t number, int64_t most_slabs, int64_t most_blocks) {
  const Namespace& space = find_namespace(number);
  end_lingering();
  passes_ = {0, kPassedSlabs};
  Emptied done{};
  Slab* next = idle_.oldest();
  while (next != nullptr && done.slabs < most_slabs && done.blocks < most_blocks) {
    Slab& slab = *next;
    next = slab.idle_links.newer;
    if (slab.owner != &space) continue;
    if (hide(slab)) {
      ++done.slabs;
      done.blocks += slab.num_used;
      empty(slab);
    } else if (passes_.slabs-- <= 0) {
      break;
    }
  }
  return done;
}

std::vector<uint64_t> StoreIndex::checksums(const std::vector<uint64_t>& slots) const {
  std::vector<uint64_t> result;
  result.reserve(slots.size());
  for (const uint64_t number : slots) result.push_back(kept(slot_at(number)).checksum);
  return result;
}

Places StoreIndex::places(const std::vector<uint64_t>& slots) const {
  Places result;
  for (const uint64_t number : slots) {
    const Slot& slot = slot_at(number);
    result.keys.append(reinterpret_cast<const char*>(&kept(slot).key), kKeyBytes);
    result.offsets.push_back(offset(slot));
  }
  return result;
}

void StoreIndex::record_removed(bool enabled) {
  recording_ = enabled;
  removed_.clear();
}

std::vector<RemovedKey> StoreIndex::take_removed() {
  std::vector<RemovedKey> taken;
  taken.swap(removed_);
  return taken;
}

}  // namespace kvservice
