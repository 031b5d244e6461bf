// Random calls of the store's parts, for a build with sanitizers. Usage: store_fuzz STEPS SEED
//
// Some calls are stopped between any two stores to memory that outlives the process: the memory is copied there, and
// another index recovers from each copy.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <unordered_map>
#include <vector>

#include "store/index.h"
#include "store/mirror.h"

using namespace kvservice;

namespace {

void expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

struct Item {
  uint64_t hash;
  uint64_t key;
};

// Hashes that differ in few bits: many keys have the same one, and clusters wrap around the end of a part.
void fuzz_table(int steps, std::mt19937_64& random) {
  KeyTable<Item> table;
  std::unordered_map<uint64_t, std::unique_ptr<Item>> expected;
  const auto find = [&](const Item& item) {
    return table.find(item.hash, [&](const Item& other) { return other.key == item.key; });
  };
  for (int step = 0; step < steps; ++step) {
    const uint64_t key = random() % 3000;
    const Item item = {(key % 3) << 56 | (key % 7 < 3 ? ~uint64_t{0} >> 8 : key / 40), key};
    const auto known = expected.find(key);
    expect(find(item) == (known == expected.end() ? nullptr : known->second.get()), "find() returns a wrong item");
    if (known == expected.end()) {
      auto added = std::make_unique<Item>(item);
      table.make_room(item.hash);
      table.insert(item.hash, *added);
      expected[key] = std::move(added);
    } else if (random() % 8 != 0) {
      table.erase(item.hash, *known->second);
      expected.erase(known);
    }
    expect(table.size() == expected.size(), "the size is wrong");
  }
  for (const auto& [key, item] : expected) expect(find(*item) == item.get(), "an item is lost");
}

constexpr int kNumKeys = 60;

std::vector<char> random_keys(std::mt19937_64& random) {
  std::vector<char> keys(random() % 12 * kKeyBytes);
  for (size_t i = 0; i < keys.size(); i += kKeyBytes) keys[i] = static_cast<char>(random() % kNumKeys);
  return keys;
}

std::vector<uint64_t> take(std::vector<std::vector<uint64_t>>& lists, std::mt19937_64& random) {
  if (lists.empty()) return {};
  std::swap(lists[random() % lists.size()], lists.back());
  std::vector<uint64_t> taken = std::move(lists.back());
  lists.pop_back();
  return taken;
}

constexpr int64_t kSlabBytes = 16384, kNumSlabs = 5, kStoreBytes = kSlabBytes * kNumSlabs;
constexpr std::array<int64_t, 4> kBlockBytes = {1000, 4096, 12288, 500};

// Page-aligned memory of the exact size, so that an access past the end is noticed.
class Memory {
 public:
  explicit Memory(int64_t size)
      : size_(static_cast<size_t>(size)), data_(static_cast<char*>(std::aligned_alloc(kPageBytes, size_)), &std::free) {
    std::memset(data_.get(), 0, size_);
  }
  Memory(const Memory& other) : Memory(static_cast<int64_t>(other.size_)) { *this = other; }
  Memory(Memory&&) = default;
  Memory& operator=(const Memory& other) {
    std::memcpy(data_.get(), other.data_.get(), size_);
    return *this;
  }
  char* data() const { return data_.get(); }

 private:
  size_t size_;
  std::unique_ptr<char, decltype(&std::free)> data_;
};

// The memory that is left of a process that was killed.
struct Remains {
  Memory shared{kStoreBytes}, kept{StoreIndex::kept_bytes(kStoreBytes, kSlabBytes)};
};

// A process that uses the memory, with the namespaces that it keeps and new ones in place of the others.
struct Process {
  Process(Remains& remains, uint64_t seed, const std::vector<NamespaceSize>& kept)
      : index(remains.shared.data(), kStoreBytes, kSlabBytes, seed, remains.kept.data()),
        recovered(index.recover(kept)),
        spaces(kept) {
    for (const int64_t size : kBlockBytes) {
      const auto same = [&](const NamespaceSize& space) { return space.block_bytes == size; };
      if (std::any_of(spaces.begin(), spaces.end(), same)) continue;
      spaces.push_back({index.open(size, 1 << 30), size, 1 << 30});
    }
    index.record_removed(true);
  }

  void check() {
    while (!index.check(1000)) {
    }
  }

  StoreIndex index;
  Recovered recovered;
  std::vector<NamespaceSize> spaces;
  std::vector<std::vector<uint64_t>> leases, reservations;
};

struct Block {
  size_t place;
  SlotState state;
  uint64_t version, checksum;

