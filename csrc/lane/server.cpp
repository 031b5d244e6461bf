#include "lane/server.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

#include "errors.h"
#include "lane/error.h"
#include "lane/waiting.h"

namespace kvservice {
namespace {

LaneMemory& format(void* memory, int64_t num_bytes) {
  require(num_bytes >= kLaneBytes, "memory", "is smaller than a lane");
  require(reinterpret_cast<uintptr_t>(memory) % 64 == 0, "memory", "is not aligned to 64 bytes");
  std::memset(memory, 0, sizeof(LaneMemory));
  auto* lane = static_cast<LaneMemory*>(memory);
  lane->header.magic = kLaneMagic;
  lane->header.version = kLaneVersion;
  lane->header.capacity = kLaneCapacity;
  lane->header.entry_bytes = sizeof(LaneEntry);
  lane->header.completion_bytes = sizeof(LaneCompletion);
  lane->header.state.store(kLaneOpen, std::memory_order_release);
  return *lane;
}

template <size_t N>
void put_text(char (&to)[N], const char* text) {
  const size_t length = std::min(std::strlen(text), N - 1);
  std::memcpy(to, text, length);
}

LaneCompletion refusal(const char* reason, const char* field, const char* message) {
  LaneCompletion completion = {};
  put_text(completion.reason, reason);
  put_text(completion.field, field);
  put_text(completion.message, message);
  return completion;
}

void mask_signals() {  // the interpreter handles them
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);
}

}  // namespace

LaneServer::LaneServer(void* memory, int64_t num_bytes, LaneSession& session, LaneExecutor& executor, double spin_us,
                       std::function<void(const std::string&)> on_fault)
    : memory_(format(memory, num_bytes)),
      session_(session),
      executor_(executor),
      spin_(spin_time(spin_us)),
      on_fault_(std::move(on_fault)) {
  require(session.num_layers() == executor.shape().num_layers, "session",
          "does not have the number of layers of the executor");
  std::promise<void> ended;
  ended_ = ended.get_future();
  // Not joined: `on_fault` may need a lock of whoever closes the lane.
  std::thread([this, ended = std::move(ended)]() mutable { serve(std::move(ended)); }).detach();
}

LaneServer::~LaneServer() { close(); }

void LaneServer::close() {
  stopping_.store(true, std::memory_order_release);
  const std::lock_guard<std::mutex> lock(closing_);
  if (ended_.wait_for(std::chrono::seconds(0)) == std::future_status::ready) return;  // the memory may be gone
  ring(memory_.header.daemon_bell);
  ended_.wait();
}

void LaneServer::serve(std::promise<void> ended) {
  mask_signals();
  while (wait_for_entry()) {
    const auto begin = std::chrono::steady_clock::now();
    const auto entry = load_slot<LaneEntry>(memory_.entries[served_ % kLaneCapacity]);
    const LaneCompletion completion = answer(entry);
    stats_.count(std::chrono::steady_clock::now() - begin, completion.ok != 0);
    finish(completion);
    if (end_ == kLaneFault) break;
  }
  end(end_);
  if (end_ != kLaneFault) {
    ended.set_value();
    return;
  }
  const auto on_fault = std::move(on_fault_);
  const std::string fault = std::move(fault_);
  ended.set_value();  // from here on, this object may be gone
  on_fault(fault);
}

// Waits. Returns true if there is an entry to execute and space for its completion, false if the lane ends.
bool LaneServer::wait_for_entry() {
  const auto something = [this] {
    return next_entry() || end_ != kLaneClosed || stopping_.load(std::memory_order_acquire);
  };
  if (!spin_until(spin_, something)) {
    LaneHeader& header = memory_.header;
    do {
      sleep_until(header.daemon_sleeps, header.daemon_bell, kLongestSleep, something);
    } while (!something());
  }
  return end_ == kLaneClosed && !stopping_.load(std::memory_order_acquire);
}

bool LaneServer::next_entry() {
  const LaneHeader& header = memory_.header;
  const uint64_t waiting = header.submitted.load(std::memory_order_acquire) - served_;
  if (waiting > kLaneCapacity) end_ = kLaneBadIndex;
  if (waiting == 0 || waiting > kLaneCapacity) return false;
  if (served_ - consumed_ < kLaneCapacity) return true;
  const uint64_t consumed = header.consumed.load(std::memory_order_acquire);
  if (consumed - consumed_ > served_ - consumed_) {
    end_ = kLaneBadIndex;
    return false;
  }
  consumed_ = consumed;
  return served_ - consumed_ < kLaneCapacity;
}

LaneCompletion LaneServer::answer(const LaneEntry& entry) {
  try {
    compute(entry);
    LaneCompletion completion = {};
    completion.ok = 1;
    return completion;
  } catch (const ArgumentError& error) {
    return refusal("INVALID_ARGUMENT", error.field().c_str(), error.what());
  } catch (const LaneError& error) {
    return refusal(error.reason(), error.field(), error.what());
  } catch (...) {
    fail();
    return refusal("INTERNAL", "", fault_.c_str());
  }
}

void LaneServer::compute(const LaneEntry& entry) {
  check_entry(entry, served_, executor_.shape());
  LaneUse use(session_, entry);
  const LaneCall call = make_call(entry, use, executor_, slopes_);
  use.claim(entry.layer);
  executor_.attend(call);
  use.keep();
}

// Call in an exception handler: the current exception is a fault of the daemon.
void LaneServer::fail() {
  end_ = kLaneFault;
  try {
    throw;
  } catch (const std::exception& error) {
    fault_ = error.what();
  } catch (...) {
    fault_ = "an exception of unknown type";
  }
}

void LaneServer::finish(const LaneCompletion& completion) {
  LaneCompletion numbered = completion;
  numbered.number = served_;
  store_slot(memory_.completions[served_ % kLaneCapacity], numbered);
  ++served_;
  LaneHeader& header = memory_.header;
  header.completed.store(served_, std::memory_order_release);
  wake_if_asleep(header.client_sleeps, header.client_bell);
  session_.signal_finished();
}

void LaneServer::end(LaneState state) {
  LaneHeader& header = memory_.header;
  header.state.store(state, std::memory_order_release);
  wake_if_asleep(header.client_sleeps, header.client_bell);
  closed_.store(true, std::memory_order_release);
}

}  // namespace kvservice
