// Divides attention into pieces of about equal work (some rows of one sequence and KV head against some of their keys),
// runs them on all threads and merges the pieces of split rows (flash decoding).
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cpu/attention_kernel.h"
#include "cpu/parallel.h"
#include "errors.h"

namespace kvservice {
namespace {

// Work is measured in bytes of K and V read. Every four rows count as one read.
constexpr int64_t kInlineWork = 192 * 1024;
constexpr int64_t kPieceWorkMin = 64 * 1024;
constexpr int64_t kPiecesPerThread = 6;
// Pieces begin at multiples of this many keys, so that they share no tile.
constexpr int64_t kPieceKeys = 128;
// With at most kFewRows rows, a task takes several KV heads, up to kRowsTogether rows in all, whose accumulators stay
// in L2.
constexpr int64_t kFewRows = 16;
constexpr int64_t kRowsTogether = 64;

// Rows of one sequence for some KV heads, the keys that any of them sees, and the pieces.
struct Task {
  int64_t seq;
  int64_t first_token;
  int64_t head_begin;
  int64_t head_end;
  int64_t row_begin;
  int64_t row_end;
  int64_t key_begin;
  int64_t key_end;
  int64_t first_piece = 0;
  int64_t num_pieces = 0;

  int64_t rows() const { return (head_end - head_begin) * (row_end - row_begin); }
};

struct Piece {
  int64_t task;
  int64_t key_begin;
  int64_t key_end;
  int64_t result;  // of a split task: offset into the results, in floats
};

// Memory of one thread, reused between calls.
class Scratch {
 public:
  char* reserve(int64_t bytes) {
    if (bytes > size_) {
      const auto rounded = static_cast<size_t>((bytes + 4095) / 4096 * 4096);
      memory_.reset(static_cast<char*>(std::aligned_alloc(64, rounded)));
      if (!memory_) throw std::bad_alloc();
      size_ = static_cast<int64_t>(rounded);
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> memory_;
  int64_t size_ = 0;
};

int64_t first_visible(const AttentionParams& p, int64_t position) {
  return p.sliding_window > 0 ? std::max<int64_t>(0, position - p.sliding_window + 1) : 0;
}

int64_t work_of(const AttentionParams& p, const Task& task) {
  const int64_t token_bytes = 2 * p.pool.head_size * item_size(p.pool.dtype) * (task.head_end - task.head_begin);
  return (task.key_end - task.key_begin) * token_bytes * ((task.row_end - task.row_begin + 3) / 4);
}

int64_t result_size(const AttentionParams& p, const Task& task) { return task.rows() * (p.pool.head_size + 2); }

class Plan {
 public:
  Plan(const AttentionParams& p, int64_t max_rows) : p_(p) {
    int64_t first_token = 0;
    for (int64_t seq = 0; seq < p.num_seqs; ++seq) {
      add_tasks(seq, first_token, max_rows);
      first_token += p.query_lens[seq];
    }
    split();
  }

  std::vector<Task> tasks;
  std::vector<Piece> pieces;
  int64_t result_floats = 0;
  int64_t work = 0;

 private:
  // A task with few rows takes several KV heads, since the heads of a block are adjacent. A task with many rows takes
  // one head, whose keys and values then stay in the cache.
  void add_tasks(int64_t seq, int64_t first_token, int64_t max_rows) {
    const int64_t group = p_.group_size(), rows = p_.query_lens[seq] * group;
    const int64_t first_position = p_.context_lens[seq] - p_.query_lens[seq];
    const int64_t heads = rows > kFewRows ? 1 : kRowsTogether / std::max<int64_t>(1, rows);
    // Longest first: the last rows of a sequence see the most keys.
    for (int64_t end = rows; end > 0; end -= std::min(end, max_rows)) {
      const int64_t begin = std::max<int64_t>(0, end - max_rows);
      for (int64_t head = 0; head < p_.pool.num_kv_heads; head += heads) {
        tasks.push_back({seq, first_token, head, std::min(p_.pool.num_kv_heads, head + heads), begin, end,
                         first_visible(p_, first_position + begin / group), first_position + (end - 1) / group + 1});
        work += work_of(p_, tasks.back());
      }
    }
  }

  void split() {
    const int64_t share = std::max(kPieceWorkMin, work / (num_threads() * kPiecesPerThread));
    const bool whole = work <= kInlineWork || num_threads() == 1;
    for (size_t i = 0; i < tasks.size(); ++i) {
      Task& task = tasks[i];
      const int64_t keys = task.key_end - task.key_begin;
      const int64_t parts = whole ? 1 : std::max<int64_t>(1, work_of(p_, task) / share);
      const int64_t step = ((keys + parts - 1) / parts + kPieceKeys - 1) / kPieceKeys * kPieceKeys;
      task.first_piece = static_cast<int64_t>(pieces.size());
      for (int64_t begin = task.key_begin; begin < task.key_end;) {
        const int64_t end = parts == 1 ? task.key_end : std::min(task.key_end, begin / kPieceKeys * kPieceKeys + step);
        pieces.push_back({static_cast<int64_t>(i), begin, end, result_floats});
        if (begin != task.key_begin || end != task.key_end) result_floats += result_size(p_, task);
        begin = end;
      }
      task.num_pieces = static_cast<int64_t>(pieces.size()) - task.first_piece;
    }
  }

  const AttentionParams& p_;
};

AttentionPiece describe(const AttentionParams& p, const Task& task, const Piece& piece, float* result) {
  return {&p,
          p.block_tables + task.seq * p.max_blocks,
          task.first_token,
          p.query_lens[task.seq],
          p.context_lens[task.seq],
          task.head_begin,
          task.head_end,
          task.row_begin,
          task.row_end,
          piece.key_begin,
          piece.key_end,
          result,
          result + task.rows(),
          result + 2 * task.rows()};
}

// Divides by the sums and writes the output.
void finish(const AttentionPiece& whole, const CpuKernels& kernels) {
  const AttentionParams& p = *whole.params;
  const int64_t size = p.pool.head_size, count = whole.heads() * whole.rows();
  const auto dtype = static_cast<int>(p.pool.dtype);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = whole.query_row(whole.row_begin + i % whole.rows()) + i / whole.rows() * p.group_size();
    kernels.store_row[dtype](static_cast<char*>(p.out) + row * size * item_size(p.pool.dtype), whole.acc + i * size,
                             1.0F / whole.sum[i], size);
    if (p.lse != nullptr) p.lse[row] = whole.max[i] + std::log(whole.sum[i]);
  }
}

// Merges `part`, the result for other keys, into `whole`.
void merge(const AttentionPiece& part, const AttentionPiece& whole) {
  const int64_t size = whole.params->pool.head_size, count = whole.heads() * whole.rows();
  for (int64_t i = 0; i < count; ++i) {
    if (part.sum[i] == 0.0F) continue;
    const float max = std::max(whole.max[i], part.max[i]);
    const float keep = std::exp(whole.max[i] - max), add = std::exp(part.max[i] - max);
    whole.max[i] = max;
    whole.sum[i] = whole.sum[i] * keep + part.sum[i] * add;
    for (int64_t d = i * size; d < (i + 1) * size; ++d) whole.acc[d] = whole.acc[d] * keep + part.acc[d] * add;
  }
}

class Run {
 public:
  Run(const AttentionParams& p, const CpuKernels& kernels, const Plan& plan, float* results)
      : p_(p), kernels_(kernels), plan_(plan), results_(results) {}

