#include "disk/files.h"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace kvservice::disk {
namespace {

bool is_before(const Key& a, const Key& b) { return std::memcmp(a.words, b.words, kKeyBytes) < 0; }

}  // namespace

DiskFiles::DiskFiles(const Options& options)
    : options_(options), lock_file_(lock_directory(options.directory)), event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (event_.fd() < 0) throw std::runtime_error("there is no event fd");
  geometry_.slab_bytes = open_meta(options.directory, options.slab_bytes);
  geometry_.num_slabs = options.capacity_bytes / geometry_.total_slab_bytes();
  if (geometry_.num_slabs < 1) throw std::runtime_error("capacity_bytes is less than a slab");
  num_recovering_ = options.num_threads;
  sigset_t all, before;  // the interpreter handles signals; new threads inherit the mask
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (int i = 0; i < options.num_threads; ++i) threads_.emplace_back([this, i] { run(i); });
  } catch (const std::exception&) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    close();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

std::vector<char> DiskFiles::lookup(const SpaceName& space, std::string_view keys) {
  std::vector<char> found(keys.size() / kKeyBytes);
  if (state_ != State::kOpen) return found;
  const Lock lock(mutex_);
  for (size_t i = 0; i < found.size(); ++i) {
    found[i] = static_cast<char>(index_->contains(space, Key::load(keys.data() + i * kKeyBytes)));
  }
  return found;
}

DiskFiles::OperationPointer DiskFiles::begin(Kind kind, const SpaceName& space, std::string keys) {
  auto operation = std::make_shared<Operation>();
  operation->id = ++last_id_;
  operation->kind = kind;
  operation->space = space;
  operation->keys = std::move(keys);
  operation->remaining = operation->keys.size() / kKeyBytes;
  operation->found.resize(operation->remaining);
  operations_[operation->id] = operation;
  return operation;
}

uint64_t DiskFiles::get(const SpaceName& space, std::string keys, std::vector<uint64_t> offsets) {
  const Lock lock(mutex_);
  const OperationPointer operation = begin(Kind::kGet, space, std::move(keys));
  operation->offsets = std::move(offsets);
  operation->checksums.resize(operation->found.size());
  std::vector<size_t> present;
  for (size_t i = 0; i < operation->found.size() && state_ == State::kOpen && !stopping_; ++i) {
    if (!index_->contains(space, operation->key(i))) continue;
    if (reads_.size() + present.size() >= static_cast<size_t>(options_.max_queued)) {
      ++dropped_;
    } else {
      present.push_back(i);
    }
  }
  operation->remaining = present.size();
  for (const size_t i : present) reads_.push_back({operation, i});
  if (present.empty()) complete(operation);
  wake(present.size());
  return operation->id;
}

uint64_t DiskFiles::put(const SpaceName& space, std::string keys, std::vector<uint64_t> offsets,
                        std::vector<uint64_t> checksums) {
  const Lock lock(mutex_);
  const OperationPointer operation = begin(Kind::kPut, space, std::move(keys));
  operation->offsets = std::move(offsets);
  operation->checksums = std::move(checksums);
  const size_t all = operation->found.size();
  const auto most = static_cast<size_t>(options_.max_queued);
  const size_t queued = writes_.size() + num_waiting_;
  size_t accepted = std::min(all, most - std::min(most, queued));
  if (state_ != State::kOpen || stopping_ || space.num_bytes > geometry_.slab_bytes) {
    refused_ += all;
    accepted = 0;
  } else {
    dropped_ += all - accepted;
  }
  if (accepted > 0 && writes_fail()) begin_probe(stride_of(space.num_bytes));
  operation->remaining = accepted;
  for (size_t i = 0; i < accepted; ++i) writes_.push_back({operation, i});
  if (accepted == 0) complete(operation);
  wake(accepted);
  return operation->id;
}

uint64_t DiskFiles::remove(const SpaceName& space, std::string keys) {
  const Lock lock(mutex_);
  const OperationPointer operation = begin(Kind::kRemove, space, std::move(keys));
  operation->failed = state_ != State::kOpen;
  if (operation->failed) {
    complete(operation);
    return operation->id;
  }
  std::vector<Key> removed;
  removed.reserve(operation->found.size());
  for (size_t i = 0; i < operation->found.size(); ++i) removed.push_back(operation->key(i));
  for (const Key& key : removed) {
    const DiskIndex::Removed result = index_->remove(space, key);
    if (result.stored) ++operation->count;
    if (result.unrecorded != nullptr) answer(*result.unrecorded, false);
  }
  std::sort(removed.begin(), removed.end(), is_before);
  drop_writes(space, &removed);
  complete_when_written(operation);
  return operation->id;
}

uint64_t DiskFiles::clear(const SpaceName& space) {
  const Lock lock(mutex_);
  const OperationPointer operation = begin(Kind::kClear, space, {});
  operation->failed = state_ != State::kOpen;
  if (operation->failed) {
    complete(operation);
    return operation->id;
  }
  std::vector<uint32_t> cleared;
  index_->clear(space, cleared);
  drop_writes(space, nullptr);
  // Without values it ends after the clears that are in progress.
  if (cleared.empty()) sweeps_.push_back({operation, 0, static_cast<uint32_t>(geometry_.num_slabs)});
  for (const uint32_t number : cleared) sweeps_.push_back({operation, number, 0});
  wake(1);
  return operation->id;
}

void DiskFiles::cancel(uint64_t id) {
  const Lock lock(mutex_);
  const auto found = operations_.find(id);
  if (found == operations_.end()) return;
  const OperationPointer operation = found->second;
  operation->cancelled = true;
  if (operation->begun == 0) complete(operation);
}

