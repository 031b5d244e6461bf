// Random calls of the store's parts, for a build with sanitizers. Usage: store_fuzz STEPS SEED
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <unordered_map>
#include <vector>

#include "store/index.h"

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

std::vector<char> random_keys(std::mt19937_64& random) {
  std::vector<char> keys(random() % 12 * kKeyBytes);
  for (size_t i = 0; i < keys.size(); i += kKeyBytes) keys[i] = static_cast<char>(random() % 60);
  return keys;
}

std::vector<uint64_t> take(std::vector<std::vector<uint64_t>>& lists, std::mt19937_64& random) {
  if (lists.empty()) return {};
  std::swap(lists[random() % lists.size()], lists.back());
  std::vector<uint64_t> taken = std::move(lists.back());
  lists.pop_back();
  return taken;
}

void fuzz_index(int steps, std::mt19937_64& random) {
  constexpr int64_t kSlabBytes = 16384, kNumSlabs = 5;
  // The exact size, so that an access past the end is noticed.
  const std::unique_ptr<char, decltype(&std::free)> memory(
      static_cast<char*>(std::aligned_alloc(kPageBytes, kSlabBytes * kNumSlabs)), &std::free);
  StoreIndex index(memory.get(), kSlabBytes * kNumSlabs, kSlabBytes, random());
  for (const int64_t size : {1000, 4096, 12288, 500}) index.open(size, size == 500 ? 2000 : 1 << 30);
  index.record_removed(true);
  std::vector<std::vector<uint64_t>> leases, reservations;
  for (int step = 0; step < steps; ++step) {
    const auto number = static_cast<uint32_t>(random() % 4 + 1);
    const std::vector<char> bytes = random_keys(random);
    const Keys keys = {bytes.data(), bytes.size() / kKeyBytes};
    switch (random() % 13) {
      case 0:
      case 1:
        leases.push_back(index.acquire(number, keys, random() % 2 == 0).slots);
        break;
      case 2:
      case 3:
      case 4:
        index.release(take(leases, random));
        break;
      case 5:
      case 6:
        reservations.push_back(index.reserve(number, keys).slots);
        break;
      case 7:
      case 8: {
        const std::vector<uint64_t> slots = take(reservations, random);
        index.commit(slots, slots);
        break;
      }
      case 9:
        index.abort(take(reservations, random));
        break;
      case 10:
        leases.push_back(take(reservations, random));
        index.condemn(leases.back());
        break;
      case 11:
        index.remove(number, keys);
        break;
      default:
        index.clear(number, static_cast<int64_t>(random() % 3));
        index.touch(number, keys);
        index.set_quota(number, static_cast<int64_t>(random() % 4000));
        index.take_removed();
    }
    while (!index.check(1000)) {
    }
  }
}

}  // namespace

int main(int, char** arguments) {
  const int steps = std::atoi(arguments[1]);
  std::mt19937_64 random(std::strtoull(arguments[2], nullptr, 10));
  fuzz_table(steps, random);
  fuzz_index(steps, random);
}
