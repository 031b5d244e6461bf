// Block tables of sequences, and the reference counts of the blocks in them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvservice {

// int32[num_rows, width]: each row lists the blocks of one sequence.
struct BlockTables {
  const int32_t* blocks;
  int64_t num_rows, width;

  const int32_t* row(int64_t row) const { return blocks + row * width; }
};

// The numbers starts[i], ..., starts[i] + counts[i] - 1 of the row rows[i]: table entries, or token positions.
struct RowRanges {
  const int64_t *rows, *starts, *counts;
  int64_t size;

  int64_t total() const;
};

// Throws ArgumentError unless all ranges are in the tables. `shift` is the binary logarithm of the numbers per entry.
void check_ranges(const BlockTables& tables, const RowRanges& ranges, int shift);

// Writes the slots of the token positions of all ranges, int64[ranges.total()]. The block size is 1 << shift.
void slot_mapping(const BlockTables& tables, const RowRanges& positions, int shift, int64_t* slots);

// Returns which of the entries of all ranges, concatenated, have a block with several references or in the prefix
// index. Throws ArgumentError if a block is not below num_blocks.
std::vector<int64_t> shared_entries(const BlockTables& tables, const RowRanges& entries, const int32_t* ref_count,
                                    const bool* indexed, int64_t num_blocks);

}  // namespace kvservice
