// The encoding of protobuf: a record is a tag, which says the kind and the number of a field, and its value.
#pragma once

#include <cstdint>

namespace kvservice {

enum WireType : uint64_t { kWireVarint, kWire64, kWireLength, kWireGroup, kWireEndGroup, kWire32 };

// Reads a varint, which has seven bits a byte, the lowest first, and advances `at` behind it. Returns false if it does
// not end before `end`, or is too long.
inline bool read_varint(const uint8_t*& at, const uint8_t* end, uint64_t& value) {
  constexpr int kMaxBytes = 10;
  value = 0;
  for (int i = 0; i < kMaxBytes && at < end; ++i) {
    const uint64_t byte = *at++;
    value |= (byte & 0x7F) << (7 * i);
    if (byte < 0x80) return true;
  }
  return false;
}

}  // namespace kvservice
