// The format of a lane: two single-producer single-consumer rings in memory that a client and the daemon share.
//
//   byte 0      LaneHeader      what the format is, the indices, who sleeps
//   byte 4096   entries         [kLaneCapacity] LaneEntry, written by the client
//   byte 20480  completions     [kLaneCapacity] LaneCompletion, written by the daemon
//
// Little-endian. Entry n (counted from 0, without end) stands at place n % kLaneCapacity, its completion at the same
// place of the other ring; completions come in the order of the entries.
//
//   The client writes entry n once fewer than kLaneCapacity completions are unread, then sets `submitted` to n + 1.
//   The daemon answers it, writes completion n, then sets `completed` to n + 1.
//   The client copies completion n and sets `consumed` to n + 1. Only then is the place of n free again, in both rings.
//
// An index is stored with release and loaded with acquire: who sees the index sees what it stands for. Nothing else
// orders the two processes.
//
// Sleeping. Who finds nothing to do sets its word in `sleeps` to 1, makes a full fence, reads its bell, looks once more
// and waits (a shared futex) on the bell having the value that it read. Who has stored an index, or the state, makes a
// full fence and reads the other's word in `sleeps`: if it is 1 he adds 1 to the other's bell and wakes. Of the two
// fences one comes first, so either the one sees the other asleep or the other sees the index; and a bell that rings
// between the last look and the wait has changed, so that the wait returns at once.
//
// Either side may write all of this memory at any time, so the daemon keeps its own indices, reads of the header only
// `submitted`, `consumed`, its bell and the client's `sleeps`, and copies an entry before it looks at it. No wait of
// it lasts longer than 100 ms. `submitted` or `consumed` out of range end the lane.
//
// Completion by event. A lane on a GPU has an event that other processes can open (OpenLaneResponse.event_handle). An
// entry with kLaneEvent is answered when its call is launched, with ok or an error, and the event is recorded behind
// the call. A stream of the client's that is made to wait for the event once the answer is there goes on when the call
// is done; till then the tensors are the call's. The event is recorded again by every such call, on one stream: who
// waits late waits for more, never for less. Every kLaneCapacity-th of them is answered only when it is done, so that
// no lane gets far ahead of the others. A daemon that is killed leaves an event that is never done.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvservice {

constexpr uint64_t kLaneMagic = 0x31454E414C53564BULL;  // "KVSLANE1"
constexpr uint32_t kLaneVersion = 1;
constexpr uint32_t kLaneCapacity = 64;
constexpr int64_t kLaneBytes = 36864;

// A tensor's first byte: in the region of that number, from its start. C-contiguous from there, 16-byte aligned.
struct LanePlace {
  uint32_t region;
  uint32_t zero;
  uint64_t offset;
};
constexpr uint32_t kNoRegion = 0xFFFFFFFFU;  // such a place is left out

enum LaneFlag : uint32_t {
  kLaneDecode = 1,     // every sequence of the step must have one token
  kLaneReturnLse = 2,  // lse is a place
  kLaneEvent = 4,      // completion by the lane's event, if it has one
};

// One call of Decode or Extend; the fields are those of AttendRequest in attention.proto.
struct LaneEntry {
  uint64_t number;  // the entry's own index
  int64_t step_id;
  int32_t layer;
  uint32_t flags;  // LaneFlag; the others are 0
  int32_t num_heads;
  int32_t sliding_window;  // 0: off
  float scale;             // 0: 1 / sqrt(head_size)
  float logits_soft_cap;   // 0: off
  LanePlace query;         // [num_tokens, num_heads, head_size]
  LanePlace key;           // [num_tokens, num_kv_heads, head_size]
  LanePlace value;
  LanePlace output;         // as query
  LanePlace lse;            // float32 [num_tokens, num_heads]
  LanePlace alibi_slopes;   // float32 [num_heads]
  int32_t block_sparse[5];  // vert_stride (0 or 1: off), local_blocks, block_size, head_sliding_step, tp_rank
  uint32_t reserved[25];    // 0
};

// Texts end with a 0 byte. `reason`, `field` and `message` are those of kvservice/errors.py; empty where `ok` is 1.
struct LaneCompletion {
  uint64_t number;
  uint32_t ok;
  uint32_t zero;
  char reason[32];
  char field[48];
  char message[128];
  char reserved[32];
};

constexpr int64_t kLaneSlotWords = 32;  // of an entry or a completion, 8 bytes each
static_assert(sizeof(LanePlace) == 16 && sizeof(LaneEntry) == 8 * kLaneSlotWords);
static_assert(sizeof(LaneCompletion) == 8 * kLaneSlotWords);

enum LaneState : uint32_t {
  kLaneOpen = 1,
  kLaneClosed = 2,    // by the daemon, in good order
  kLaneBadIndex = 3,  // `submitted` or `consumed` made no sense
  kLaneFault = 4,     // the daemon failed
};

// Every cache line has one writer, but for the bells, which are silent while both sides are awake.
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
  alignas(64) std::atomic<uint32_t> daemon_bell;  // written by who wakes
  alignas(64) std::atomic<uint32_t> client_bell;
};

// Words, so that copying what the other side may be writing is no undefined behaviour, only garbage.
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
