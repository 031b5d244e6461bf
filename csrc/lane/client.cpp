#include "lane/client.h"

#include <algorithm>
#include <cstring>

#include "errors.h"
#include "lane/waiting.h"

namespace kvservice {
namespace {

LaneMemory& open_memory(void* memory, int64_t num_bytes) {
  require(num_bytes >= kLaneBytes, "memory", "is smaller than a lane");
  require(reinterpret_cast<uintptr_t>(memory) % 64 == 0, "memory", "is not aligned to 64 bytes");
  auto* lane = static_cast<LaneMemory*>(memory);
  const LaneHeader& header = lane->header;
  require(header.magic == kLaneMagic, "memory", "is not a lane");
  require(header.version == kLaneVersion && header.capacity == kLaneCapacity &&
              header.entry_bytes == sizeof(LaneEntry) && header.completion_bytes == sizeof(LaneCompletion),
          "memory", "is a lane of a different version");
  return *lane;
}

const char* why_closed(uint32_t state) {
  switch (state) {
    case kLaneClosed:
      return "the daemon has closed the lane";
    case kLaneBadIndex:
      return "the daemon has ended the lane: an index was out of range";
    case kLaneFault:
      return "the lane ended with a failure of the daemon";
    default:
      return "the lane's state makes no sense";
  }
}

template <size_t N>
bool is_text(const char (&text)[N]) {
  return std::memchr(text, 0, N) != nullptr;
}

}  // namespace

LaneClient::LaneClient(void* memory, int64_t num_bytes, double spin_us)
    : memory_(open_memory(memory, num_bytes)), spin_(spin_time(spin_us)) {
  const LaneHeader& header = memory_.header;
  require(header.submitted.load() == 0 && header.consumed.load() == 0, "memory",
          "is a lane that is already in use or was used");
}

uint64_t LaneClient::submit(LaneEntry entry) {
  LaneHeader& header = memory_.header;
  const uint32_t state = header.state.load(std::memory_order_acquire);
  if (state != kLaneOpen) throw LaneClosedError(why_closed(state));
  if (submitted_ - consumed_ >= kLaneCapacity) throw LaneFullError("64 calls of the lane are in flight or unread");
  entry.number = submitted_;
  store_slot(memory_.entries[submitted_ % kLaneCapacity], entry);
  ++submitted_;
  header.submitted.store(submitted_, std::memory_order_release);
  wake_if_asleep(header.daemon_sleeps, header.daemon_bell);
  return entry.number;
}

std::optional<LaneCompletion> LaneClient::wait(uint64_t number, std::chrono::nanoseconds time) {
  require(number < submitted_, "number", "was not submitted");
  require(number >= consumed_, "number", "its completion was already read or dropped");
  LaneHeader& header = memory_.header;
  const auto there = [&] { return completed() > number; };
  if (!spin_until(std::min(spin_, time), there)) {
    const auto there_or_never = [&] { return there() || header.state.load(std::memory_order_acquire) != kLaneOpen; };
    sleep_until(header.client_sleeps, header.client_bell, time - std::min(spin_, time), there_or_never);
    // The state is read first: completions written before the lane ended count.
    const uint32_t state = header.state.load(std::memory_order_acquire);
    if (!there()) {
      if (state != kLaneOpen) throw LaneClosedError(why_closed(state));
      return std::nullopt;
    }
  }
  while (consumed_ < number) take();
  return take();
}

uint64_t LaneClient::completed() {
  const uint64_t completed = memory_.header.completed.load(std::memory_order_acquire);
  if (completed - consumed_ > submitted_ - consumed_) throw LaneClosedError("the lane's indices make no sense");
  return completed;
}

LaneCompletion LaneClient::take() {
  const auto completion = load_slot<LaneCompletion>(memory_.completions[consumed_ % kLaneCapacity]);
  if (completion.number != consumed_ || completion.ok > 1 || !is_text(completion.reason) ||
      !is_text(completion.field) || !is_text(completion.message) ||
      (completion.ok == 0) != (completion.reason[0] != 0)) {
    throw LaneClosedError("a completion in the lane makes no sense");
  }
  ++consumed_;
  LaneHeader& header = memory_.header;
  header.consumed.store(consumed_, std::memory_order_release);
  wake_if_asleep(header.daemon_sleeps, header.daemon_bell);
  return completion;
}

}  // namespace kvservice