  void attend(int64_t index) const {
    thread_local Scratch scratch;
    const AttentionKernel& kernel = kernels_.attention[static_cast<int>(p_.pool.dtype)];
    const Piece& piece = plan_.pieces[static_cast<size_t>(index)];
    const Task& task = plan_.tasks[static_cast<size_t>(piece.task)];
    const int64_t work_bytes = (kernel.scratch_bytes(p_.pool.head_size, task.rows()) + 63) / 64 * 64;
    char* memory = scratch.reserve(work_bytes + result_size(p_, task) * static_cast<int64_t>(sizeof(float)));
    const bool whole = task.num_pieces == 1;
    float* result = whole ? reinterpret_cast<float*>(memory + work_bytes) : results_ + piece.result;
    const AttentionPiece description = describe(p_, task, piece, result);
    kernel.attend(description, memory);
    if (whole) finish(description, kernels_);
  }

  // Merges the pieces of a split task (flash decoding).
  void combine(int64_t index) const {
    const Task& task = plan_.tasks[static_cast<size_t>(index)];
    if (task.num_pieces == 1) return;
    const auto piece = [&](int64_t i) {
      const Piece& found = plan_.pieces[static_cast<size_t>(task.first_piece + i)];
      return describe(p_, task, found, results_ + found.result);
    };
    const AttentionPiece whole = piece(0);
    for (int64_t i = 1; i < task.num_pieces; ++i) merge(piece(i), whole);
    finish(whole, kernels_);
  }

