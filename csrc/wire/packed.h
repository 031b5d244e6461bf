// Repeated integers of a serialized protobuf message, without an object for each of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvservice {

struct PackedField {
  const uint8_t* begin;
  size_t size;
};

// Returns the bytes of the packed field of this number, none if the message does not have it. Protobuf has serialized
// the message, and so has written the field in one piece: what has its number and another form is an unknown field.
// Throws ArgumentError for bytes that are no message.
PackedField find_packed(const uint8_t* data, size_t size, uint32_t number);

// Appends a varint to a message.
void put_varint(std::string& message, uint64_t value);

}  // namespace kvservice
