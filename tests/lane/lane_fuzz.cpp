// Fuzzes lanes by writing to their memory. Usage: lane_fuzz SECONDS SEED. It is compiled with sanitizers, which detect
// memory errors and races.
//
// The fuzzed session has two lanes. One receives random bytes, the other well-formed entries with random fields. At the
// same time its steps are published and retired, its regions are added and removed, and their memory is freed
// immediately. An honest session shares the executor, and its lane must return correct answers throughout. In the pool,
// the fuzzed session's steps write the first half of each of the first blocks, the honest session's steps write the
// last blocks, and nothing else may change.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kv_slots.h"
#include "lane/client.h"
#include "lane/cpu_executor.h"
#include "lane/server.h"
#include "lane/waiting.h"

namespace kvservice {
namespace {

constexpr int64_t kBlocks = 64, kFuzzedBlocks = 32, kFirstHonest = 48, kBlockSize = 4, kLayers = 2, kKvHeads = 2,
                  kHeadSize = 32, kRegionBytes = 65536;

using Random = std::mt19937_64;

int64_t below(Random& random, int64_t bound) { return static_cast<int64_t>(random() % static_cast<uint64_t>(bound)); }

void check(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "lane_fuzz: %s\n", what);
  std::abort();
}

struct Pool {
  std::vector<float> memory;
  PoolView view;

  Pool() {
    view.num_blocks = kBlocks, view.num_layers = kLayers, view.num_kv_heads = kKvHeads;
    view.head_size = kHeadSize, view.block_size = kBlockSize;
    memory.resize(static_cast<size_t>(kBlocks * view.block_bytes() / 4));
    Random random(1);
    std::normal_distribution<float> normal;
    for (float& value : memory) value = normal(random);
    view.data = reinterpret_cast<char*>(memory.data());
  }

  // Returns keys and values of all slots for which `wanted(block, offset)` is true.
  template <class Wanted>
  std::vector<float> read(const Wanted& wanted) {
    std::vector<int64_t> slots;
    for (int64_t slot = 0; slot < kBlocks * kBlockSize; ++slot) {
      if (wanted(slot / kBlockSize, slot % kBlockSize)) slots.push_back(slot);
    }
    const size_t size = slots.size() * kKvHeads * kHeadSize;
    std::vector<float> found(2 * size * kLayers);
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      KvSlotsParams p;
      p.pool = view;
      p.layer = layer;
      p.num_tokens = static_cast<int64_t>(slots.size());
      p.slots = slots.data();
      p.key = reinterpret_cast<char*>(found.data() + static_cast<size_t>(2 * layer) * size);
      p.value = p.key + 4 * size;
      read_kv_cpu(p);
    }
    return found;
  }

  std::vector<float> read_untouchable() {
    return read([](int64_t block, int64_t offset) {
      return block < kFuzzedBlocks ? offset >= kBlockSize / 2 : block < kFirstHonest;
    });
  }
  std::vector<float> read_honest() {
    return read([](int64_t block, int64_t) { return block >= kFirstHonest; });
  }
};

// A step that owns its arrays.
struct OwnedStep {
  std::vector<int64_t> slots;
  std::vector<int32_t> query_lens, context_lens, block_tables;
  std::vector<uint8_t> written = std::vector<uint8_t>(kLayers);

  LaneStep view(int64_t id) {
    const auto num_seqs = static_cast<int64_t>(query_lens.size());
    return {id,
            static_cast<int64_t>(slots.size()),
            num_seqs,
            static_cast<int64_t>(block_tables.size()) / num_seqs,
            LaneTables{slots.data(), query_lens.data(), context_lens.data(), block_tables.data()},
            LaneTables{},
            written.data()};
  }
};

