// Cuts attention into pieces of about equal work (some rows of one sequence and KV head against some of their keys),
// runs them on all threads and puts the pieces of split rows together (flash decoding).
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

constexpr int64_t kUnitTokens = 16;
// Work is counted in bytes of K and V read, each row beyond the first four as much again.
constexpr int64_t kInlineWork = 192 * 1024;
constexpr int64_t kPieceWorkMin = 64 * 1024;
constexpr int64_t kPiecesPerThread = 6;

// Rows of one sequence and KV head, the keys that any of them sees, and where their pieces' results start.
struct Task {
  int64_t seq;
  int64_t first_token;
  int64_t kv_head;
  int64_t row_begin;
  int64_t row_end;
  int64_t key_begin;
  int64_t key_end;
  int64_t first_piece;
  int64_t num_pieces;

  int64_t rows() const { return row_end - row_begin; }
};

struct Piece {
  int64_t task;
  int64_t key_begin;
  int64_t key_end;
  int64_t result;  // in floats, from the start of the results
};

// Memory of one thread, kept between calls.
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
  const int64_t token_bytes = 2 * p.pool.head_size * item_size(p.pool.dtype);
  return (task.key_end - task.key_begin) * token_bytes * std::max<int64_t>(1, (task.rows() + 3) / 4);
}

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
  void add_tasks(int64_t seq, int64_t first_token, int64_t max_rows) {
    const int64_t group = p_.group_size(), rows = p_.query_lens[seq] * group;
    const int64_t first_position = p_.context_lens[seq] - p_.query_lens[seq];
    // The longest first: the last rows of a sequence see the most keys.
    for (int64_t end = rows; end > 0; end -= std::min(end, max_rows)) {
      const int64_t begin = std::max<int64_t>(0, end - max_rows);
      for (int64_t head = 0; head < p_.pool.num_kv_heads; ++head) {
        tasks.push_back({seq, first_token, head, begin, end, first_visible(p_, first_position + begin / group),
                         first_position + (end - 1) / group + 1, 0, 0});
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
      const int64_t step = ((keys + parts - 1) / parts + 8 * kUnitTokens - 1) / (8 * kUnitTokens) * 8 * kUnitTokens;
      task.first_piece = static_cast<int64_t>(pieces.size());
      for (int64_t begin = task.key_begin; begin < task.key_end;) {
        const int64_t end = std::min(task.key_end, (begin / kUnitTokens) * kUnitTokens + step);
        pieces.push_back({static_cast<int64_t>(i), begin, end, result_floats});
        result_floats += task.rows() * (p_.pool.head_size + 2);
        begin = end;
      }
      task.num_pieces = static_cast<int64_t>(pieces.size()) - task.first_piece;
    }
  }

  const AttentionParams& p_;
};

void run_piece(const AttentionParams& p, const Plan& plan, const Piece& piece, const AttentionKernel& kernel,
               float* results) {
  thread_local Scratch scratch;
  const Task& task = plan.tasks[static_cast<size_t>(piece.task)];
  const int64_t rows = task.rows();
  float* result = results + piece.result;
  kernel.attend({&p, p.block_tables + task.seq * p.max_blocks, task.first_token, p.query_lens[task.seq],
                 p.context_lens[task.seq], task.kv_head, task.row_begin, task.row_end, piece.key_begin, piece.key_end,
                 result, result + rows, result + 2 * rows},
                scratch.reserve(kernel.scratch_bytes(p.pool.head_size, rows)));
}

// Puts row `r` of a task together from its pieces: the first one's result becomes the whole one's.
void merge_row(const Plan& plan, const Task& task, int64_t r, int64_t head_size, float* results) {
  const int64_t rows = task.rows();
  const auto first = static_cast<size_t>(task.first_piece);
  float* whole = results + plan.pieces[first].result;
  for (int64_t i = 1; i < task.num_pieces; ++i) {
    const float* part = results + plan.pieces[first + static_cast<size_t>(i)].result;
    if (part[rows + r] == 0.0F) continue;
    const float max = std::max(whole[r], part[r]);
    const float keep = std::exp(whole[r] - max), add = std::exp(part[r] - max);
    whole[r] = max;
    whole[rows + r] = whole[rows + r] * keep + part[rows + r] * add;
    float* acc = whole + 2 * rows + r * head_size;
    const float* other = part + 2 * rows + r * head_size;
    for (int64_t d = 0; d < head_size; ++d) acc[d] = acc[d] * keep + other[d] * add;
  }
}

void finish_task(const AttentionParams& p, const Plan& plan, const Task& task, const CpuKernels& kernels,
                 float* results) {
  const int64_t group = p.group_size(), size = p.pool.head_size, rows = task.rows();
  const auto dtype = static_cast<int>(p.pool.dtype);
  for (int64_t r = 0; r < rows; ++r) {
    merge_row(plan, task, r, size, results);
    const float* whole = results + plan.pieces[static_cast<size_t>(task.first_piece)].result;
    const int64_t row = task.row_begin + r;
    const int64_t out = (task.first_token + row / group) * p.num_heads + task.kv_head * group + row % group;
    kernels.store_row[dtype](static_cast<char*>(p.out) + out * size * item_size(p.pool.dtype),
                             whole + 2 * rows + r * size, 1.0F / whole[rows + r], size);
    if (p.lse != nullptr) p.lse[out] = whole[r] + std::log(whole[rows + r]);
  }
}

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
  thread_local Scratch scratch;
  const CpuKernels& kernels = cpu_kernels();
  const AttentionKernel& kernel = kernels.attention[static_cast<int>(p.pool.dtype)];
  const Plan plan(p, kernel.max_rows);
  auto* results = reinterpret_cast<float*>(scratch.reserve(plan.result_floats * static_cast<int64_t>(sizeof(float))));
  const auto run = [&](int64_t i) { run_piece(p, plan, plan.pieces[static_cast<size_t>(i)], kernel, results); };
  const auto finish = [&](int64_t i) { finish_task(p, plan, plan.tasks[static_cast<size_t>(i)], kernels, results); };
  const auto num_pieces = static_cast<int64_t>(plan.pieces.size());
  const auto num_tasks = static_cast<int64_t>(plan.tasks.size());
  if (plan.work <= kInlineWork) {
    for (int64_t i = 0; i < num_pieces; ++i) run(i);
    for (int64_t i = 0; i < num_tasks; ++i) finish(i);
  } else {
    parallel_for(num_pieces, run);
    parallel_for(num_tasks, finish);
  }
}

}  // namespace kvservice
