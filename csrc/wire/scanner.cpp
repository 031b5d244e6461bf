#include "wire/scanner.h"

#include <algorithm>

#include "wire/encoding.h"

namespace kvservice {
namespace {

// The limit for unknown groups. The nesting of messages is bounded by their types.
constexpr int kMaxGroupDepth = 32;

class Scan {
 public:
  explicit Scan(const ScanRules& rules) : rules_(rules), counts_(rules.limits.size()) {}

  bool message(int index, const uint8_t* at, const uint8_t* end) {
    while (at < end) {
      uint64_t tag = 0;
      if (!record(at, end, tag)) return false;
      const FieldRule* field = find(rules_.messages[index], static_cast<uint32_t>(tag >> 3));
      const auto wire_type = static_cast<WireType>(tag & 7);
      const bool walked = field == nullptr ? skip(tag, at, end, 0) : value(*field, wire_type, tag, at, end);
      if (!walked) return false;
    }
    return true;
  }

  ScanReport report() const { return report_; }

 private:
  bool fail(ScanResult result, int counter = FieldRule::kUncounted) {
    report_ = {result, counter};
    return false;
  }

  // Counts a record and reads its tag.
  bool record(const uint8_t*& at, const uint8_t* end, uint64_t& tag) {
    if (++records_ > rules_.max_records) return fail(ScanResult::kTooManyRecords);
    if (!varint(at, end, tag)) return false;
    if (tag >> 32 || tag >> 3 == 0) return fail(ScanResult::kMalformed);
    return true;
  }

  static const FieldRule* find(const MessageRules& rules, uint32_t number) {
    const auto found = std::lower_bound(rules.begin(), rules.end(), number,
                                        [](const FieldRule& rule, uint32_t wanted) { return rule.number < wanted; });
    return found != rules.end() && found->number == number ? &*found : nullptr;
  }

  bool varint(const uint8_t*& at, const uint8_t* end, uint64_t& result) {
    return read_varint(at, end, result) || fail(ScanResult::kMalformed);
  }

  // Reads a length and advances `at` to the first byte behind it. `size` bytes from there are inside the message.
  bool length(const uint8_t*& at, const uint8_t* end, size_t& size) {
    uint64_t wide = 0;
    if (!varint(at, end, wide)) return false;
    if (wide > static_cast<uint64_t>(end - at)) return fail(ScanResult::kMalformed);
    size = static_cast<size_t>(wide);
    return true;
  }

  bool count(const FieldRule& field, uint64_t more) {
    if (field.counter == FieldRule::kUncounted) return true;
    counts_[field.counter] += more;
    if (counts_[field.counter] <= rules_.limits[field.counter]) return true;
    return fail(ScanResult::kAboveLimit, field.counter);
  }

  // Scans the value of a known field after its tag. If the wire type differs from the field's, the field is unknown.
  bool value(const FieldRule& field, WireType wire_type, uint64_t tag, const uint8_t*& at, const uint8_t* end) {
    static constexpr WireType kOneElement[] = {kWireVarint, kWire64, kWire32};
    const bool scalar = field.kind <= FieldKind::kFixed32;
    if (scalar && wire_type == kOneElement[static_cast<int>(field.kind)]) {
      return count(field, 1) && skip(tag, at, end, 0);
    }
    if (wire_type != kWireLength) return skip(tag, at, end, 0);
    size_t size = 0;
    if (!length(at, end, size)) return false;
    const uint8_t* first = at;
    at += size;
    if (scalar) return packed(field, first, at);
    if (field.kind == FieldKind::kBytes) return count(field, size);
    return count(field, 1) && message(field.message, first, at);
  }

  bool packed(const FieldRule& field, const uint8_t* at, const uint8_t* end) {
    const auto size = static_cast<size_t>(end - at);
    if (field.kind != FieldKind::kVarint) {
      const size_t width = field.kind == FieldKind::kFixed64 ? 8 : 4;
      if (size % width != 0) return fail(ScanResult::kMalformed);
      return count(field, size / width);
    }
    const auto elements = std::count_if(at, end, [](uint8_t byte) { return byte < 0x80; });
    if (size != 0 && end[-1] >= 0x80) return fail(ScanResult::kMalformed);
    return count(field, static_cast<uint64_t>(elements));
  }

  // Skips the value of an unknown field after its tag.
  bool skip(uint64_t tag, const uint8_t*& at, const uint8_t* end, int depth) {
    uint64_t ignored = 0;
    size_t size = 0;
    switch (tag & 7) {
      case kWireVarint:
        return varint(at, end, ignored);
      case kWire64:
        size = 8;
        break;
      case kWire32:
        size = 4;
        break;
      case kWireLength:
        if (!length(at, end, size)) return false;
        break;
      case kWireGroup:
        return skip_group(tag >> 3, at, end, depth);
      default:  // the end of a group that did not begin, or an invalid wire type
        return fail(ScanResult::kMalformed);
    }
    if (size > static_cast<size_t>(end - at)) return fail(ScanResult::kMalformed);
    at += size;
    return true;
  }

  bool skip_group(uint64_t number, const uint8_t*& at, const uint8_t* end, int depth) {
    if (depth == kMaxGroupDepth) return fail(ScanResult::kMalformed);
    while (at < end) {
      uint64_t tag = 0;
      if (!record(at, end, tag)) return false;
      if ((tag & 7) == kWireEndGroup) return tag >> 3 == number || fail(ScanResult::kMalformed);
      if (!skip(tag, at, end, depth + 1)) return false;
    }
    return fail(ScanResult::kMalformed);
  }

  const ScanRules& rules_;
  std::vector<uint64_t> counts_;
  uint64_t records_ = 0;
  ScanReport report_{ScanResult::kWithinLimits, FieldRule::kUncounted};
};

}  // namespace

ScanReport scan_message(const ScanRules& rules, const uint8_t* data, size_t size) {
  Scan scan(rules);
  scan.message(0, data, data + size);
  return scan.report();
}

}  // namespace kvservice