std::unique_ptr<OwnedStep> random_step(Random& random) {
  auto step = std::make_unique<OwnedStep>();
  const int64_t num_seqs = 1 + below(random, 3), max_blocks = 4;
  const bool decode = below(random, 2) == 0;
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    const int64_t query_len = decode ? 1 : below(random, 5);
    step->query_lens.push_back(static_cast<int32_t>(query_len));
    step->context_lens.push_back(static_cast<int32_t>(query_len + below(random, 8)));
    for (int64_t i = 0; i < max_blocks; ++i) {
      step->block_tables.push_back(static_cast<int32_t>(below(random, kFuzzedBlocks)));
    }
    for (int64_t i = 0; i < query_len; ++i) {
      step->slots.push_back(below(random, kFuzzedBlocks) * kBlockSize + below(random, kBlockSize / 2));
    }
  }
  if (below(random, 10) == 0) step->block_tables[0] = 1 << 20;
  return step;
}

struct Memory {
  void* data = std::aligned_alloc(4096, kLaneBytes);
  ~Memory() { std::free(data); }
};

// Reopens a lane over the same memory repeatedly.
class Lane {
 public:
  Lane(LaneSession& session, LaneExecutor& executor) : session_(session), executor_(executor) { open(); }

  LaneMemory& memory() { return *static_cast<LaneMemory*>(memory_.data); }
  bool closed() const { return server_->closed(); }
  int64_t calls = 0, errors = 0, lives = 0;

  void reopen() {
    server_->close();
    calls += server_->stats().calls();
    errors += server_->stats().errors();
    server_.reset();
    open();
  }

 private:
  void open() {
    ++lives;
    server_ = std::make_unique<LaneServer>(memory_.data, kLaneBytes, session_, executor_, lives % 3 == 0 ? 0.0 : 20.0,
                                           [](const std::string& text) { check(false, text.c_str()); });
  }

  LaneSession& session_;
  LaneExecutor& executor_;
  Memory memory_;
  std::unique_ptr<LaneServer> server_;
};

LanePlace random_place(Random& random, uint32_t newest_region) {
  if (below(random, 40) == 0) return {kNoRegion, 0, 0};
  LanePlace place = {newest_region - static_cast<uint32_t>(below(random, 4)), 0, 0};
  place.offset = static_cast<uint64_t>(below(random, 31) * 2048 + (below(random, 20) == 0 ? 8 : 0));
  if (below(random, 50) == 0) place.offset = random();
  return place;
}

LaneEntry random_entry(Random& random, uint64_t number, int64_t newest_step, uint32_t newest_region) {
  LaneEntry entry = {};
  entry.number = below(random, 40) == 0 ? random() : number;
  entry.step_id = newest_step + 1 - below(random, 6);
  entry.layer = static_cast<int32_t>(below(random, 20) == 0 ? below(random, 5) - 2 : below(random, kLayers));
  entry.flags = static_cast<uint32_t>(below(random, 20) == 0 ? random() : below(random, 4));
  entry.num_heads = static_cast<int32_t>(below(random, 10) == 0 ? below(random, 70000) - 10 : 2 + 2 * below(random, 3));
  const auto places = {&entry.query, &entry.key, &entry.value, &entry.output, &entry.lse, &entry.alibi_slopes};
  for (LanePlace* place : places) *place = random_place(random, newest_region);
  if ((entry.flags & kLaneReturnLse) == 0) entry.lse.region = kNoRegion;
  if (below(random, 2) == 0) entry.alibi_slopes.region = kNoRegion;
  if (below(random, 3) == 0) entry.sliding_window = static_cast<int32_t>(below(random, 9) - 1);
  if (below(random, 3) == 0) entry.logits_soft_cap = static_cast<float>(below(random, 9) - 1);
  if (below(random, 30) == 0) entry.scale = std::nanf("");
  if (below(random, 30) == 0) entry.block_sparse[below(random, 5)] = static_cast<int32_t>(random());
  return entry;
}

class Fuzz {
 public:
  explicit Fuzz(uint64_t seed) : seed_(seed), executor_(pool_.view, seed % 2 == 0) {}

