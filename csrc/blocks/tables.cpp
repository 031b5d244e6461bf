#include "blocks/tables.h"

#include <algorithm>

#include "errors.h"

namespace kvservice {

int64_t RowRanges::total() const {
  int64_t sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += counts[i];
  return sum;
}

void check_ranges(const BlockTables& tables, const RowRanges& ranges, int shift) {
  const int64_t limit = tables.width << shift;
  for (int64_t i = 0; i < ranges.size; ++i) {
    require(ranges.rows[i] >= 0 && ranges.rows[i] < tables.num_rows, "rows", "is not a row of the tables");
    require(ranges.starts[i] >= 0 && ranges.starts[i] <= limit, "starts", "is outside the table");
    require(ranges.counts[i] >= 0 && ranges.counts[i] <= limit - ranges.starts[i], "counts", "reaches past the table");
  }
}

void slot_mapping(const BlockTables& tables, const RowRanges& positions, int shift, int64_t* slots) {
  const int64_t block_size = int64_t{1} << shift;
  for (int64_t i = 0; i < positions.size; ++i) {
    const int32_t* table = tables.row(positions.rows[i]);
    const int64_t stop = positions.starts[i] + positions.counts[i];
    for (int64_t position = positions.starts[i]; position < stop;) {
      const int64_t first = int64_t{table[position >> shift]} << shift;
      const int64_t end = std::min((position | (block_size - 1)) + 1, stop);
      const int64_t offset = position & (block_size - 1), count = end - position;
      for (int64_t j = 0; j < count; ++j) slots[j] = first + offset + j;
      slots += count;
      position = end;
    }
  }
}

std::vector<int64_t> shared_entries(const BlockTables& tables, const RowRanges& entries, const int32_t* ref_count,
                                    const bool* indexed, int64_t num_blocks) {
  std::vector<int64_t> shared;
  int64_t number = 0;
  for (int64_t i = 0; i < entries.size; ++i) {
    const int32_t* table = tables.row(entries.rows[i]) + entries.starts[i];
    for (int64_t j = 0; j < entries.counts[i]; ++j, ++number) {
      const int64_t block = table[j];
      require(block >= 0 && block < num_blocks, "tables", "has a block outside the pool");
      if (ref_count[block] > 1 || indexed[block]) shared.push_back(number);
    }
  }
  return shared;
}

}  // namespace kvservice
