#include "wire/packed.h"

#include "errors.h"
#include "wire/encoding.h"

namespace kvservice {
namespace {

uint64_t varint(const uint8_t*& at, const uint8_t* end) {
  uint64_t value = 0;
  require(read_varint(at, end, value), "data", "is no message");
  return value;
}

void skip(const uint8_t*& at, const uint8_t* end, uint64_t size) {
  require(size <= static_cast<uint64_t>(end - at), "data", "is no message");
  at += size;
}

}  // namespace

PackedField find_packed(const uint8_t* data, size_t size, uint32_t number) {
  const uint8_t *at = data, *end = data + size;
  int64_t depth = 0;  // of groups, which are unknown fields: what is in them is not of this message
  while (at < end) {
    const uint64_t tag = varint(at, end), kind = tag & 7;
    if (kind == kWireLength) {
      const uint64_t length = varint(at, end);
      const uint8_t* first = at;
      skip(at, end, length);
      if (depth == 0 && tag >> 3 == number) return {first, static_cast<size_t>(length)};
    } else if (kind == kWireVarint) {
      varint(at, end);
    } else if (kind == kWireGroup) {
      ++depth;
    } else if (kind == kWireEndGroup) {
      require(--depth >= 0, "data", "is no message");
    } else {
      require(kind == kWire64 || kind == kWire32, "data", "is no message");
      skip(at, end, kind == kWire64 ? 8 : 4);
    }
  }
  require(depth == 0, "data", "is no message");
  return {end, 0};
}

void put_varint(std::string& message, uint64_t value) {
  for (; value >= 0x80; value >>= 7) message.push_back(static_cast<char>(value | 0x80));
  message.push_back(static_cast<char>(value));
}

}  // namespace kvservice
