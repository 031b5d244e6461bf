// The files of the disk tier, in a directory of its own. Little-endian.
//
//   lock         locked by the process that uses the directory
//   meta         a Meta
//   records      per slab a region: a sector with a SlabHeader, then sectors of records
//   data-0 .. 7  slabs of values; slab s is number s / kDataFiles in file s % kDataFiles
//
// A slab has slots of one stride: the size of its values, rounded up to sectors. Record i of a slab describes slot i. A
// record counts if its checksum is right, it has the epoch of the slab's header, and it is at its own place. Everything
// else is an empty slot. Epochs are random and never used again, so that a new header ends all values of a slab with
// one write.
//
// A process can be killed between any two writes, so their order matters, per slot:
//
//   1. the record of the old value is overwritten, or the header of its slab
//   2. the new value is written
//   3. its record is written
//   4. the value is reported as stored
//
// Each step begins when the one before has ended. So a record that counts describes a whole value, unless the power
// failed: then the device may have lost any of the writes that were not flushed, and the value's checksum tells.
//
// A write of a sector may be torn after a multiple of 512 bytes. No record spans such a boundary.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "store/checksum.h"
#include "store/key_hash.h"

namespace kvservice::disk {

constexpr int64_t kSectorBytes = 4096;
constexpr uint32_t kFormatVersion = 1;
constexpr uint32_t kDataFiles = 8;  // a file system may let only one thread write to a file at a time
constexpr int64_t kDigestBytes = 16;
constexpr uint64_t kMetaMagic = 0x6B73694473764BU;    // "KvsDisk"
constexpr uint64_t kHeaderMagic = 0x62616C5373764BU;  // "KvsSlab"

struct Meta {
  uint64_t magic;
  uint32_t version;
  uint32_t num_data_files;
  int64_t slab_bytes;
  uint64_t checksum;  // of the fields before
};

struct SlabHeader {
  uint64_t magic;
  uint64_t epoch;
  uint64_t slab;
  int64_t stride;     // 0: the slab has no values
  uint64_t checksum;  // of the fields before
};

struct Record {
  std::array<char, kDigestBytes> digest;  // with num_bytes: the space of the value
  Key key;
  int64_t num_bytes;
  uint64_t value_checksum;
  uint64_t used;  // larger than that of values used before it
  uint64_t epoch;
  uint64_t place;  // of the slot, see place_of()
  uint64_t reserved[4];
  uint64_t checksum;  // of the fields before
};

static_assert(sizeof(Record) == 128 && 512 % sizeof(Record) == 0);
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

constexpr int64_t kSectorRecords = kSectorBytes / static_cast<int64_t>(sizeof(Record));

constexpr uint64_t place_of(uint64_t slab, uint64_t index) { return slab << 32 | index; }

constexpr int64_t stride_of(int64_t num_bytes) { return (num_bytes + kSectorBytes - 1) / kSectorBytes * kSectorBytes; }

inline uint64_t checksum_of(const char* bytes, int64_t num_bytes) {
  const int64_t rest = num_bytes % Checksum::kStripeBytes;
  Checksum checksum;
  checksum.add_stripes(bytes, num_bytes / Checksum::kStripeBytes);
  checksum.add_rest(bytes + num_bytes - rest, rest);
  return checksum.value(num_bytes);
}

// The checksum of a struct that ends with it.
template <class T>
uint64_t own_checksum(const T& item) {
  return checksum_of(reinterpret_cast<const char*>(&item), sizeof(T) - sizeof(uint64_t));
}

// Where the parts of the slabs are.
struct Geometry {
  int64_t slab_bytes;
  int64_t num_slabs;

  int64_t region_bytes() const { return kSectorBytes + slab_bytes / kSectorBytes * int64_t{sizeof(Record)}; }
  // What a slab takes on the disk.
  int64_t total_slab_bytes() const { return slab_bytes + region_bytes(); }
  // The position of a sector in the file of records. Sector 0 has the header.
  int64_t sector_at(uint32_t slab, uint32_t sector) const { return slab * region_bytes() + sector * kSectorBytes; }
  // The position of a slab in its data file.
  int64_t slab_at(uint32_t slab) const { return slab / kDataFiles * slab_bytes; }
  int64_t data_file_bytes(uint32_t file) const { return (num_slabs + kDataFiles - 1 - file) / kDataFiles * slab_bytes; }
};

}  // namespace kvservice::disk