 private:
  const AttentionParams& p_;
  const CpuKernels& kernels_;
  const Plan& plan_;
  float* results_;
};

}  // namespace

void check_attention(const AttentionParams& p) {
  int64_t tokens = 0;
  for (int64_t seq = 0; seq < p.num_seqs; ++seq) {
    const int64_t query_len = p.query_lens[seq], context_len = p.context_lens[seq];
    const std::string of = " of sequence " + std::to_string(seq);
    if (query_len < 0) throw ArgumentError("query_lens", "length" + of + " is negative");
    if (context_len < query_len) {
      throw ArgumentError("context_lens", "length" + of + " is less than its query length");
    }
    if (context_len > p.max_blocks * p.pool.block_size) {
      throw ArgumentError("context_lens", "length" + of + " is more than its block table holds");
    }
    tokens += query_len;
    if (query_len == 0) continue;
    const int32_t* table = p.block_tables + seq * p.max_blocks;
    const int64_t first = first_visible(p, context_len - query_len) / p.pool.block_size;
    for (int64_t i = first; i * p.pool.block_size < context_len; ++i) {
      if (table[i] < 0 || table[i] >= p.pool.num_blocks) {
        throw ArgumentError("block_tables", "block id " + std::to_string(table[i]) + " at index " + std::to_string(i) +
                                                of + " is outside a pool of " + std::to_string(p.pool.num_blocks) +
                                                " blocks");
      }
    }
  }
  if (tokens != p.num_tokens) {
    throw ArgumentError("query_lens",
                        "sum is " + std::to_string(tokens) + ", query has " + std::to_string(p.num_tokens) + " tokens");
  }
}

void attention_cpu(const AttentionParams& p) {
  thread_local Scratch results;
  const CpuKernels& kernels = cpu_kernels();
  const Plan plan(p, kernels.attention[static_cast<int>(p.pool.dtype)].max_rows);
  const auto bytes = plan.result_floats * static_cast<int64_t>(sizeof(float));
  const Run run(p, kernels, plan, reinterpret_cast<float*>(results.reserve(bytes)));
  const auto num_pieces = static_cast<int64_t>(plan.pieces.size()), num_tasks = static_cast<int64_t>(plan.tasks.size());
  if (plan.work <= kInlineWork) {
    for (int64_t i = 0; i < num_pieces; ++i) run.attend(i);
    return;
  }
  parallel_for(num_pieces, [&](int64_t i) { run.attend(i); });
  if (plan.result_floats > 0) parallel_for(num_tasks, [&](int64_t i) { run.combine(i); });
}

}  // namespace kvservice
