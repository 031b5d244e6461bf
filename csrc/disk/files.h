// The disk tier: values in files, read and written by threads of its own, directly from and to the memory of the block
// store.
//
// The calls return at once. An operation ends in take_completed(), and the event fd becomes readable. The tier opens in
// its threads: until then nothing is found, and nothing is stored.
//
// The calls may come from one thread at a time. A mutex guards everything that the threads share; they hold it for
// bookkeeping only, never for input or output.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "disk/index.h"
#include "disk/io.h"

namespace kvservice::disk {

// So many reads or writes in a row fail only if the disk does.
constexpr uint64_t kMostErrorsInRow = 8;

struct Options {
  std::string directory;
  int64_t capacity_bytes;
  int64_t slab_bytes;
  char* memory;
  int64_t memory_bytes;
  int num_threads;
  int64_t max_queued;  // values
  uint64_t seed;
};

enum class State { kOpening, kOpen, kFailed, kClosed };

struct Stats {
  State state;
  bool direct;
  int64_t capacity_bytes;
  IndexCounts counts;
  uint64_t read_values, read_bytes, written_values, written_bytes;
  uint64_t refused, dropped, errors;
  bool reads_fail, writes_fail;  // the last ones, so that it is not a single value's fault
};

enum class Kind { kGet, kPut, kRemove, kClear };

// A call for many values.
struct Operation : std::enable_shared_from_this<Operation> {
  uint64_t id;
  Kind kind;
  SpaceName space;
  std::string keys;
  std::vector<uint64_t> offsets, checksums;
  std::vector<char> found;  // per key; in a put: stored
  size_t remaining = 0;     // values without a result
  size_t begun = 0;         // values whose memory is in use
  bool cancelled = false;
  bool completed = false;
  bool failed = false;  // a remove or clear that is not on disk
  int64_t count = 0;    // values removed
  uint64_t change = 0;  // a remove or clear waits for it

  Key key(size_t i) const { return Key::load(keys.data() + i * kKeyBytes); }
};

class DiskFiles {
 public:
  // Locks the directory and checks its format. Throws std::runtime_error.
  explicit DiskFiles(const Options& options);
  ~DiskFiles() { close(); }
  DiskFiles(const DiskFiles&) = delete;
  DiskFiles& operator=(const DiskFiles&) = delete;

  int event_fd() const { return event_.fd(); }
  int64_t memory_bytes() const { return options_.memory_bytes; }
  std::vector<char> lookup(const SpaceName& space, std::string_view keys);
  // These return the id of an operation.
  uint64_t get(const SpaceName& space, std::string keys, std::vector<uint64_t> offsets);
  uint64_t put(const SpaceName& space, std::string keys, std::vector<uint64_t> offsets,
               std::vector<uint64_t> checksums);
  uint64_t remove(const SpaceName& space, std::string keys);
  uint64_t clear(const SpaceName& space);
  // Drops what an operation has not begun.
  void cancel(uint64_t id);
  std::vector<std::shared_ptr<Operation>> take_completed();
  Stats stats();
  // Why the state is kFailed.
  std::string problem();
  // Ends what is in progress, drops the rest, flushes the files and unlocks the directory.
  void close();

 private:
  using Lock = std::unique_lock<std::mutex>;
  using OperationPointer = std::shared_ptr<Operation>;

  struct Task {
    OperationPointer operation;
    size_t i;
  };

  // Where a value is in a file and in memory.
  struct Place {
    int fd;
    int64_t at;
    char* memory;
    int64_t num_bytes;
  };

  struct Sweep {
    OperationPointer operation;
    uint32_t space;
    uint32_t next;
  };

  // What a thread has for itself.
  struct Worker {
    SectorBuffer sector, bounce;
    SectorWrite write;
    std::vector<Recorded> recorded;
  };

  void open_files();
  void fail(const char* problem);
  void recover(Worker& worker);
  void recover_slab(Worker& worker, uint32_t slab);
  void run(int number);
  bool step(Worker& worker, Lock& lock);

  OperationPointer begin(Kind kind, const SpaceName& space, std::string keys);
  void wake(size_t num_tasks);
  static bool take_task(std::deque<Task>& tasks, Task& task);
  void drop_writes(const SpaceName& space, const std::vector<Key>* keys);
  void drop(std::deque<Task>& tasks, const SpaceName& space, const std::vector<Key>* keys);
  void finish(Operation& operation, size_t i, bool found);
  void end_use(Operation& operation);
  void complete(OperationPointer operation);
  void complete_when_written(const OperationPointer& operation);
  void complete_written();

  void write_sector(Worker& worker, Lock& lock);
  void sweep(Lock& lock);
  void serve_get(Worker& worker, Lock& lock);
  void serve_put(Worker& worker, Lock& lock);
  void answer(Slot& slot, bool stored);
  void requeue_waiting();
  void count_errors(bool done, uint64_t& errors_in_row);
  bool writes_fail() const;
  void begin_probe(int64_t stride);
  Place place_of(const Slot& slot, const Task& task) const;
  static bool read_value(Worker& worker, const Place& place);
  static bool write_value(Worker& worker, const Place& place);

  const Options options_;
  Geometry geometry_{};
  File lock_file_;
  File event_;
  File records_;
  std::vector<File> data_;
  bool direct_ = true;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<State> state_{State::kOpening};
  std::string problem_;
  std::unique_ptr<DiskIndex> index_;
  uint64_t last_id_ = 0;
  std::unordered_map<uint64_t, OperationPointer> operations_;
  std::deque<Task> reads_, writes_;
  std::deque<Sweep> sweeps_;
  std::unordered_map<int64_t, std::deque<Task>> waiting_;  // for room, by stride
  std::unordered_map<Slot*, std::vector<Task>> unrecorded_;
  std::deque<OperationPointer> written_waits_;  // removes and clears, by their change
  std::vector<OperationPointer> completed_;
  int num_reading_ = 0, num_writing_ = 0;
  size_t num_waiting_ = 0;
  bool opened_files_ = false;
  std::atomic<bool> stopping_{false};
  uint64_t read_values_ = 0, read_bytes_ = 0, written_values_ = 0, written_bytes_ = 0;
  uint64_t refused_ = 0, dropped_ = 0, errors_ = 0;
  uint64_t read_errors_in_row_ = 0, value_errors_in_row_ = 0, record_errors_in_row_ = 0;
  uint64_t num_probes_ = 0;
  bool probe_due_ = false;  // one value may be written to a disk whose writes fail

  std::atomic<uint32_t> next_slab_{0};
  int num_recovering_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace kvservice::disk