std::vector<std::shared_ptr<Operation>> DiskFiles::take_completed() {
  uint64_t count = 0;
  while (read(event_.fd(), &count, sizeof(count)) > 0) {
  }
  const Lock lock(mutex_);
  return std::exchange(completed_, {});
}

Stats DiskFiles::stats() {
  const Lock lock(mutex_);
  Stats stats{};
  stats.state = state_;
  stats.direct = direct_;
  stats.capacity_bytes = geometry_.num_slabs * geometry_.slab_bytes;
  if (opened_files_ && state_ != State::kOpening) stats.counts = index_->counts();
  stats.read_values = read_values_;
  stats.read_bytes = read_bytes_;
  stats.written_values = written_values_;
  stats.written_bytes = written_bytes_;
  stats.refused = refused_;
  stats.dropped = dropped_;
  stats.errors = errors_;
  stats.reads_fail = read_errors_in_row_ >= kMostErrorsInRow;
  stats.writes_fail = writes_fail();
  return stats;
}

std::string DiskFiles::problem() {
  const Lock lock(mutex_);
  return problem_;
}

void DiskFiles::close() {
  {
    const Lock lock(mutex_);
    stopping_ = true;
    std::deque<Task> queued;
    queued.swap(reads_);
    for (const Task& task : queued) finish(*task.operation, task.i, false);
    for (auto& [stride, tasks] : waiting_) writes_.insert(writes_.end(), tasks.begin(), tasks.end());
    waiting_.clear();
    num_waiting_ = 0;
    queued.clear();
    queued.swap(writes_);
    for (const Task& task : queued) finish(*task.operation, task.i, false);
    if (state_ == State::kOpen) index_->retry_sectors();
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  for (const File& file : data_) fdatasync(file.fd());
  if (records_.fd() >= 0) fdatasync(records_.fd());
  data_.clear();
  records_ = File();
  lock_file_ = File();
  const Lock lock(mutex_);
  if (state_ != State::kFailed) state_ = State::kClosed;
  while (!operations_.empty()) {
    operations_.begin()->second->failed = true;
    complete(operations_.begin()->second);
  }
}

// Operations. The lock is held.

void DiskFiles::wake(size_t num_tasks) {
  if (num_tasks >= threads_.size()) {
    changed_.notify_all();
  } else {
    for (size_t i = 0; i < num_tasks; ++i) changed_.notify_one();
  }
}

// Values of cancelled operations are dropped here.
bool DiskFiles::take_task(std::deque<Task>& tasks, Task& task) {
  while (!tasks.empty()) {
    task = std::move(tasks.front());
    tasks.pop_front();
    if (!task.operation->cancelled) return true;
  }
  return false;
}

// Drops writes that have not begun: of these keys, which are sorted, or of the whole space.
void DiskFiles::drop_writes(const SpaceName& space, const std::vector<Key>* keys) {
  drop(writes_, space, keys);
  for (auto& [stride, tasks] : waiting_) {
    num_waiting_ -= tasks.size();
    drop(tasks, space, keys);
    num_waiting_ += tasks.size();
  }
}

void DiskFiles::drop(std::deque<Task>& tasks, const SpaceName& space, const std::vector<Key>* keys) {
  const auto is_dropped = [&](const Task& task) {
    const Operation& operation = *task.operation;
    if (operation.space < space || space < operation.space) return false;
    if (keys == nullptr) return true;
    return std::binary_search(keys->begin(), keys->end(), operation.key(task.i), is_before);
  };
  std::deque<Task> kept;
  for (Task& task : tasks) {
    if (is_dropped(task)) {
      finish(*task.operation, task.i, false);
    } else {
      kept.push_back(std::move(task));
    }
  }
  tasks.swap(kept);
}

void DiskFiles::finish(Operation& operation, size_t i, bool found) {
  if (operation.completed) return;
  operation.found[i] = static_cast<char>(found);
  --operation.remaining;
  if (operation.remaining == 0 && operation.begun == 0) complete(operation.shared_from_this());
}

// The memory of a value is not in use any more.
void DiskFiles::end_use(Operation& operation) {
  --operation.begun;
  if (operation.begun == 0 && operation.cancelled) complete(operation.shared_from_this());
}

void DiskFiles::complete(OperationPointer operation) {
  if (operation->completed) return;
  operation->completed = true;
  operations_.erase(operation->id);
  completed_.push_back(std::move(operation));
  const uint64_t one = 1;
  if (completed_.size() == 1 && write(event_.fd(), &one, sizeof(one)) < 0) errors_ += 1;
}

// An invalidation that failed before is tried again.
void DiskFiles::complete_when_written(const OperationPointer& operation) {
  index_->retry_sectors();
  operation->change = index_->last_change();
  written_waits_.push_back(operation);
  complete_written();
  if (index_->has_sectors()) wake(threads_.size());
}

void DiskFiles::complete_written() {
  while (!written_waits_.empty() && written_waits_.front()->change < index_->oldest_change()) {
    written_waits_.front()->failed = index_->has_failed_sectors();
    complete(written_waits_.front());
    written_waits_.pop_front();
  }
}

// Answers the puts of a value.
void DiskFiles::answer(Slot& slot, bool stored) {
  const auto found = unrecorded_.find(&slot);
  if (found == unrecorded_.end()) return;
  const std::vector<Task> tasks = std::move(found->second);
  unrecorded_.erase(found);
  for (const Task& task : tasks) finish(*task.operation, task.i, stored);
}

}  // namespace kvservice::disk
