// A thread for each row. One kernel, because launching several takes longer than they run.
#include "cuda/decode_tables.h"
#include "errors.h"

namespace kvservice {
namespace {

constexpr int kThreads = 128;

__global__ void advance_tables(const DecodeTables t) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= t.num_rows) return;
  const int64_t position = t.positions[row] + t.growth[row];
  t.positions[row] = position;
  t.context_lens[row] = static_cast<int32_t>(position + 1);
  const int64_t index = position / t.block_size;
  const bool known = position >= 0 && index < t.max_blocks;
  const int64_t block = known ? t.block_tables[row * t.max_blocks + index] : 0;
  t.slot_mapping[row] = known ? block * t.block_size + position % t.block_size + t.shift[row] : -1;
}

}  // namespace

void advance_tables_cuda(const DecodeTables& tables, cudaStream_t stream) {
  require(tables.num_rows > 0 && tables.num_rows <= INT32_MAX, "num_rows", "is out of range");
  require(tables.max_blocks > 0, "max_blocks", "is not positive");
  require(tables.block_size > 0, "block_size", "is not positive");
  const auto grid = static_cast<unsigned>((tables.num_rows + kThreads - 1) / kThreads);
  advance_tables<<<grid, kThreads, 0, stream>>>(tables);
  check_launch("advance_tables");
}

}  // namespace kvservice
