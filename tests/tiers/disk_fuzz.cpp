// Random calls of the index of the disk tier, for a build with sanitizers. Usage: disk_fuzz STEPS SEED
//
// The disk is simulated: writes end in any order, some fail, and when the process is killed each write in flight has
// changed any part of what it writes. Then another index recovers from the disk. A value that was stored must be found,
// every value found must be whole, and none may be found whose removal was complete.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "disk/index.h"

using kvservice::Key;
using namespace kvservice::disk;

namespace {

void expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

constexpr int64_t kSlabSectors = 64, kNumSlabs = 5, kTornBytes = 512;
constexpr Geometry kGeometry = {kSlabSectors * kSectorBytes, kNumSlabs};
constexpr std::array<int64_t, 5> kSizes = {1000, 4096, 20000, 30 * kSectorBytes, kSlabSectors * kSectorBytes};
constexpr int kNumKeys = 90, kNumSpaces = 7;

SpaceName space_name(int space) {
  SpaceName name{};
  name.digest[0] = static_cast<char>(space);
  name.num_bytes = kSizes[static_cast<size_t>(space) % kSizes.size()];
  return name;
}

Key key_of(int number) { return {{static_cast<uint64_t>(number), 1, 2, 3}}; }

// Names a value and its bytes: a sector of it contains this number.
int tag_of(int space, int key) { return 1 + space * kNumKeys + key; }

struct Disk {
  std::vector<char> records = std::vector<char>(kGeometry.region_bytes() * kNumSlabs);
  std::vector<int> data = std::vector<int>(kSlabSectors * kNumSlabs);
};

// A write of a value, or of a sector of records.
struct Write {
  Slot* slot = nullptr;
  int tag = 0;
  size_t first = 0, count = 0;  // of the data's sectors
  SectorWrite sector;
  std::vector<char> image;
};

struct Reader {
  Slot* slot;
  int tag;
  size_t first, count;
};

struct Removal {
  uint64_t change;
  std::set<int> tags;  // those that were not put again
};

class Process {
 public:
  Process(Disk& disk, std::mt19937_64& random, bool fails)
      : disk_(disk), random_(random), fails_(fails), index_(kGeometry, random()) {
    for (uint32_t slab = 0; slab < kNumSlabs; ++slab) {
      const char* region = disk.records.data() + kGeometry.sector_at(slab, 0);
      SlabHeader header{};
      std::memcpy(&header, region, sizeof(header));
      if (!DiskIndex::is_valid(kGeometry, slab, header)) continue;
      std::vector<Record> records(static_cast<size_t>(DiskIndex::num_sectors(kGeometry, header) * kSectorRecords));
      std::memcpy(records.data(), region + kSectorBytes, records.size() * sizeof(Record));
      index_.recover_slab(header, records.data(), DiskIndex::valid_records(kGeometry, header, records.data()));
    }
    index_.end_recovery();
    index_.check();
  }

  // The values that are found, all of which must be whole.
  std::set<int> found() {
    std::set<int> tags;
    for (int space = 0; space < kNumSpaces; ++space) {
      for (int key = 0; key < kNumKeys; ++key) {
        if (!index_.contains(space_name(space), key_of(key))) continue;
        Slot* slot = index_.pin(space_name(space), key_of(key));
        expect(is_whole(place(*slot, space), tag_of(space, key)), "a value is torn");
        expect(slot->value_checksum == static_cast<uint64_t>(tag_of(space, key)), "a value has another checksum");
        index_.unpin(*slot, DiskIndex::Read::kRight);
        tags.insert(tag_of(space, key));
      }
    }
    return tags;
  }

  // A disk that works again gets all of its room back.
  void mend() {
    fails_ = false;
    for (int i = 0; index_.counts().broken_bytes > 0; ++i) {
      expect(i < 2000, "room is never used again");
      index_.mend(stride_of(space_name(i % kNumSpaces).num_bytes));
      drain();
    }
  }

  const std::set<int>& gone() const { return gone_; }
  void keep_gone(std::set<int> gone) { gone_ = std::move(gone); }