  void run(int seconds) {
    const std::vector<float> untouchable = pool_.read_untouchable();
    std::vector<std::thread> threads;
    threads.emplace_back([this] { change(); });
    threads.emplace_back([this] { write_bytes(); });
    threads.emplace_back([this] { write_entries(); });
    threads.emplace_back([this] { honest(); });
    for (int i = 0; i < seconds; ++i) {
      ::sleep(1);
      check(pool_.read_untouchable() == untouchable, "something was written outside the steps' slots");
    }
    over_ = true;
    for (std::thread& thread : threads) thread.join();
    noisy_.reopen();
    formed_.reopen();
    check(pool_.read_untouchable() == untouchable, "something was written outside the steps' slots");
    check(formed_.calls > formed_.errors, "no entry was good enough to be computed");
    std::printf("random bytes: %lld calls, %lld lanes; entries: %lld calls, %lld errors, %lld lanes; honest: %lld\n",
                static_cast<long long>(noisy_.calls), static_cast<long long>(noisy_.lives),
                static_cast<long long>(formed_.calls), static_cast<long long>(formed_.errors),
                static_cast<long long>(formed_.lives), static_cast<long long>(honest_calls_));
  }

 private:
  // Publishes and retires steps, adds and removes regions, and frees them.
  void change() {
    Random random(seed_ + 1);
    std::deque<std::pair<int64_t, std::unique_ptr<OwnedStep>>> steps;
    std::deque<std::pair<uint32_t, void*>> regions;
    while (!over_ || !steps.empty() || !regions.empty()) {
      if (!over_ && steps.size() < 4) {
        steps.emplace_back(newest_step_ + 1, random_step(random));
        fuzzed_.publish(steps.back().second->view(newest_step_ + 1));
        ++newest_step_;
      } else if (!steps.empty()) {
        const auto some = steps.begin() + below(random, static_cast<int64_t>(steps.size()));
        fuzzed_.retire(some->first);
        steps.erase(some);
      }
      if (!over_ && regions.size() < 4) {
        void* memory = std::aligned_alloc(16, kRegionBytes);
        auto* floats = static_cast<float*>(memory);
        std::generate(floats, floats + kRegionBytes / 4, [&] { return static_cast<float>(random() % 64) - 32.0F; });
        regions.emplace_back(fuzzed_.add_region(static_cast<char*>(memory), kRegionBytes), memory);
        newest_region_ = regions.back().first;
      } else if (!regions.empty() && (over_ || below(random, 8) == 0)) {
        const auto some = regions.begin() + below(random, static_cast<int64_t>(regions.size()));
        fuzzed_.remove_region(some->first);
        std::free(some->second);
        regions.erase(some);
      }
      finished_.take();
      std::this_thread::sleep_for(std::chrono::microseconds(below(random, 60)));
    }
  }

  void write_bytes() {
    Random random(seed_ + 2);
    while (!over_) {
      LaneMemory& lane = noisy_.memory();
      auto* words = reinterpret_cast<std::atomic<uint64_t>*>(&lane);
      for (int64_t i = below(random, 400); i > 0; --i) {
        const int64_t header = 8 * (1 + below(random, 8));  // skips the magic number, which only clients read
        words[below(random, 256) == 0 ? header : 512 + below(random, kLaneBytes / 8 - 512)].store(random());
      }
      lane.header.submitted.store(lane.header.completed.load() + static_cast<uint64_t>(below(random, 70)));
      if (below(random, 2) == 0) ring(lane.header.daemon_bell);
      std::this_thread::sleep_for(std::chrono::microseconds(below(random, 100)));
      if (noisy_.closed() || below(random, 1000) == 0) noisy_.reopen();
    }
  }

  void write_entries() {
    Random random(seed_ + 3);
    uint64_t submitted = 0;
    while (!over_) {
      LaneHeader& header = formed_.memory().header;
      for (int64_t i = below(random, 8); i > 0; --i, ++submitted) {
        store_slot(formed_.memory().entries[submitted % kLaneCapacity],
                   random_entry(random, submitted, newest_step_, newest_region_));
      }
      header.submitted.store(submitted);
      wake_if_asleep(header.daemon_sleeps, header.daemon_bell);
      while (!over_ && !formed_.closed() && submitted - header.completed.load() > 40) relax();
      header.consumed.store(header.completed.load());
      if (below(random, 2000) == 0) header.consumed.store(random());
      if (formed_.closed() || below(random, 5000) == 0) {
        formed_.reopen();
        submitted = 0;
      }
    }
  }

