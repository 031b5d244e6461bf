// Block tables of sequences, and the reference counts of the blocks in them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvservice {

// Returns the index of the first negative one of numbers[size], -1 if there is none.
int64_t first_negative(const int32_t* numbers, int64_t size);

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

struct AddedReferences {
  std::vector<int64_t> first;  // the blocks that had no reference, in the order of their first occurrence
  int64_t num_shared = 0;      // how many blocks got their second reference
};

// Adds a reference to each of these blocks, as often as it occurs. Throws ArgumentError before anything changes if a
// block is not below num_blocks.
AddedReferences add_references(int32_t* ref_count, int64_t num_blocks, const int64_t* blocks, int64_t size);

struct DroppedReferences {
  std::vector<int64_t> last;  // the blocks that have no reference any more, in the order of their last occurrence
  int64_t num_unshared = 0;   // how many blocks had several references, and do not any more
};

// Drops a reference of each of these blocks, as often as it occurs. Throws ArgumentError, and changes nothing, if a
// block is not below num_blocks or has fewer references.
DroppedReferences drop_references(int32_t* ref_count, int64_t num_blocks, const int64_t* blocks, int64_t size);

struct DistinctBlocks {
  std::vector<int64_t> blocks, counts;  // ascending, and how often each occurs
};

// Returns the distinct ones of blocks[size], and writes to inverse[size] the index of each block among them. Throws
// ArgumentError if a block or the size is not below 2**31.
DistinctBlocks distinct_blocks(const int64_t* blocks, int64_t size, int64_t* inverse);

// The columns of a sequence's state that steps read and write.
enum StateColumn : int64_t { kLength = 0, kNumComputed = 1, kNumBlocks = 2, kStep = 3, kSwapped = 4, kStepColumns = 5 };

// Steps read and write these arrays of a pool: tables int32[num_rows, width], states[num_rows, num_columns], and of
// each block its references, whether it is in the prefix index, and its tokens, int32[num_blocks, 1 << shift].
struct StepTables {
  int32_t* tables;
  int64_t num_rows, width;
  int64_t* states;
  int64_t num_columns;
  int32_t* ref_count;
  const bool* indexed;
  int32_t* token_ids;
  int64_t num_blocks;
  int shift;
  int64_t max_length;
};

// A decode step over sequences, each of which gets one token: rows[size], tokens[size], and the lengths that the caller
// expects, or null. states[size, num_columns] are the states to plan with; null: those of the rows.
struct DecodeBatch {
  const int64_t *rows, *states;
  const int32_t* tokens;
  const int64_t* expected;
  int64_t size;
};

// The plan: lengths afterwards, twice, the slots of the tokens, and the indices of the sequences that need a block
// first. Their slots are only the offsets in these blocks.
struct DecodePlan {
  int64_t* lengths;
  int32_t* context_lens;
  int64_t* slots;
  std::vector<int64_t> fresh;
};

// Plans a decode step. Returns false if it is none: a token is negative, a length is not as expected, a sequence is
// swapped out, has other tokens that are not computed, has max_length tokens, or does not own its last block. Throws
// ArgumentError if a row or a block is outside the tables.
bool plan_decode(const StepTables& pool, const DecodeBatch& batch, DecodePlan& plan);

// Appends blocks[i] to the table of the sequence rows[fresh[i]], adds it to the slot of that sequence, and stores the
// tokens[size] in their slots. Throws ArgumentError, before anything is written, for a row, an index, a block or a slot
// that is out of range, and for indices that are not ascending.
void append_tokens(const StepTables& pool, const int64_t* rows, int64_t* slots, const int32_t* tokens, int64_t size,
                   const int64_t* fresh, const int64_t* blocks, int64_t num_fresh);

// Makes `step` the newest step of sequences, and lengths[size] their lengths. Returns the distinct values that it
// replaces, ascending. Throws ArgumentError, before anything is written, for a row that is out of range.
std::vector<int64_t> start_step(const StepTables& pool, const int64_t* rows, const int64_t* lengths, int64_t size,
                                int64_t step);

// A new sequence: its row, the blocks of its prefix-cache hits, and its tokens.
struct NewSequence {
  int64_t row;
  const int64_t* found;
  int64_t num_found;
  const int32_t* tokens;
  int64_t num_tokens;
};

// Writes the tables of new sequences, which are their hits and the next blocks of `blocks`, the tokens past the hits to
// the new blocks, and the states that steps read and write. What says whose sequences they are, it does not write.
// Throws ArgumentError, before anything is written, unless all of it fits and they need exactly these blocks.
void create_sequences(const StepTables& pool, const std::vector<NewSequence>& sequences, const int64_t* blocks,
                      int64_t num_new);

// Gives the row `child` the table of the row `parent`, whose blocks get one reference more, and the state that steps
// read and write. What says whose sequence it is, it does not get. Returns how many of the blocks got their second
// reference. Throws ArgumentError, before anything is written, for a row or a block that is out of range.
int64_t fork_row(const StepTables& pool, int64_t parent, int64_t child);

// Blocks of sequences, in the order of the sequences and of their tables: the row, the entry in its table, the block,
// and the block of the entry before, or -1.
struct FullBlocks {
  std::vector<int64_t> rows, entries, blocks, before;
};

// Returns the blocks that become full when the sequences rows[size] have context_lens[size] computed tokens. Throws
// ArgumentError if a row, an entry or a block is outside the tables.
FullBlocks full_blocks(const StepTables& pool, const int64_t* rows, const int32_t* context_lens, int64_t size);

}  // namespace kvservice
