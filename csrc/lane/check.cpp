#include "lane/check.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "errors.h"

namespace kvservice {
namespace {

constexpr int32_t kHeadsMax = 65535;
constexpr uint64_t kAlignment = 16;

// Returns the address of a tensor of `num_bytes` bytes, or null if the place is left out.
char* resolve(const LanePlace& place, const LaneRegion* region, int64_t num_bytes, const char* field) {
  if (region == nullptr) return nullptr;
  require(place.zero == 0, field, "is malformed");
  require(place.offset % kAlignment == 0, field, "has an offset that is not a multiple of 16 bytes");
  const auto size = static_cast<uint64_t>(region->num_bytes), bytes = static_cast<uint64_t>(num_bytes);
  if (place.offset > size || bytes > size - place.offset) {
    throw ArgumentError(field, std::to_string(num_bytes) + " bytes from " + std::to_string(place.offset) +
                                   " are not inside a region of " + std::to_string(size));
  }
  return region->address + place.offset;
}

char* resolve_needed(const LanePlace& place, const LaneRegion* region, int64_t num_bytes, const char* field) {
  require(region != nullptr, field, "is left out");
  return resolve(place, region, num_bytes, field);
}

struct Extent {
  const char* begin;
  int64_t num_bytes;

  bool overlaps(const Extent& other) const {
    return begin != nullptr && other.begin != nullptr && begin < other.begin + other.num_bytes &&
           other.begin < begin + num_bytes;
  }
};

AttentionOptions options_of(const LaneEntry& entry, const LaneShape& shape) {
  const int32_t* sparse = entry.block_sparse;
  const float scale = entry.scale != 0.0F ? entry.scale : 1.0F / std::sqrt(static_cast<float>(shape.head_size));
  return {scale, entry.logits_soft_cap, entry.sliding_window, {sparse[0], sparse[1], sparse[2], sparse[3], sparse[4]}};
}

void copy_slopes(const char* from, int64_t num_heads, LaneExecutor& executor, std::vector<float>& slopes) {
  slopes.resize(static_cast<size_t>(num_heads));
  executor.copy_in(slopes.data(), from, 4 * num_heads);
  check_slopes(slopes.data(), num_heads, "options.");
}

}  // namespace

void check_entry(const LaneEntry& entry, uint64_t number, const LaneShape& shape) {
  if (entry.number != number) {
    throw ArgumentError("number",
                        "out of order: is " + std::to_string(entry.number) + ", expected " + std::to_string(number));
  }
  constexpr uint32_t kFlags = kLaneDecode | kLaneReturnLse;
  require((entry.flags & ~kFlags) == 0, "flags", "has unknown bits");
  require(std::all_of(std::begin(entry.reserved), std::end(entry.reserved), [](uint32_t word) { return word == 0; }),
          "reserved", "is not 0");
  if (entry.layer < 0 || entry.layer >= shape.num_layers) {
    throw ArgumentError("layer", std::to_string(entry.layer) + " is not below " + std::to_string(shape.num_layers));
  }
  if (entry.num_heads <= 0 || entry.num_heads > kHeadsMax || entry.num_heads % shape.num_kv_heads != 0) {
    throw ArgumentError("num_heads", std::to_string(entry.num_heads) + " is not a multiple of " +
                                         std::to_string(shape.num_kv_heads) + " up to 65535");
  }
  const AttentionOptions options = options_of(entry, shape);
  check_options(options, shape.block_size, "options.");
  require(!options.sparse.on() || shape.block_sparse, "options.block_sparse", "is not supported by the CPU's kernels");
  require(((entry.flags & kLaneReturnLse) != 0) == (entry.lse.region != kNoRegion), "lse_place",
          "is given if and only if the log-sum-exp is asked for");
}

LaneCall make_call(const LaneEntry& entry, const LaneUse& use, LaneExecutor& executor, std::vector<float>& slopes) {
  const LaneShape& shape = executor.shape();
  const LaneStep& step = use.step();
  if ((entry.flags & kLaneDecode) != 0) {
    const int32_t* const query_lens = step.host.query_lens;
    const bool one_each = std::all_of(query_lens, query_lens + step.num_seqs, [](int32_t n) { return n == 1; });
    require(one_each, "step_id", "a sequence has several tokens in this step; use Extend");
  }
  const int64_t kv_bytes = step.num_tokens * shape.num_kv_heads * shape.head_size * shape.item_size;
  const int64_t num_rows = step.num_tokens * entry.num_heads;
  const int64_t query_bytes = num_rows * shape.head_size * shape.item_size;

  LaneCall call;
  call.step = &step;
  call.layer = entry.layer;
  call.num_heads = entry.num_heads;
  call.options = options_of(entry, shape);
  call.query = resolve_needed(entry.query, use.region(0), query_bytes, "query");
  call.key = resolve_needed(entry.key, use.region(1), kv_bytes, "key");
  call.value = resolve_needed(entry.value, use.region(2), kv_bytes, "value");
  call.output = resolve_needed(entry.output, use.region(3), query_bytes, "output_place");
  call.lse = reinterpret_cast<float*>(resolve(entry.lse, use.region(4), 4 * num_rows, "lse_place"));

  for (int64_t i = 0; i < 5; ++i) call.kinds[i] = use.kind(i);

  const Extent query{call.query, query_bytes}, key{call.key, kv_bytes}, value{call.value, kv_bytes};
  const Extent output{call.output, query_bytes}, lse{reinterpret_cast<char*>(call.lse), 4 * num_rows};
  const int64_t slopes_bytes = int64_t{4} * entry.num_heads;
  const Extent biases{resolve(entry.alibi_slopes, use.region(5), slopes_bytes, "options.alibi_slopes"), slopes_bytes};
  for (const Extent& other : {query, key, value, lse, biases}) {
    require(!output.overlaps(other), "output_place", "overlaps another tensor of the call");
  }
  for (const Extent& other : {query, key, value, biases}) {
    require(!lse.overlaps(other), "lse_place", "overlaps another tensor of the call");
  }
  if (biases.begin != nullptr) {
    copy_slopes(biases.begin, entry.num_heads, executor, slopes);
    call.alibi_slopes = slopes.data();
  }
  return call;
}

}  // namespace kvservice