  bool operator==(const Block& other) const {
    return place == other.place && state == other.state && version == other.version && checksum == other.checksum;
  }
};

using Blocks = std::map<std::pair<uint32_t, char>, Block>;

// Returns the blocks with a key, by namespace and key, and checks that readers of the memory see their versions, or
// none if they may be `hidden`: about to be evicted.
Blocks blocks_in(const Remains& remains, bool hidden) {
  const KeptMemory kept(remains.kept.data(), {kStoreBytes, kSlabBytes});
  Blocks blocks;
  for (size_t slab = 0; slab < kNumSlabs; ++slab) {
    const uint32_t owner = kept.slabs[slab].owner;
    const auto* records = reinterpret_cast<const Record*>(remains.shared.data() + slab * kSlabBytes);
    for (size_t i = 0; owner != 0 && i < kept.slabs[slab].num_fresh; ++i) {
      const size_t place = (slab << kept.slot_bits) + i;
      const KeptSlot& slot = kept.slots[place];
      if (slot.state == SlotState::kFree || slot.state == SlotState::kCondemned) continue;
      const Block block = {place, slot.state, slot.version, slot.state == SlotState::kCommitted ? slot.checksum : 0};
      const bool added = blocks.emplace(std::make_pair(owner, *reinterpret_cast<const char*>(&slot.key)), block).second;
      expect(added, "two blocks have the same key");
      const uint64_t seen = records[i].version.load();
      expect(seen == slot.version || (hidden && seen == 0), "readers see another version");
      expect(slot.version <= kept.header->version, "a version could be given again");
    }
  }
  return blocks;
}

// Leases that clients have taken in the memory, of blocks of a namespace.
struct SharedBlocks {
  NamespaceSize space;
  std::vector<uint64_t> offsets, versions;
};

std::vector<SharedBlocks> shared;

StoreMirror mirror_of(const Remains& remains, const NamespaceSize& space) {
  return {remains.shared.data(), kStoreBytes, kSlabBytes, slab_layout(kSlabBytes, space.block_bytes), space.number};
}

void check_shared(const Remains& remains) {
  for (const SharedBlocks& blocks : shared) {
    const SlabLayout layout = slab_layout(kSlabBytes, blocks.space.block_bytes);
    for (size_t i = 0; i < blocks.offsets.size(); ++i) {
      const auto offset = static_cast<int64_t>(blocks.offsets[i]);
      const char* const slab = remains.shared.data() + offset / kSlabBytes * kSlabBytes;
      const int64_t index = (offset % kSlabBytes - layout.first_block) / layout.block_stride;
      expect(current_version(slab, index, layout.block_stride) == blocks.versions[i], "a leased block has changed");
    }
    expect(mirror_of(remains, blocks.space).renew(blocks.offsets, blocks.versions), "a lease has ended");
  }
}

void share(const Remains& remains, const NamespaceSize& space, const Keys& keys, std::mt19937_64& random) {
  if (shared.size() < 8) {
    StoreMirror mirror = mirror_of(remains, space);
    mirror.refresh(1 << 30);
    MirroredBlocks blocks = mirror.lease(keys.data, keys.size, random() % 2 == 0);
    shared.push_back({space, std::move(blocks.offsets), std::move(blocks.versions)});
  } else {
    std::swap(shared[random() % shared.size()], shared.back());
    mirror_of(remains, shared.back().space).release(shared.back().offsets, shared.back().versions);
    shared.pop_back();
  }
}

std::vector<Remains>* copies = nullptr;  // of the memory at each store of a call
Remains* used = nullptr;

// A process that finds this memory has all blocks that the call did not touch, and those that it touched are as before
// or as after it.
void check_copy(Remains copy, const Blocks& before, const Blocks& after, const std::vector<NamespaceSize>& spaces) {
  const Blocks now = blocks_in(copy, true);
  const auto same = [](const Blocks& blocks, const Blocks::value_type& item) {
    const auto found = blocks.find(item.first);
    return found != blocks.end() && found->second == item.second;
  };
  for (const auto& item : now) expect(same(before, item) || same(after, item), "a block is neither old nor new");
  for (const auto& item : before) {
    if (same(after, item)) expect(same(now, item), "a block is lost that the call did not touch");
  }
  Process next(copy, 7, spaces);
  next.check();
  blocks_in(copy, false);
  check_shared(copy);
  for (const auto& [number, block_bytes, quota_bytes] : spaces) {
    for (char name = 0; name < kNumKeys; ++name) {
      std::array<char, kKeyBytes> key{};
      key[0] = name;
      const auto found = now.find({number, name});
      const bool committed = found != now.end() && found->second.state == SlotState::kCommitted;
      const Acquired acquired = next.index.acquire(number, {key.data(), 1}, false, true);
      expect((acquired.found[0] != 0) == committed, "a block is not found after the restart");
      expect(!committed || acquired.versions[0] == found->second.version, "a block has another version");
    }
  }
}

void random_call(Process& process, std::mt19937_64& random) {
  StoreIndex& index = process.index;
  const NamespaceSize space = process.spaces[random() % process.spaces.size()];
  const uint32_t number = space.number;
  const std::vector<char> bytes = random_keys(random);
  const Keys keys = {bytes.data(), bytes.size() / kKeyBytes};
  switch (random() % 16) {
    case 0:
    case 1:
      process.leases.push_back(index.acquire(number, keys, random() % 2 == 0, random() % 2 == 0).slots);
      break;
    case 2:
    case 3:
    case 4:
      index.release(take(process.leases, random));
      break;
    case 5:
    case 6:
      process.reservations.push_back(index.reserve(number, keys).slots);
      break;
    case 7:
    case 8: {
      const std::vector<uint64_t> slots = take(process.reservations, random);
      index.commit(slots, slots);
      break;
    }
    case 9:
      index.abort(take(process.reservations, random));
      break;
    case 10:
      process.leases.push_back(take(process.reservations, random));
      index.condemn(process.leases.back());
      break;
    case 11:
      index.remove(number, keys);
      break;
    case 12:
      process.leases.push_back(index.coldest(number, static_cast<int64_t>(random() % 6), random() % 4 == 0).slots);
      break;
    case 13:
    case 14:
      share(*used, space, keys, random);
      break;
    default:
      index.clear(number, static_cast<int64_t>(random() % 3));
      index.evict_blocks(number, static_cast<int64_t>(random() % 3));
      index.empty_slabs(number, static_cast<int64_t>(random() % 2), static_cast<int64_t>(random() % 3));
      index.touch(number, keys);
      index.set_quota(number, static_cast<int64_t>(random() % 4000));
      index.take_removed();
  }
  process.check();
  check_shared(*used);
}

// Runs a call, and recovers from the memory at each of its stores. Returns one of the copies, or what is there now.
Remains stopped_call(Process& process, Remains& remains, std::mt19937_64& random) {
  std::vector<Remains> taken;
  const Blocks before = blocks_in(remains, false);
  copies = &taken;
  random_call(process, random);
  copies = nullptr;
  const Blocks after = blocks_in(remains, false);
  taken.push_back(remains);
  for (const Remains& copy : taken) check_copy(copy, before, after, process.spaces);
  return taken[random() % taken.size()];
}

void fuzz_index(int steps, std::mt19937_64& random) {
  Remains remains;
  used = &remains;
  auto process = std::make_unique<Process>(remains, random(), std::vector<NamespaceSize>());
  for (int step = 0; step < steps; ++step) {
    if (random() % 50 != 0) {
      random_call(*process, random);
      continue;
    }
    const Remains copy = stopped_call(*process, remains, random);
    if (random() % 2 != 0) continue;
    std::vector<NamespaceSize> spaces = process->spaces;
    if (random() % 3 == 0) {
      const auto lost = spaces.begin() + static_cast<ptrdiff_t>(random() % spaces.size());
      const auto of_it = [&](const SharedBlocks& blocks) { return blocks.space.number == lost->number; };
      shared.erase(std::remove_if(shared.begin(), shared.end(), of_it), shared.end());
      spaces.erase(lost);
    }
    process.reset();  // killed
    remains.shared = copy.shared;
    remains.kept = copy.kept;
    process = std::make_unique<Process>(remains, random(), spaces);
    process->index.abort(process->recovered.reserved);
    process->index.release(process->recovered.condemned);
    process->check();
  }
}

}  // namespace

void kvservice::before_store() {
  if (copies != nullptr) copies->push_back(*used);
}

int main(int, char** arguments) {
  const int steps = std::atoi(arguments[1]);
  std::mt19937_64 random(std::strtoull(arguments[2], nullptr, 10));
  fuzz_table(steps, random);
  fuzz_index(steps, random);
}