  void honest() {
    Random random(seed_ + 4);
    Pool mine;
    CpuLaneExecutor direct(mine.view, seed_ % 2 == 0);
    FinishedSteps finished;
    int64_t kept_ids[4] = {};
    LaneSession session(kLayers, finished, 0, kept_ids, 4);
    Memory memory;
    LaneServer server(memory.data, kLaneBytes, session, executor_, 20.0,
                      [](const std::string& text) { check(false, text.c_str()); });
    LaneClient client(memory.data, kLaneBytes, 20.0);
    constexpr int64_t kQuery = 2 * 4 * kHeadSize, kKv = 2 * kKvHeads * kHeadSize;
    std::vector<float> region(4 * kQuery + 64);
    auto* base = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(region.data()) + 15) / 16 * 16);
    std::array<float, kQuery> expected = {};
    const uint32_t number = session.add_region(reinterpret_cast<char*>(base), 4 * kQuery * 4);
    std::normal_distribution<float> normal;
    for (int64_t id = 0; !over_; ++id) {
      OwnedStep step;
      step.query_lens = {1, 1};
      step.context_lens = {static_cast<int32_t>(1 + below(random, 32)), static_cast<int32_t>(1 + below(random, 32))};
      for (int32_t block = kFirstHonest; block < kBlocks; ++block) step.block_tables.push_back(block);
      for (int64_t seq = 0; seq < 2; ++seq) {
        step.slots.push_back((kFirstHonest + 8 * seq) * kBlockSize + step.context_lens[static_cast<size_t>(seq)] - 1);
      }
      const LaneStep view = step.view(id);
      session.publish(view);
      std::generate(base, base + 4 * kQuery, [&] { return normal(random); });
      LaneEntry entry = {};
      entry.step_id = id;
      entry.layer = static_cast<int32_t>(id % kLayers);
      entry.flags = kLaneDecode;
      entry.num_heads = 4;
      entry.query = {number, 0, 0};
      entry.key = {number, 0, kQuery * 4};
      entry.value = {number, 0, (kQuery + kKv) * 4};
      entry.output = {number, 0, 2 * kQuery * 4};
      entry.lse = entry.alibi_slopes = {kNoRegion, 0, 0};
      const uint64_t sent = client.submit(entry);
      std::optional<LaneCompletion> answer;
      while (!answer) answer = client.wait(sent, std::chrono::seconds(1));
      check(answer->ok == 1, answer->message);
      LaneCall call;
      call.step = &view;
      call.layer = entry.layer;
      call.num_heads = 4;
      call.options.scale = 1.0F / std::sqrt(static_cast<float>(kHeadSize));
      call.query = reinterpret_cast<char*>(base);
      call.key = call.query + kQuery * 4;
      call.value = call.key + kKv * 4;
      call.output = reinterpret_cast<char*>(expected.data());
      direct.attend(call);
      check(std::memcmp(expected.data(), base + 2 * kQuery, kQuery * 4) == 0, "an honest call had a wrong answer");
      if (id % 64 == 0) check(mine.read_honest() == pool_.read_honest(), "an honest session's blocks are wrong");
      session.retire(id);
      ++honest_calls_;
    }
    server.close();
  }

  const uint64_t seed_;
  Pool pool_;
  CpuLaneExecutor executor_;
  FinishedSteps finished_;
  int64_t kept_ids_[4] = {};
  LaneSession fuzzed_{kLayers, finished_, 0, kept_ids_, 4};
  Lane noisy_{fuzzed_, executor_}, formed_{fuzzed_, executor_};
  std::atomic<bool> over_{false};
  std::atomic<int64_t> newest_step_{0};
  std::atomic<uint32_t> newest_region_{0};
  int64_t honest_calls_ = 0;
};

}  // namespace
}  // namespace kvservice

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const int seconds = std::atoi(argv[1]);
  ::alarm(static_cast<unsigned>(seconds) + 60);  // ends the process if a call does not return
  kvservice::Fuzz fuzz(std::strtoull(argv[2], nullptr, 10));
  fuzz.run(seconds);
  return 0;
}
