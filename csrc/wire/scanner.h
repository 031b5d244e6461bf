// Counts the contents of a protobuf message before anything is built from it.
//
// Nothing simpler bounds what a message costs. Of 8 MiB, the largest message by default, protobuf parses the two
// tensors of a write in 0.9 ms; as many bytes of a write can be a shape of 8 million extents, 72 ms on the event loop,
// and those of an allocation 4 million empty sequences, 147 ms and 184 MiB of memory (2 cores of an AMD EPYC, grpcio
// 1.85). The scanner refuses these in 1.4 and 0.01 ms. A limit on the bytes of each method lets the shape through,
// because writes need them all. Tried by tests/server/test_parsing.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvservice {

enum class FieldKind { kVarint, kFixed64, kFixed32, kBytes, kMessage };

// One field of a message type. `counter` is an index into the limits, or kUncounted. `message` is the message type of a
// kMessage field.
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
  // The upper limit of each counter over the whole message: elements of a scalar field, occurrences of a message field,
  // or bytes of a string or bytes field.
  std::vector<uint64_t> limits;
  // The limit of records (a tag with its value), including nested and unknown ones.
  uint64_t max_records;
};

enum class ScanResult { kWithinLimits, kAboveLimit, kTooManyRecords, kMalformed };

struct ScanReport {
  ScanResult result;
  // The counter that exceeds its limit, for kAboveLimit.
  int counter;
};

// Scans the records of a serialized message. Fields without a rule are unknown: they count as records only. The work is
// bounded by the limits and max_records, independent of the size, except for one pass over packed varints.
ScanReport scan_message(const ScanRules& rules, const uint8_t* data, size_t size);

}  // namespace kvservice
