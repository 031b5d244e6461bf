// The format of a lane: two single-producer single-consumer rings in memory shared by a client and the daemon.
//
//   byte 0      LaneHeader      format, indices, sleep flags
//   byte 4096   entries         [kLaneCapacity] LaneEntry, written by the client
//   byte 20480  completions     [kLaneCapacity] LaneCompletion, written by the daemon
//
// Little-endian. Entry n (counted from 0, without wrapping) is at index n % kLaneCapacity, its completion at the same
// index of the other ring. Completions come in the order of the entries.
//
//   The client writes entry n once fewer than kLaneCapacity completions are unread, then sets `submitted` to n + 1.
//   The daemon executes it, writes completion n, then sets `completed` to n + 1.
//   The client copies completion n and sets `consumed` to n + 1. Only then is index n free again, in both rings.
//
// Indices are stored with release and loaded with acquire: a side that sees an index also sees the entry or completion
// before it. Nothing else orders the two processes.
//
// Sleeping. A side without work sets its `sleeps` flag to 1, issues a full fence, reads its bell, checks for work
// again, and waits on a shared futex for the bell to change from the value that it read. A side that has stored an
// index or the state issues a full fence and reads the other side's `sleeps` flag; if it is 1, it increments the other
// side's bell and wakes the futex. One of the two fences comes first, so that either the waker sees the flag or the
// sleeper sees the index. A bell that rings between the last check and the wait has changed, so that the wait returns
// at once.
//
// Either side may write all of this memory at any time. The daemon therefore keeps its own indices, reads only
// `submitted`, `consumed`, its bell and the client's `sleeps` flag from the header, and copies an entry before it
// checks it. None of its waits is longer than 100 ms. If `submitted` or `consumed` is out of range, the lane ends.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvservice {

constexpr uint64_t kLaneMagic = 0x31454E414C53564BULL;  // "KVSLANE1"
constexpr uint32_t kLaneVersion = 1;
constexpr uint32_t kLaneCapacity = 64;
constexpr int64_t kLaneBytes = 36864;

// The first byte of a tensor: an offset into a region. The tensor is C-contiguous and 16-byte aligned.
struct LanePlace {
  uint32_t region;
  uint32_t zero;
  uint64_t offset;
};
constexpr uint32_t kNoRegion = 0xFFFFFFFFU;  // the place is left out

enum LaneFlag : uint32_t {
  kLaneDecode = 1,     // requires one token per sequence of the step
  kLaneReturnLse = 2,  // lse is a place
};

// One Decode or Extend call. The fields are those of AttendRequest in attention.proto.
struct LaneEntry {
  uint64_t number;  // the index of the entry
  int64_t step_id;
  int32_t layer;
  uint32_t flags;  // LaneFlag; other bits are 0
  int32_t num_heads;
  int32_t sliding_window;  // 0: off
  float scale;             // 0: 1 / sqrt(head_size)
  float logits_soft_cap;   // 0: off
  LanePlace query;         // [num_tokens, num_heads, head_size]
  LanePlace key;           // [num_tokens, num_kv_heads, head_size]
  LanePlace value;
  LanePlace output;         // shape of query
  LanePlace lse;            // float32 [num_tokens, num_heads]
  LanePlace alibi_slopes;   // float32 [num_heads]
  int32_t block_sparse[5];  // vert_stride (0 or 1: off), local_blocks, block_size, head_sliding_step, tp_rank
  uint32_t reserved[25];    // 0
};

// Texts are zero-terminated. `reason`, `field` and `message` are those of kvservice/errors.py; empty if `ok` is 1.
struct LaneCompletion {
  uint64_t number;
  uint32_t ok;
  uint32_t zero;
  char reason[32];
  char field[48];
  char message[128];
  char reserved[32];
};

constexpr int64_t kLaneSlotWords = 32;  // 8-byte words of an entry or a completion
static_assert(sizeof(LanePlace) == 16 && sizeof(LaneEntry) == 8 * kLaneSlotWords);
static_assert(sizeof(LaneCompletion) == 8 * kLaneSlotWords);

enum LaneState : uint32_t {
  kLaneOpen = 1,
  kLaneClosed = 2,    // by the daemon, normally
  kLaneBadIndex = 3,  // `submitted` or `consumed` is out of range
  kLaneFault = 4,     // the daemon failed
};

// Every cache line has one writer, except the bells, which are idle while both sides are awake.
struct LaneHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t capacity;
  uint32_t entry_bytes;
  uint32_t completion_bytes;

  alignas(64) std::atomic<uint32_t> state;  // written by the daemon
  alignas(64) std::atomic<uint64_t> completed;
  alignas(64) std::atomic<uint32_t> daemon_sleeps;
  alignas(64) std::atomic<uint64_t> submitted;  // written by the client
  alignas(64) std::atomic<uint64_t> consumed;
  alignas(64) std::atomic<uint32_t> client_sleeps;
  alignas(64) std::atomic<uint32_t> daemon_bell;  // written by the side that wakes
  alignas(64) std::atomic<uint32_t> client_bell;
};

// Atomic words, so that a copy of data that the other side is writing yields garbage but no undefined behaviour.
using LaneSlot = std::atomic<uint64_t>[kLaneSlotWords];

struct LaneMemory {
  LaneHeader header;
  alignas(4096) LaneSlot entries[kLaneCapacity];
  alignas(4096) LaneSlot completions[kLaneCapacity];
};

static_assert(sizeof(LaneMemory) == kLaneBytes && kLaneBytes % 4096 == 0);
static_assert(sizeof(std::atomic<uint64_t>) == 8 && std::atomic<uint64_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free);
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

template <class T>
T load_slot(const LaneSlot& slot) {
  static_assert(sizeof(T) == sizeof(LaneSlot));
  uint64_t words[kLaneSlotWords];
  for (int64_t i = 0; i < kLaneSlotWords; ++i) words[i] = slot[i].load(std::memory_order_relaxed);
  T value;
  __builtin_memcpy(&value, words, sizeof(T));
  return value;
}

template <class T>
void store_slot(LaneSlot& slot, const T& value) {
  static_assert(sizeof(T) == sizeof(LaneSlot));
  uint64_t words[kLaneSlotWords];
  __builtin_memcpy(words, &value, sizeof(T));
  for (int64_t i = 0; i < kLaneSlotWords; ++i) slot[i].store(words[i], std::memory_order_relaxed);
}

}  // namespace kvservice
