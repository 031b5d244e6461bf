#include "store/copy.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <system_error>
#include <thread>

#include "store/checksum.h"

namespace kvservice {
namespace {

constexpr int64_t kMinThreadBytes = int64_t{2} << 20;
// Copies of at least so many bytes use streaming stores: they are not expected to find their target in a cache, nor
// whoever reads it next.
constexpr int64_t kMinStreamedBytes = int64_t{4} << 20;

enum class Direction { kIn, kOut };

// Copies a piece of a block. `done` bytes of the block precede it. Stripes within the piece are added to the checksum
// while they are copied. A stripe that spans pieces is added when it is complete, from the store, where it is
// contiguous.
template <Direction kDirection>
void copy_piece(Checksum& checksum, char* block, int64_t done, char* piece, int64_t size, bool streams) {
  constexpr int64_t kStripe = Checksum::kStripeBytes;
  const auto copy = [](char* in_store, char* in_piece, int64_t count) {
    if (kDirection == Direction::kIn) std::memcpy(in_store, in_piece, static_cast<size_t>(count));
    if (kDirection == Direction::kOut) std::memcpy(in_piece, in_store, static_cast<size_t>(count));
  };
  const int64_t head = std::min(size, (kStripe - done % kStripe) % kStripe);
  copy(block + done, piece, head);
  if (head > 0 && (done + head) % kStripe == 0) checksum.add_stripes(block + done + head - kStripe, 1);
  char* const first = block + done + head;
  const int64_t stripes = (size - head) / kStripe, copied = stripes * kStripe;
  if (kDirection == Direction::kIn) checksum.copy_stripes(first, piece + head, stripes, streams);
  if (kDirection == Direction::kOut) checksum.copy_stripes(piece + head, first, stripes, streams);
  copy(first + copied, piece + head + copied, size - head - copied);
}

bool is_streamed(const BlockPlaces& p) { return p.num_blocks * p.block_bytes >= kMinStreamedBytes; }

template <Direction kDirection>
uint64_t copy_block(const BlockPlaces& p, int64_t i) {
  char* const block = p.store + p.offsets[i];
  const bool streams = is_streamed(p);
  Checksum checksum;
  int64_t done = 0;
  for (int64_t k = 0; k < p.num_pieces; ++k) {
    const auto size = static_cast<int64_t>(p.piece_bytes[k]);
    copy_piece<kDirection>(checksum, block, done, p.other + p.places[i * p.num_pieces + k], size, streams);
    done += size;
  }
  const int64_t rest = p.block_bytes % Checksum::kStripeBytes;
  checksum.add_rest(block + p.block_bytes - rest, rest);
  return checksum.value(p.block_bytes);
}

// Copies a block out of the store, and returns no checksum.
uint64_t move_block(const BlockPlaces& p, int64_t i) {
  const char* piece = p.store + p.offsets[i];
  const bool streams = is_streamed(p);
  for (int64_t k = 0; k < p.num_pieces; ++k) {
    const auto size = static_cast<int64_t>(p.piece_bytes[k]);
    char* const to = p.other + p.places[i * p.num_pieces + k];
    if (streams) {
      copy_streaming(to, piece, size);
    } else {
      std::memcpy(to, piece, static_cast<size_t>(size));
    }
    piece += size;
  }
  return 0;
}

uint64_t read_block(const BlockPlaces& p, int64_t i) {
  const char* const block = p.store + p.offsets[i];
  const int64_t stripes = p.block_bytes / Checksum::kStripeBytes, rest = p.block_bytes % Checksum::kStripeBytes;
  Checksum checksum;
  checksum.add_stripes(block, stripes);
  checksum.add_rest(block + p.block_bytes - rest, rest);
  return checksum.value(p.block_bytes);
}

// Runs `work` on the calling thread and up to `count` - 1 others. `work` must not throw. Continues with fewer threads
// if the system gives no more.
template <class Work>
void run_on_threads(int count, const Work& work) {
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(count));
  sigset_t all, before;  // the interpreter handles signals; new threads inherit the mask
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (int i = 1; i < count; ++i) threads.emplace_back(work);
  } catch (const std::system_error&) {  // NOLINT(bugprone-empty-catch)
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  work();
  for (std::thread& thread : threads) thread.join();
}

// Returns block(places, i) for each block i.
template <class Block>
std::vector<uint64_t> for_each_block(const BlockPlaces& places, int num_threads, const Block& block) {
  std::vector<uint64_t> checksums(static_cast<size_t>(places.num_blocks));
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t i = next.fetch_add(1); i < places.num_blocks; i = next.fetch_add(1)) checksums[i] = block(places, i);
    fence_streaming_stores();
  };
  const int64_t most = std::min(places.num_blocks, places.num_blocks * places.block_bytes / kMinThreadBytes);
  run_on_threads(static_cast<int>(std::clamp<int64_t>(most, 1, num_threads)), work);
  return checksums;
}

}  // namespace

std::vector<uint64_t> copy_into_store(const BlockPlaces& places, int num_threads) {
  // A reader that sees new bytes sees the new version, too, which this thread may have just stored.
  std::atomic_thread_fence(std::memory_order_release);
  fence_streaming_stores();
  return for_each_block(places, num_threads, copy_block<Direction::kIn>);
}

std::vector<uint64_t> copy_out_of_store(const BlockPlaces& places, int num_threads) {
  return for_each_block(places, num_threads, copy_block<Direction::kOut>);
}

void move_out_of_store(const BlockPlaces& places, int num_threads) { for_each_block(places, num_threads, move_block); }

std::vector<uint64_t> store_checksums(const BlockPlaces& places, int num_threads) {
  return for_each_block(places, num_threads, read_block);
}

}  // namespace kvservice
