#include "blocks/tables.h"

#include <algorithm>
#include <cstring>

#include "errors.h"

namespace kvservice {
namespace {

void check_blocks(const int64_t* blocks, int64_t size, int64_t num_blocks) {
  for (int64_t i = 0; i < size; ++i) {
    require(blocks[i] >= 0 && blocks[i] < num_blocks, "blocks", "is outside the pool");
  }
}

}  // namespace

int64_t first_negative(const int32_t* numbers, int64_t size) {
  int32_t signs = 0;  // without a branch, so that the compiler takes many at a time
  for (int64_t i = 0; i < size; ++i) signs |= numbers[i];
  if (signs >= 0) return -1;
  return std::find_if(numbers, numbers + size, [](int32_t number) { return number < 0; }) - numbers;
}

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

AddedReferences add_references(int32_t* ref_count, int64_t num_blocks, const int64_t* blocks, int64_t size) {
  check_blocks(blocks, size, num_blocks);
  AddedReferences added;
  for (int64_t i = 0; i < size; ++i) {
    const int32_t before = ref_count[blocks[i]]++;
    if (before == 0) added.first.push_back(blocks[i]);
    added.num_shared += before == 1 ? 1 : 0;
  }
  return added;
}

DroppedReferences drop_references(int32_t* ref_count, int64_t num_blocks, const int64_t* blocks, int64_t size) {
  check_blocks(blocks, size, num_blocks);
  DroppedReferences dropped;
  for (int64_t i = 0; i < size; ++i) {
    const int32_t before = ref_count[blocks[i]]--;
    if (before <= 0) {
      for (; i >= 0; --i) ++ref_count[blocks[i]];
      throw ArgumentError("blocks", "has fewer references than are dropped");
    }
    if (before == 1) dropped.last.push_back(blocks[i]);
    dropped.num_unshared += before == 2 ? 1 : 0;
  }
  return dropped;
}

DistinctBlocks distinct_blocks(const int64_t* blocks, int64_t size, int64_t* inverse) {
  constexpr int64_t kLimit = int64_t{1} << 31;
  require(size < kLimit, "blocks", "are too many");
  check_blocks(blocks, size, kLimit);
  std::vector<int64_t> order(static_cast<size_t>(size));  // the blocks, each with its index in the lower half
  for (int64_t i = 0; i < size; ++i) order[i] = blocks[i] << 32 | i;
  std::sort(order.begin(), order.end());
  DistinctBlocks distinct;
  for (const int64_t one : order) {
    if (distinct.blocks.empty() || distinct.blocks.back() != one >> 32) {
      distinct.blocks.push_back(one >> 32);
      distinct.counts.push_back(0);
    }
    ++distinct.counts.back();
    inverse[one & (kLimit - 1)] = static_cast<int64_t>(distinct.blocks.size()) - 1;
  }
  return distinct;
}

bool plan_decode(const StepTables& pool, const DecodeBatch& batch, DecodePlan& plan) {
  const int shift = pool.shift;
  const int64_t mask = (int64_t{1} << shift) - 1;
  for (int64_t i = 0; i < batch.size; ++i) {
    const int64_t row = batch.rows[i];
    require(row >= 0 && row < pool.num_rows, "rows", "is not a row of the tables");
    const int64_t* state =
        batch.states != nullptr ? batch.states + i * pool.num_columns : pool.states + row * pool.num_columns;
    const int64_t position = state[kLength], entry = position >> shift;
    if (batch.tokens[i] < 0 || (batch.expected != nullptr && batch.expected[i] != position)) return false;
    if (state[kSwapped] != 0 || position != state[kNumComputed] || position >= pool.max_length) return false;
    require(position >= 0 && entry < pool.width, "states", "has a length outside the table");
    plan.lengths[i] = position + 1;
    plan.context_lens[i] = static_cast<int32_t>(position + 1);
    plan.slots[i] = position & mask;
    if (entry >= state[kNumBlocks]) {
      plan.fresh.push_back(i);
      continue;
    }
    const int64_t block = pool.tables[row * pool.width + entry];
    require(block >= 0 && block < pool.num_blocks, "tables", "has a block outside the pool");
    if (pool.ref_count[block] > 1 || pool.indexed[block]) return false;
    plan.slots[i] += block << shift;
  }
  return true;
}

void append_tokens(const StepTables& pool, const int64_t* rows, int64_t* slots, const int32_t* tokens, int64_t size,
                   const int64_t* fresh, const int64_t* blocks, int64_t num_fresh) {
  const int64_t num_slots = pool.num_blocks << pool.shift;
  for (int64_t i = 0; i < size; ++i) require(slots[i] >= 0 && slots[i] < num_slots, "slots", "is outside the pool");
  for (int64_t i = 0; i < num_fresh; ++i) {
    require(fresh[i] >= 0 && fresh[i] < size, "fresh", "is no index of a row");
    require(i == 0 || fresh[i] > fresh[i - 1], "fresh", "is not ascending");
    const int64_t row = rows[fresh[i]];
    require(row >= 0 && row < pool.num_rows, "rows", "is not a row of the tables");
    const int64_t entry = pool.states[row * pool.num_columns + kNumBlocks];
    require(entry >= 0 && entry < pool.width, "states", "has a table that is full");
    require(blocks[i] >= 0 && blocks[i] < pool.num_blocks, "blocks", "is outside the pool");
    require(slots[fresh[i]] >> pool.shift == 0, "slots", "is no offset in a new block");
  }
  for (int64_t i = 0; i < num_fresh; ++i) {
    const int64_t row = rows[fresh[i]];
    int64_t& entry = pool.states[row * pool.num_columns + kNumBlocks];
    pool.tables[row * pool.width + entry] = static_cast<int32_t>(blocks[i]);
    ++entry;
    slots[fresh[i]] += blocks[i] << pool.shift;
  }
  for (int64_t i = 0; i < size; ++i) pool.token_ids[slots[i]] = tokens[i];
}

std::vector<int64_t> start_step(const StepTables& pool, const int64_t* rows, const int64_t* lengths, int64_t size,
                                int64_t step) {
  for (int64_t i = 0; i < size; ++i) {
    require(rows[i] >= 0 && rows[i] < pool.num_rows, "rows", "is not a row of the tables");
  }
  std::vector<int64_t> replaced;
  for (int64_t i = 0; i < size; ++i) {
    int64_t* state = pool.states + rows[i] * pool.num_columns;
    if (replaced.empty() || replaced.back() != state[kStep]) replaced.push_back(state[kStep]);
    state[kLength] = lengths[i];
    state[kStep] = step;
  }
  std::sort(replaced.begin(), replaced.end());
  replaced.erase(std::unique(replaced.begin(), replaced.end()), replaced.end());
  return replaced;
}

void create_sequences(const StepTables& pool, const std::vector<NewSequence>& sequences, const int64_t* blocks,
                      int64_t num_new) {
  const int64_t block_size = int64_t{1} << pool.shift;
  int64_t needed = 0;
  for (const NewSequence& one : sequences) {
    require(one.row >= 0 && one.row < pool.num_rows, "rows", "is not a row of the tables");
    const int64_t entries = (one.num_tokens + block_size - 1) >> pool.shift;
    require(one.num_found <= entries && entries <= pool.width, "tokens", "do not fit into the table");
    check_blocks(one.found, one.num_found, pool.num_blocks);
    needed += entries - one.num_found;
  }
  require(needed == num_new, "blocks", "are not as many as the sequences need");
  check_blocks(blocks, num_new, pool.num_blocks);
  for (const NewSequence& one : sequences) {
    int32_t* table = pool.tables + one.row * pool.width;
    int64_t entry = 0;
    for (; entry < one.num_found; ++entry) table[entry] = static_cast<int32_t>(one.found[entry]);
    const int64_t computed = one.num_found << pool.shift;
    for (int64_t done = computed; done < one.num_tokens; done += block_size, ++entry, ++blocks) {
      table[entry] = static_cast<int32_t>(*blocks);
      const int64_t count = std::min(block_size, one.num_tokens - done);
      std::memcpy(pool.token_ids + (*blocks << pool.shift), one.tokens + done,
                  static_cast<size_t>(count) * sizeof(int32_t));
    }
    int64_t* state = pool.states + one.row * pool.num_columns;
    state[kLength] = one.num_tokens;
    state[kNumComputed] = computed;
    state[kNumBlocks] = entry;
    state[kStep] = state[kSwapped] = 0;
  }
}

int64_t fork_row(const StepTables& pool, int64_t parent, int64_t child) {
  require(parent >= 0 && parent < pool.num_rows, "parent", "is not a row of the tables");
  require(child >= 0 && child < pool.num_rows && child != parent, "child", "is not another row of the tables");
  const int32_t* table = pool.tables + parent * pool.width;
  const int64_t* state = pool.states + parent * pool.num_columns;
  const int64_t size = state[kNumBlocks];
  require(size >= 0 && size <= pool.width, "states", "has a table that is too large");
  for (int64_t i = 0; i < size; ++i) {
    require(table[i] >= 0 && table[i] < pool.num_blocks, "tables", "has a block outside the pool");
  }
  int64_t num_shared = 0;
  for (int64_t i = 0; i < size; ++i) num_shared += pool.ref_count[table[i]]++ == 1 ? 1 : 0;
  std::copy_n(table, size, pool.tables + child * pool.width);
  std::copy_n(state, int64_t{kStepColumns}, pool.states + child * pool.num_columns);
  return num_shared;
}

FullBlocks full_blocks(const StepTables& pool, const int64_t* rows, const int32_t* context_lens, int64_t size) {
  FullBlocks full;
  for (int64_t i = 0; i < size; ++i) {
    const int64_t row = rows[i];
    require(row >= 0 && row < pool.num_rows, "rows", "is not a row of the tables");
    const int64_t first = pool.states[row * pool.num_columns + kNumComputed] >> pool.shift;
    const int64_t stop = context_lens[i] >> pool.shift;
    require(first >= 0 && stop <= pool.width, "context_lens", "is outside the table");
    const int32_t* table = pool.tables + row * pool.width;
    for (int64_t entry = first; entry < stop; ++entry) {
      const int64_t block = table[entry], before = entry > 0 ? table[entry - 1] : -1;
      require(block >= 0 && block < pool.num_blocks, "tables", "has a block outside the pool");
      require((entry == 0 || before >= 0) && before < pool.num_blocks, "tables", "has a block outside the pool");
      full.rows.push_back(row);
      full.entries.push_back(entry);
      full.blocks.push_back(block);
      full.before.push_back(before);
    }
  }
  return full;
}

}  // namespace kvservice
