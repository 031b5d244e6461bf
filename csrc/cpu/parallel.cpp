#include "cpu/parallel.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "errors.h"

namespace kvservice {
namespace {

constexpr int64_t kMaxThreads = 1024;
constexpr auto kSpin = std::chrono::microseconds(20);

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// Returns true as soon as `done()` holds, false if it does not hold within the spin time.
template <class Done>
bool spin_until(const Done& done) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

// One parallel_for. It is shared, so that a thread that is late still finds it, without work.
struct Job {
  const std::function<void(int64_t)>* body;
  int64_t count;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> left;

  Job(const std::function<void(int64_t)>* body, int64_t count) : body(body), count(count), left(count) {}

  // The indices that no thread has taken. It is below 0 when threads have looked for more.
  int64_t remaining() const { return count - next.load(); }

  // Works until nothing remains, or `enough()` holds after an index. Returns true if this call finished the last of the
  // work.
  template <class Enough>
  bool work(const Enough& enough) {
    int64_t done = 0;
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
      (*body)(i);
      ++done;
      if (enough()) break;
    }
    return done > 0 && left.fetch_sub(done) == done;
  }
};

class ThreadPool {
 public:
  explicit ThreadPool(int size) : size_(size) {
    for (int i = 1; i < size; ++i) threads_.emplace_back([this] { serve(); });
  }

  ~ThreadPool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      epoch_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  int size() const { return size_; }

  void run(int64_t count, const std::function<void(int64_t)>& body) {
    const auto job = std::make_shared<Job>(&body, count);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      jobs_.push_back(job);
      epoch_.fetch_add(1);
    }
    wake_.notify_all();
    job->work([] { return false; });
    const auto done = [&] { return job->left.load() == 0; };
    const bool spun = spin_until(done);
    std::unique_lock<std::mutex> lock(mutex_);
    jobs_.erase(std::find(jobs_.begin(), jobs_.end(), job));
    if (!spun) finished_.wait(lock, done);
  }

 private:
  void serve() {
    sigset_t all;  // the interpreter handles signals
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
    uint64_t seen = 0;
    for (;;) {
      std::shared_ptr<Job> job = smallest(seen);
      if (!job) {
        spin_until([&] { return epoch_.load() != seen; });
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return stopping_ || epoch_.load() != seen; });
        if (stopping_) return;
        continue;
      }
      if (job->work([&] { return epoch_.load() != seen; })) {
        const std::lock_guard<std::mutex> lock(mutex_);
        finished_.notify_all();
      }
    }
  }

  // Returns the job with the fewest indices left, so that a large one delays no small one; null if nothing remains.
  // Whoever called has a thread that works on its job alone, so each of them goes on.
  std::shared_ptr<Job> smallest(uint64_t& seen) {
    const std::lock_guard<std::mutex> lock(mutex_);
    seen = epoch_.load();
    std::shared_ptr<Job> found;
    int64_t fewest = std::numeric_limits<int64_t>::max();
    for (const auto& job : jobs_) {
      const int64_t remaining = job->remaining();
      if (remaining > 0 && remaining < fewest) {
        found = job;
        fewest = remaining;
      }
    }
    return found;
  }

  const int size_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable finished_;
  std::atomic<uint64_t> epoch_{0};
  bool stopping_ = false;
  std::vector<std::shared_ptr<Job>> jobs_;
  std::vector<std::thread> threads_;
};

int available_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
}

struct State {
  std::mutex mutex;
  int size = available_cpus();
  std::shared_ptr<ThreadPool> pool;
};

State* state = nullptr;

// A forked child has none of the threads and may have inherited a locked mutex, so it starts with a new state. The old
// state is leaked on purpose, since it cannot be destroyed safely.
void renew_state() {
  const int size = state->size;
  state = new State;
  state->size = size;
}

State& current_state() {
  static std::once_flag once;
  std::call_once(once, [] {
    state = new State;
    pthread_atfork(nullptr, nullptr, renew_state);
  });
  return *state;
}

std::shared_ptr<ThreadPool> current_pool() {
  State& current = current_state();
  const std::lock_guard<std::mutex> lock(current.mutex);
  if (!current.pool || current.pool->size() != current.size) {
    current.pool = std::make_shared<ThreadPool>(current.size);
  }
  return current.pool;
}

}  // namespace

int num_threads() {
  State& current = current_state();
  const std::lock_guard<std::mutex> lock(current.mutex);
  return current.size;
}

void set_num_threads(int64_t count) {
  require(count >= 1 && count <= kMaxThreads, "count", "must be between 1 and 1024");
  State& current = current_state();
  const std::lock_guard<std::mutex> lock(current.mutex);
  current.size = static_cast<int>(count);
}

void parallel_for(int64_t count, const std::function<void(int64_t)>& body) {
  if (count <= 1 || num_threads() == 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  current_pool()->run(count, body);
}

}  // namespace kvservice
