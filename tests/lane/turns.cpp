// Large work beside small work, with kernels that wait at gates: threads of the pool, and calls of lanes. Exits with 1
// if small work waits for large work.
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "cpu/parallel.h"
#include "lane/cpu_executor.h"

namespace {

// Opens once for all.
class Gate {
 public:
  void open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_open_ = true;
    opened_.notify_all();
  }

  void wait(const char* what) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (opened_.wait_for(lock, std::chrono::seconds(60), [this] { return is_open_; })) return;
    std::fprintf(stderr, "in vain: waited until %s\n", what);
    std::_Exit(1);
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool is_open_ = false;
};

constexpr int32_t kLarge = 4096, kSmall = 1;
Gate large_begins, large_may_end;

}  // namespace

// Stand-ins for the kernels, which the executor calls.
namespace kvservice {

void check_slots(const KvSlotsParams&, const char*) {}
void check_attention(const AttentionParams&) {}
void write_kv_cpu(const KvSlotsParams&) {}

void attention_cpu(const AttentionParams& p) {
  if (p.num_tokens != kLarge) return;
  large_begins.open();
  large_may_end.wait("the call of the other lane has ended");
}

}  // namespace kvservice

namespace {

using namespace kvservice;

void attend(CpuLaneExecutor& executor, const int32_t& num_tokens) {
  LaneStep step;
  step.num_tokens = num_tokens;
  step.num_seqs = 1;
  step.host.query_lens = step.host.context_lens = &num_tokens;
  LaneCall call;
  call.step = &step;
  call.num_heads = 8;
  executor.attend(call);
}

void lanes() {
  PoolView pool;
  pool.num_layers = pool.num_kv_heads = 1;
  pool.head_size = 128;
  CpuLaneExecutor executor(pool, false);
  std::thread other([&] { attend(executor, kLarge); });
  large_begins.wait("the large call has begun");
  attend(executor, kSmall);
  large_may_end.open();
  other.join();
}

// The only thread of the pool is in a large job. It leaves it for the small one, of which it has half.
void pool() {
  set_num_threads(2);
  Gate helper_begins, helper_may_go_on, small_has_helper, caller_may_end;
  int indices_of_helper = 0, indices_before_small = 0;
  std::thread large([&] {
    const auto caller = std::this_thread::get_id();
    parallel_for(100, [&](int64_t) {
      if (std::this_thread::get_id() == caller) return caller_may_end.wait("the small job has ended");
      ++indices_of_helper;
      helper_begins.open();
      helper_may_go_on.wait("the small job has begun");
    });
  });
  helper_begins.wait("the pool's thread helps the large job");
  const auto caller = std::this_thread::get_id();
  parallel_for(2, [&](int64_t) {
    if (std::this_thread::get_id() != caller) {
      indices_before_small = indices_of_helper;
      return small_has_helper.open();
    }
    helper_may_go_on.open();
    small_has_helper.wait("the pool's thread helps the small job");
  });
  if (indices_before_small != 1) {
    std::fprintf(stderr, "the pool's thread went on with the large job: %d indices\n", indices_before_small);
    std::_Exit(1);
  }
  caller_may_end.open();
  large.join();
}

}  // namespace

int main() {
  lanes();
  pool();
}
