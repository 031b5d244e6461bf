// Chooses the variant of the decode kernel, divides shared memory into pipeline stages, and launches the kernel.
#include <algorithm>
#include <optional>

#include "cuda/decode_variants.cuh"
#include "errors.h"

namespace kvservice {
namespace {

using decode::Variant;

constexpr int kMaxColumns = 32;
constexpr int64_t kHalvedTokens = 1 << 14;  // measured on an H100
// Bytes in flight per SM. More bytes lower the memory throughput (measured from 64 to 192 KiB on an H200).
constexpr int kBytesInFlight = 96 << 10;
constexpr int kReservedSharedBytes = 1024;  // the system's share of every thread block
constexpr int kMaxBlocksInTile = 32;        // the producer warp has one lane per block
// A thread block has two partial results, each with a meeting.
constexpr int kMaxBlocks = kCounterBytes / 2 / static_cast<int64_t>(2 * sizeof(decode::Meeting));

const Variant* variant_of(const AttentionParams& p, int columns) {
  const int head_size = static_cast<int>(p.pool.head_size);
  switch (p.pool.dtype) {
    case DType::kFloat16:
      return decode::half_variant(head_size, columns);
    case DType::kBFloat16:
      return decode::bfloat16_variant(head_size, columns);
    case DType::kFloat8E4M3:
      return decode::e4m3_variant(head_size, columns);
    case DType::kFloat8E5M2:
      return decode::e5m2_variant(head_size, columns);
    default:
      return nullptr;
  }
}

struct Shape {
  const Variant* variant;
  int tile_tokens;
  int stage_bytes;
  int num_stages;
  int blocks;
  int shared_bytes;
};

std::optional<Shape> shape_of(const AttentionParams& p, const Variant* variant) {
  const DeviceProperties& properties = current_device_properties();
  Shape shape{variant};
  const int block_size = static_cast<int>(p.pool.block_size);
  shape.tile_tokens = std::max(variant->round_tokens, block_size);
  if (block_size < 8 || shape.tile_tokens / block_size > kMaxBlocksInTile) return std::nullopt;
  shape.stage_bytes = shape.tile_tokens / block_size * static_cast<int>(p.pool.head_bytes());
  for (int per_sm = variant->blocks_per_sm; per_sm >= 1; --per_sm) {
    const int bytes = std::min(properties.max_shared_bytes_per_sm / per_sm - kReservedSharedBytes,
                               properties.max_shared_bytes_per_block);
    const int room = (bytes - variant->stages_offset) / shape.stage_bytes;
    const int wanted = std::max(kBytesInFlight / per_sm / shape.stage_bytes, 2);
    shape.num_stages = std::min({room, wanted, decode::kMaxStages});
    shape.shared_bytes = variant->stages_offset + shape.num_stages * shape.stage_bytes;
    shape.blocks = std::min(properties.num_sms * per_sm, kMaxBlocks);
    if (shape.num_stages >= 2) return shape;
  }
  return std::nullopt;
}

// Returns null if there is no such variant, or if two of its pipeline stages do not fit into shared memory.
const Variant* find(const AttentionParams& p, int columns) {
  const Variant* variant = variant_of(p, columns);
  return variant != nullptr && shape_of(p, variant).has_value() ? variant : nullptr;
}

// Returns the variant with the fewest columns that holds all queries of a KV head, or else the widest variant.
const Variant* choose(const AttentionParams& p, int64_t query_len) {
  const Variant* best = nullptr;
  for (int columns = 8; columns <= kMaxColumns; columns *= 2) {
    const Variant* variant = find(p, columns);
    if (variant != nullptr) best = variant;
    if (best != nullptr && columns >= p.group_size() * query_len) break;
  }
  return best;
}

int64_t partial_bytes(const AttentionParams& p, const Shape& shape, bool batch_invariant, int64_t num_passes) {
  const int64_t one = shape.variant->partial_floats * static_cast<int64_t>(sizeof(float));
  if (batch_invariant) return p.num_seqs * p.pool.num_kv_heads * num_passes * decode::kMaxChunks * one;
  return 2 * shape.blocks * one;
}

int64_t num_passes_of(const AttentionParams& p, const Variant* variant, int64_t query_len) {
  return (p.group_size() * query_len + variant->columns - 1) / variant->columns;
}

// Prefetches everything or nothing: one cache line per thread.
int32_t prefetch_bytes(int64_t bytes) {
  return bytes <= decode::block_threads(8) * 128 ? static_cast<int32_t>(bytes) : 0;
}

// Direct work wins time, in which the device reads kWonBytes, because it starts and ends sooner. In several rounds it
// wins more with each work tile. It loses time where it does not read at full speed. Losses are counted in KV tiles, K
// and V, that the device reads at full speed. All numbers were measured on an H100.
constexpr float kWonBytes = 5e6F, kWonByItem = 0.25F;
// Fewer thread blocks than these do not read at full speed, with caches of 16 and of 8 bits.
constexpr float kBusyBlocks = 83.0F, kBusyBlocks8Bit = 110.0F;
// Each tile that the longest sequence has more than the mean loses kLostByLonger. If an SM has one thread block, a part
// of all tiles is lost: there are fewer bytes in flight, and with many columns there is more arithmetic.
constexpr float kLostByLonger = 10.0F, kLostByOneBlock = 0.03F, kLostByOneWideBlock = 0.2F;
// In several rounds, the host decides by the longest sequence that the tables have room for.
constexpr float kLostByLongest = 16.0F;
constexpr int kLongTableTiles = 64;  // the largest clusters are slow to start
constexpr int64_t kMostDirectItems = 1 << 20;

// The thread blocks of a direct launch, none if work should not be direct, and its parameters.
struct DirectLaunch {
  int blocks = 0;
  int cluster = 0;
  decode::DirectWork work{};
};

// Returns the thread blocks of each cluster: one for each SM, but no more than tiles.
int cluster_of(const Shape& shape, int64_t items, int64_t table_tiles) {
  const int num_sms = current_device_properties().num_sms;
  int cluster = 1;
  for (int more = 2; more <= decode::kMaxCluster && cluster < table_tiles && items * more <= num_sms; more *= 2) {
    const bool slow = more == decode::kMaxCluster && table_tiles < kLongTableTiles && items * more > num_sms / 2;
    if (slow || shape.variant->max_clusters(shape.shared_bytes, more) < items) break;
    cluster = more;
  }
  return cluster;
}

// Chooses by the room in the block tables. The device chooses again, by the lengths.
DirectLaunch direct_launch(const AttentionParams& p, const Shape& shape, int64_t items, bool batch_invariant) {
  const int64_t table_tokens = (p.max_blocks - p.num_common_blocks) * p.pool.block_size;
  const int64_t table_tiles = (table_tokens + shape.tile_tokens - 1) / shape.tile_tokens;
  const auto longest = static_cast<float>(table_tiles);
  DirectLaunch direct;
  direct.blocks = static_cast<int>(std::min<int64_t>(items, shape.blocks));
  direct.cluster = 1;
  direct.work.surely = direct.work.starts_next = true;
  if (batch_invariant)
    return table_tokens <= decode::kMaxWholeTokens && items <= kMostDirectItems ? direct : DirectLaunch{};
  decode::DirectWork& work = direct.work;
  work.most_lost = kWonBytes / static_cast<float>(2 * shape.stage_bytes);
  work.busy_blocks = is_float8(p.pool.dtype) ? kBusyBlocks8Bit : kBusyBlocks;
  if (items > shape.blocks) {  // in rounds
    const auto last = static_cast<float>((items - 1) % shape.blocks + 1);
    const float lost = (std::max(work.busy_blocks - last, 0.0F) + kLostByLongest) * longest;
    const bool pays = lost <= work.most_lost + kWonByItem * static_cast<float>(items) && items <= kMostDirectItems;
    return pays ? direct : DirectLaunch{};
  }
  const int cluster = direct.cluster = cluster_of(shape, items, table_tiles);
  while (1 << work.cluster_shift < cluster) ++work.cluster_shift;
  const int64_t num_sms = current_device_properties().num_sms;
  const auto most_tiles = static_cast<float>((table_tiles + cluster - 1) / cluster);
  work.lost_by_longer = kLostByLonger / static_cast<float>(cluster);
  if (items * cluster <= num_sms) {
    work.lost_by_tile = shape.variant->columns > 8 ? kLostByOneWideBlock : kLostByOneBlock;
  }
  const float all = longest * static_cast<float>(items);
  const float lost = std::max(most_tiles * work.busy_blocks - all, 0.0F) + all * work.lost_by_tile;
  if (lost > work.most_lost) return {};  // if sequences are as long as the tables
  work.surely = (work.busy_blocks + kLostByLonger) * most_tiles <= work.most_lost;
  // Clusters that start between others' thread blocks share SMs while other SMs have nothing to do.
  work.starts_next = cluster == 1 || 2 * items * cluster <= num_sms;
  // If the lengths may be uneven, all SMs should have thread blocks.
  const int clusters = cluster == 1 ? shape.blocks : shape.variant->max_clusters(shape.shared_bytes, cluster);
  const int most_blocks = work.surely ? static_cast<int>(items) * cluster : clusters * cluster;
  direct.blocks = std::min(most_blocks, shape.blocks / cluster * cluster);
  return direct;
}

decode::Params kernel_params(const AttentionParams& p, const CudaLaunch& launch, const Shape& shape, QueryLens lens) {
  decode::Params k{};
  k.pool = p.pool.data + p.layer * p.pool.layer_bytes();
  k.block_bytes = p.pool.block_bytes();
  k.head_bytes = static_cast<int32_t>(p.pool.head_bytes());
  k.value_bytes = static_cast<int32_t>(p.pool.num_kv_heads * p.pool.head_bytes());
  while ((int64_t{1} << k.block_shift) < p.pool.block_size) ++k.block_shift;
  k.num_kv_heads = static_cast<int32_t>(p.pool.num_kv_heads);
  k.group = static_cast<int32_t>(p.group_size());
  k.num_heads = static_cast<int32_t>(p.num_heads);
  k.num_seqs = static_cast<int32_t>(p.num_seqs);
  k.max_blocks = static_cast<int32_t>(p.max_blocks);
  k.table_blocks = static_cast<int32_t>(p.max_blocks - p.num_common_blocks);
  k.min_query_len = static_cast<int32_t>(std::max<int64_t>(lens.min, 1));
  k.max_query_len = static_cast<int32_t>(lens.max);
  k.columns = shape.variant->columns;
  k.num_passes = static_cast<int32_t>(num_passes_of(p, shape.variant, lens.max));
  k.tile_tokens = shape.tile_tokens;
  while ((1 << k.tile_shift) < shape.tile_tokens) ++k.tile_shift;
  k.query_prefetch_bytes = prefetch_bytes(p.num_tokens * p.num_heads * p.pool.head_size * item_size(p.dtype));
  // With a shared prefix, the tables begin num_common_blocks entries later.
  const int64_t table_entries = p.num_seqs * p.max_blocks - p.num_common_blocks;
  k.table_prefetch_bytes = prefetch_bytes(table_entries * static_cast<int64_t>(sizeof(int32_t)));
  k.num_stages = shape.num_stages;
  k.stage_bytes = shape.stage_bytes;
  k.query = p.query;
  k.query_bytes = static_cast<int32_t>(p.pool.head_size * item_size(p.dtype));
  k.query_lens = p.query_lens;
  k.block_tables = p.block_tables;
  k.context_lens = p.context_lens;
  k.alibi_slopes = p.alibi_slopes;
  k.k_scale = p.k_scale;
  k.v_scale = p.v_scale;
  k.sparse = p.sparse;
  k.scale = p.scale;
  k.soft_cap = p.soft_cap;
  k.sliding_window = static_cast<int32_t>(std::min<int64_t>(p.sliding_window, INT32_MAX / 2));
  k.query_is_bfloat16 = p.dtype == DType::kBFloat16;
  k.out = p.out;
  k.lse = p.lse;
  k.meetings = static_cast<decode::Meeting*>(launch.workspace.data);
  k.partials = reinterpret_cast<float*>(static_cast<char*>(launch.workspace.data) + kCounterBytes);
  k.batch_invariant = launch.batch_invariant;
  return k;
}

}  // namespace

bool decode_supports(const AttentionParams& p) {
  // Work is counted in 31 bits: of each sequence and head its tiles, and the cost of a work tile.
  const int64_t most_tiles = p.max_blocks * std::max<int64_t>(p.pool.block_size / 64, 1);
  if (p.num_seqs * p.num_heads * (most_tiles + decode::kWorkTileCost) > INT32_MAX / 2) return false;
  if (p.dtype != DType::kFloat16 && p.dtype != DType::kBFloat16) return false;
  return choose(p, 1) != nullptr;
}

int64_t decode_max_query_len(const AttentionParams& p) {
  int widest = 0;
  for (int columns = 8; columns <= kMaxColumns; columns *= 2) {
    if (find(p, columns) != nullptr) widest = columns;
  }
  return std::max<int64_t>(widest / p.group_size(), 1);
}

int64_t decode_workspace_bytes(const AttentionParams& p, bool batch_invariant) {
  int64_t most = 0;
  for (int columns = 8; columns <= kMaxColumns; columns *= 2) {
    const Variant* variant = find(p, columns);
    if (variant == nullptr) continue;
    const int64_t passes = num_passes_of(p, variant, std::min(decode_max_query_len(p), p.max_query_len));
    most = std::max(most, partial_bytes(p, *shape_of(p, variant), batch_invariant, passes));
  }
  return kCounterBytes + most;
}

namespace {

void launch_variant(const AttentionParams& p, const CudaLaunch& launch, const Variant* variant, QueryLens lens) {
  const std::optional<Shape> shape = variant == nullptr ? std::nullopt : shape_of(p, variant);
  require(shape.has_value(), "kernel", "the decode kernel does not support this shape");
  decode::Params params = kernel_params(p, launch, *shape, lens);
  require(kCounterBytes + partial_bytes(p, *shape, launch.batch_invariant, params.num_passes) <= launch.workspace.bytes,
          "workspace", "is too small");
  const int64_t items = p.num_seqs * p.pool.num_kv_heads * params.num_passes;
  const DirectLaunch direct = direct_launch(p, *shape, items, launch.batch_invariant);
  params.cluster = direct.cluster;
  params.direct = direct.work;
  variant->launch(params, params.cluster > 0 ? direct.blocks : shape->blocks, shape->shared_bytes, launch.stream);
}

}  // namespace

void decode_attention(const AttentionParams& p, const CudaLaunch& launch, QueryLens lens) {
  require(reinterpret_cast<uintptr_t>(p.query) % 16 == 0, "query", "is not aligned to 16 bytes");
  if (!launch.batch_invariant) {
    // With very few tokens, two parallel passes of 8 columns finish sooner than one pass of 16.
    const bool halve = p.group_size() * lens.max <= 16 && table_tokens(p) <= kHalvedTokens;
    launch_variant(p, launch, halve ? find(p, 8) : choose(p, lens.max), lens);
    return;
  }
  // The query length of a sequence alone chooses its variant, because different column counts round differently.
  for (int64_t first = std::max<int64_t>(lens.min, 1); first <= lens.max;) {
    const Variant* variant = choose(p, first);
    const int64_t last = variant == nullptr ? lens.max : std::max<int64_t>(first, variant->columns / p.group_size());
    launch_variant(p, launch, variant, {first, std::min(last, lens.max)});
    first = last + 1;
  }
}

}  // namespace kvservice