  void step() {
    switch (random_() % 16) {
      case 0:
      case 1:
      case 2:
      case 3:
      case 4:
        put(random_space(), random_key());
        break;
      case 5:
      case 6:
        take_sector();
        break;
      case 7:
      case 8:
      case 9:
      case 10:
        end_write();
        break;
      case 11:
        for (int i = 0; i < 5; ++i) read(random_space(), random_key());
        break;
      case 12:
      case 13:
        end_read();
        break;
      case 14:
        if (random_() % 4 == 0) remove();
        if (random_() % 16 == 0) index_.mend(stride_of(space_name(random_space()).num_bytes));
        break;
      default:
        if (random_() % 64 == 0) clear(random_space());
    }
    end_removals();
    if (random_() % 32 == 0) index_.check();
  }

  // Ends all that is in flight. Afterwards nothing is left to be written.
  void drain() {
    while (!readers_.empty()) end_read();
    for (;;) {
      while (take_sector()) {
      }
      if (writes_.empty()) break;
      end_write();
    }
    expect(!index_.has_sectors(), "a sector is never written");
    end_removals();
    expect(removals_.empty(), "a removal never ends");
    index_.check();
  }

  // Each write in flight has changed any part.
  void kill() {
    for (const Write& write : writes_) apply(write, true);
  }

 private:
  int random_space() { return static_cast<int>(random_() % kNumSpaces); }
  // A few keys are used more often, so that they are evicted, put again and removed while they are read.
  int random_key() { return static_cast<int>(random_() % (random_() % 2 == 0 ? kNumKeys : 6)); }

  std::pair<size_t, size_t> place(const Slot& slot, int space) const {
    const int64_t file_offset = index_.offset_in_file(slot) - kGeometry.slab_at(slot.slab);
    const int64_t first = slot.slab * kSlabSectors + file_offset / kSectorBytes;
    return {static_cast<size_t>(first), static_cast<size_t>(stride_of(space_name(space).num_bytes) / kSectorBytes)};
  }

  bool is_whole(std::pair<size_t, size_t> place, int tag) const {
    for (size_t i = 0; i < place.second; ++i) {
      if (disk_.data[place.first + i] != tag) return false;
    }
    return true;
  }

  void put(int space, int key) {
    const auto checksum = static_cast<uint64_t>(tag_of(space, key));
    const Begin begin = index_.begin_put(space_name(space), key_of(key), checksum, random_() % 4 != 0);
    if (begin.status != Begun::kBegun) return;
    gone_.erase(tag_of(space, key));
    for (Removal& removal : removals_) removal.tags.erase(tag_of(space, key));
    Write write;
    write.slot = begin.slot;
    write.tag = tag_of(space, key);
    std::tie(write.first, write.count) = place(*begin.slot, space);
    writes_.push_back(std::move(write));
  }

  bool take_sector() {
    Write write;
    write.image.resize(kSectorBytes);
    if (!index_.take_sector(write.sector, write.image.data())) return false;
    for (const Write& other : writes_) {
      const bool same =
          other.slot == nullptr && other.sector.slab == write.sector.slab && other.sector.sector == write.sector.sector;
      expect(!same, "a sector is written twice at a time");
    }
    writes_.push_back(std::move(write));
    return true;
  }

  void apply(const Write& write, bool partly) {
    const auto applied = [&] { return !partly || random_() % 2 == 0; };
    if (write.slot != nullptr) {
      for (size_t i = 0; i < write.count; ++i) {
        if (applied()) disk_.data[write.first + i] = write.tag;
      }
      return;
    }
    char* to = disk_.records.data() + kGeometry.sector_at(write.sector.slab->number, write.sector.sector);
    for (int64_t at = 0; at < kSectorBytes; at += kTornBytes) {
      if (applied()) std::memcpy(to + at, write.image.data() + at, kTornBytes);
    }
  }

