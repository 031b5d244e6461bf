// Counts what a protobuf message holds, before anything is built from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvservice {

enum class FieldKind { kVarint, kFixed64, kFixed32, kBytes, kMessage };

// One field of a message type. `counter` is an index into the limits, or kUncounted. `message`: the message type of a
// field of kind kMessage.
struct FieldRule {
  static constexpr int kUncounted = -1;
  uint32_t number;
  FieldKind kind;
  int counter;
  int message;
};

// Sorted by number.
using MessageRules = std::vector<FieldRule>;

struct ScanRules {
  // The first message type is that of the whole message.
  std::vector<MessageRules> messages;
  // The most that each counter may reach: elements of a scalar field, occurrences of a message field, bytes of a field
  // of strings or bytes, over the whole message.
  std::vector<uint64_t> limits;
  // The most records (a tag with its value), nested and unknown ones included.
  uint64_t max_records;
};

enum class ScanResult { kWithinLimits, kAboveLimit, kTooManyRecords, kMalformed };

struct ScanReport {
  ScanResult result;
  // The counter that is above its limit, for kAboveLimit.
  int counter;
};

// Walks the records of a serialized message. Fields that the rules do not name are unknown fields: they count as
// records. Work is bounded by the limits and max_records, whatever the size, but for one pass over packed varints.
ScanReport scan_message(const ScanRules& rules, const uint8_t* data, size_t size);

}  // namespace kvservice