  void end_write() {
    if (writes_.empty()) return;
    std::swap(writes_[random_() % writes_.size()], writes_.back());
    const Write write = std::move(writes_.back());
    writes_.pop_back();
    const bool done = !fails_ || random_() % 100 != 0;
    apply(write, !done);
    if (write.slot != nullptr) {
      index_.end_write(*write.slot, done);
      return;
    }
    std::vector<Recorded> recorded;
    index_.end_sector(write.sector, done, recorded);
    for (const Recorded& one : recorded) {
      expect((one.slot->state == SlotState::kStored) == one.stored, "a value is stored or is not");
    }
  }

  void read(int space, int key) {
    Slot* slot = index_.pin(space_name(space), key_of(key));
    if (slot == nullptr) return;
    const auto [first, count] = place(*slot, space);
    readers_.push_back({slot, tag_of(space, key), first, count});
  }

  void end_read() {
    if (readers_.empty()) return;
    std::swap(readers_[random_() % readers_.size()], readers_.back());
    const Reader reader = readers_.back();
    readers_.pop_back();
    expect(is_whole({reader.first, reader.count}, reader.tag), "a value is overwritten while it is read");
    const bool failed = fails_ && random_() % 50 == 0;
    index_.unpin(*reader.slot, failed ? DiskIndex::Read::kFailed : DiskIndex::Read::kRight);
  }

  void remove() {
    const int space = random_space();
    Removal removal{};
    for (int i = 0; i < 5; ++i) {
      const int key = random_key();
      index_.remove(space_name(space), key_of(key));
      expect(!index_.contains(space_name(space), key_of(key)), "a removed value is found");
      removal.tags.insert(tag_of(space, key));
    }
    index_.retry_sectors();
    removal.change = index_.last_change();
    removals_.push_back(removal);
  }

  void clear(int space) {
    std::vector<uint32_t> cleared;
    std::vector<Slot*> unrecorded;
    index_.clear(space_name(space), cleared);
    Removal removal{};
    for (int key = 0; key < kNumKeys; ++key) {
      expect(!index_.contains(space_name(space), key_of(key)), "a cleared value is found");
      removal.tags.insert(tag_of(space, key));
    }
    for (const uint32_t number : cleared) {
      for (uint32_t slab = 0; slab < kNumSlabs; ++slab) index_.sweep(number, slab, unrecorded);
    }
    index_.retry_sectors();
    removal.change = index_.last_change();
    removals_.push_back(removal);
  }

  // A removal is complete when its changes are on disk, unless a sector could not be written.
  void end_removals() {
    while (!removals_.empty() && removals_.front().change < index_.oldest_change()) {
      const std::set<int>& tags = removals_.front().tags;
      if (!index_.has_failed_sectors()) gone_.insert(tags.begin(), tags.end());
      removals_.erase(removals_.begin());
    }
  }

  Disk& disk_;
  std::mt19937_64& random_;
  bool fails_;
  DiskIndex index_;
  std::vector<Write> writes_;
  std::vector<Reader> readers_;
  std::vector<Removal> removals_;
  std::set<int> gone_;
};

void fuzz(int steps, std::mt19937_64& random) {
  Disk disk;
  std::set<int> gone;
  uint64_t num_found = 0;
  for (int step = 0; step < steps;) {
    Process process(disk, random, random() % 2 == 0);
    process.keep_gone(gone);
    const int until = step + 1 + static_cast<int>(random() % 3000);
    for (; step < until; ++step) process.step();
    if (random() % 4 == 0) process.drain();
    if (random() % 4 == 0) {
      process.drain();
      process.mend();
    }
    const std::set<int> before = process.found();
    process.kill();
    gone = process.gone();
    Process next(disk, random, false);
    const std::set<int> after = next.found();
    for (const int tag : before) expect(after.count(tag) == 1, "a stored value is lost");
    for (const int tag : after) expect(gone.count(tag) == 0, "a removed value is back");
    next.drain();
    num_found += after.size();
  }
  expect(num_found > 0, "nothing was ever stored");
  std::printf("%llu values found after kills\n", static_cast<unsigned long long>(num_found));
}

}  // namespace

int main(int, char** arguments) {
  std::mt19937_64 random(std::strtoull(arguments[2], nullptr, 10));
  fuzz(std::atoi(arguments[1]), random);
}
