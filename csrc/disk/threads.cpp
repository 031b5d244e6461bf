// The threads of the disk tier.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>

#include "disk/files.h"

namespace kvservice::disk {
namespace {

// The rest of the threads is for reads.
constexpr int writing_threads(int num_threads) { return std::max(1, num_threads * 7 / 8); }

// The bytes of a value that need no buffer.
int64_t whole_sectors(const char* memory, int64_t num_bytes) {
  const bool aligned = reinterpret_cast<uintptr_t>(memory) % kSectorBytes == 0;
  return aligned ? num_bytes / kSectorBytes * kSectorBytes : 0;
}

}  // namespace

void DiskFiles::run(int number) {
  if (number == 0) {
    try {
      open_files();
    } catch (const std::exception& error) {
      fail(error.what());
    }
  }
  Worker worker;
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return opened_files_ || stopping_ || state_ == State::kFailed; });
  if (opened_files_ && !stopping_) {
    lock.unlock();
    recover(worker);
    lock.lock();
  }
  while (state_ != State::kFailed) {
    if (state_ == State::kOpen && step(worker, lock)) continue;
    if (stopping_) return;
    changed_.wait(lock);
  }
}

void DiskFiles::fail(const char* problem) {
  const Lock lock(mutex_);
  problem_ = problem;
  state_ = State::kFailed;
  const uint64_t one = 1;
  if (write(event_.fd(), &one, sizeof(one)) < 0) ++errors_;
  changed_.notify_all();
}

void DiskFiles::open_files() {
  const std::string& directory = options_.directory;
  std::vector<std::pair<File, std::string>> files;
  std::vector<int64_t> sizes;
  bool direct = true;
  const auto add = [&](const std::string& path, int64_t num_bytes) {
    files.emplace_back(open_data(path, direct), path);
    sizes.push_back(num_bytes);
  };
  // The records are first: where the tier becomes smaller, no record is left without its value.
  add(directory + "/records", geometry_.num_slabs * geometry_.region_bytes());
  for (uint32_t i = 0; i < kDataFiles; ++i) {
    add(directory + "/data-" + std::to_string(i), geometry_.data_file_bytes(i));
  }
  int64_t growth = 0;
  for (size_t i = 0; i < files.size(); ++i) growth += sizes[i] - allocated_bytes(files[i].first);
  if (growth > 0) check_room(directory, growth);
  for (size_t i = 0; i < files.size(); ++i) set_size(files[i].first, files[i].second, sizes[i]);
  auto index = std::make_unique<DiskIndex>(geometry_, options_.seed);
  const Lock lock(mutex_);
  records_ = std::move(files[0].first);
  for (size_t i = 1; i < files.size(); ++i) data_.push_back(std::move(files[i].first));
  index_ = std::move(index);
  direct_ = direct;
  opened_files_ = true;
  changed_.notify_all();
}

// All threads recover slabs. The last one to end opens the tier.
void DiskFiles::recover(Worker& worker) {
  try {
    while (!stopping_) {
      const uint32_t slab = next_slab_++;
      if (slab >= geometry_.num_slabs) break;
      recover_slab(worker, slab);
    }
  } catch (const std::bad_alloc&) {
    fail("there is no memory for the index");
  } catch (const std::runtime_error& error) {
    fail(error.what());
  }
  const Lock lock(mutex_);
  if (--num_recovering_ > 0 || stopping_ || state_ != State::kOpening) return;
  index_->end_recovery();
  state_ = State::kOpen;
  const uint64_t one = 1;
  if (write(event_.fd(), &one, sizeof(one)) < 0) ++errors_;
  changed_.notify_all();
}

void DiskFiles::recover_slab(Worker& worker, uint32_t slab) {
  const auto read = [&](char* to, int64_t at, int64_t num_bytes) {
    return transfer(Direction::kRead, records_.fd(), {{{to, static_cast<size_t>(num_bytes)}, {}}, at});
  };
  char* const first = worker.sector.reserve(2 * kSectorBytes);  // the header and a sector of records
  if (first == nullptr) throw std::bad_alloc();
  const int64_t at = geometry_.sector_at(slab, 0);
  SlabHeader header{};
  bool right = read(first, at, 2 * kSectorBytes);
  if (right) {
    std::memcpy(&header, first, sizeof(header));
    if (!DiskIndex::is_valid(geometry_, slab, header)) return;
  }
  char* records = first + kSectorBytes;
  const int64_t num_bytes = right ? DiskIndex::num_sectors(geometry_, header) * kSectorBytes : 0;
  if (num_bytes > kSectorBytes) {
    records = worker.bounce.reserve(num_bytes);
    if (records == nullptr) throw std::bad_alloc();
    right = read(records, at + kSectorBytes, num_bytes);
  }
  std::vector<uint32_t> valid;
  const auto* list = reinterpret_cast<const Record*>(records);
  if (right) valid = DiskIndex::valid_records(geometry_, header, list);
  const Lock lock(mutex_);
  if (right) {
    index_->recover_slab(header, list, valid);
  } else {
    index_->discard_slab(slab);
  }
  count_errors(right, read_errors_in_row_);
  // Nothing is written before the tier is open, so that the next attempt finds what this one discarded.
  if (read_errors_in_row_ >= kMostErrorsInRow) throw std::runtime_error("the disk cannot be read");
}

// Does one thing, if there is one to do.
bool DiskFiles::step(Worker& worker, Lock& lock) {
  char* const image = worker.sector.reserve(kSectorBytes);
  if (image != nullptr && index_->take_sector(worker.write, image)) {
    write_sector(worker, lock);
    return true;
  }
  if (!sweeps_.empty()) {
    sweep(lock);
    return true;
  }
  // Beside reads, one write at least goes on.
  const bool can_write = !writes_.empty() && num_writing_ < writing_threads(options_.num_threads);
  const bool must_write = can_write && num_writing_ == 0 && num_reading_ > 0;
  if (!reads_.empty() && !must_write) {
    serve_get(worker, lock);
    return true;
  }
  if (can_write) serve_put(worker, lock);
  return can_write;
}

void DiskFiles::write_sector(Worker& worker, Lock& lock) {
  const SectorWrite& write = worker.write;
  const int64_t at = geometry_.sector_at(write.slab->number, write.sector);
  const iovec image = {worker.sector.reserve(kSectorBytes), kSectorBytes};
  lock.unlock();
  const bool done = transfer(Direction::kWrite, records_.fd(), {{image, {}}, at});
  lock.lock();
  count_errors(done, record_errors_in_row_);
  worker.recorded.clear();
  index_->end_sector(write, done, worker.recorded);
  for (const Recorded& recorded : worker.recorded) answer(*recorded.slot, recorded.stored);
  requeue_waiting();
  complete_written();
}

void DiskFiles::sweep(Lock& lock) {
  Sweep& sweep = sweeps_.front();
  if (sweep.next >= geometry_.num_slabs) {
    const OperationPointer operation = sweep.operation;
    sweeps_.pop_front();
    complete_when_written(operation);
    return;
  }
  std::vector<Slot*> unrecorded;
  const uint64_t before = index_->counts().removed;
  index_->sweep(sweep.space, sweep.next++, unrecorded);
  sweep.operation->count += static_cast<int64_t>(index_->counts().removed - before);
  for (Slot* slot : unrecorded) answer(*slot, false);
  changed_.notify_all();
  lock.unlock();  // others may go on
  lock.lock();
}

void DiskFiles::serve_get(Worker& worker, Lock& lock) {
  Task task;
  if (!take_task(reads_, task)) return;
  Operation& operation = *task.operation;
  Slot* const slot = index_->pin(operation.space, operation.key(task.i));
  if (slot == nullptr) return finish(operation, task.i, false);
  ++operation.begun;
  ++num_reading_;
  const uint64_t expected = slot->value_checksum;
  const Place place = place_of(*slot, task);
  lock.unlock();
  const bool done = read_value(worker, place);
  const bool right = done && checksum_of(place.memory, place.num_bytes) == expected;
  lock.lock();
  using Read = DiskIndex::Read;
  index_->unpin(*slot, right ? Read::kRight : done ? Read::kCorrupt : Read::kFailed);
  --num_reading_;
  count_errors(done, read_errors_in_row_);
  if (right) {
    operation.checksums[task.i] = expected;
    ++read_values_;
    read_bytes_ += static_cast<uint64_t>(place.num_bytes);
  }
  end_use(operation);
  finish(operation, task.i, right);
  requeue_waiting();
}

void DiskFiles::serve_put(Worker& worker, Lock& lock) {
  Task task;
  if (!take_task(writes_, task)) return;
  Operation& operation = *task.operation;
  const int64_t num_bytes = operation.space.num_bytes;
  if (writes_fail() && !probe_due_) {
    ++refused_;
    return finish(operation, task.i, false);
  }
  // Nothing is freed ahead of a disk that may be failing.
  const bool ahead = value_errors_in_row_ == 0 && record_errors_in_row_ == 0;
  const Begin begin = index_->begin_put(operation.space, operation.key(task.i), operation.checksums[task.i], ahead);
  if (begin.status == Begun::kPresent) return finish(operation, task.i, true);
  probe_due_ = false;  // the next one uses the room that this one may wait for
  if (begin.status == Begun::kNoRoom) {
    ++refused_;
    return finish(operation, task.i, false);
  }
  if (begin.status == Begun::kWait) {
    waiting_[stride_of(num_bytes)].push_back(task);
    ++num_waiting_;
    return;
  }
  unrecorded_[begin.slot].push_back(task);
  if (begin.status == Begun::kBeingWritten) return;
  if (index_->has_sectors()) changed_.notify_one();
  ++operation.begun;
  ++num_writing_;
  const Place place = place_of(*begin.slot, task);
  lock.unlock();
  const bool done = write_value(worker, place);
  lock.lock();
  --num_writing_;
  count_errors(done, value_errors_in_row_);
  if (done) {
    ++written_values_;
    written_bytes_ += static_cast<uint64_t>(num_bytes);
  }
  end_use(operation);
  if (!index_->end_write(*begin.slot, done)) answer(*begin.slot, false);
  requeue_waiting();
  changed_.notify_one();  // this thread may not be the first to see a limit of threads that is not reached any more
}

DiskFiles::Place DiskFiles::place_of(const Slot& slot, const Task& task) const {
  const Operation& operation = *task.operation;
  char* const memory = options_.memory + operation.offsets[task.i];
  return {data_[slot.slab % kDataFiles].fd(), index_->offset_in_file(slot), memory, operation.space.num_bytes};
}

// Memory is read and written directly, as far as whole sectors are aligned in it. The rest goes through a buffer.
bool DiskFiles::read_value(Worker& worker, const Place& place) {
  const int64_t whole = whole_sectors(place.memory, place.num_bytes), rest = place.num_bytes - whole;
  char* const buffer = worker.bounce.reserve(rest);
  if (rest > 0 && buffer == nullptr) return false;
  const iovec first = {place.memory, static_cast<size_t>(whole)};
  const iovec second = {buffer, static_cast<size_t>(stride_of(rest))};
  if (!transfer(Direction::kRead, place.fd, {{first, second}, place.at})) return false;
  if (rest > 0) std::memcpy(place.memory + whole, buffer, static_cast<size_t>(rest));
  return true;
}

bool DiskFiles::write_value(Worker& worker, const Place& place) {
  const int64_t whole = whole_sectors(place.memory, place.num_bytes), rest = place.num_bytes - whole;
  char* const buffer = worker.bounce.reserve(rest);
  if (rest > 0 && buffer == nullptr) return false;
  const iovec first = {place.memory, static_cast<size_t>(whole)};
  const iovec second = {buffer, static_cast<size_t>(stride_of(rest))};
  if (rest > 0) {
    std::memcpy(buffer, place.memory + whole, static_cast<size_t>(rest));
    std::memset(buffer + rest, 0, second.iov_len - static_cast<size_t>(rest));
  }
  return transfer(Direction::kWrite, place.fd, {{first, second}, place.at});
}

// Values that waited for room are written next.
void DiskFiles::requeue_waiting() {
  for (auto waiting = waiting_.begin(); waiting != waiting_.end();) {
    std::deque<Task>& tasks = waiting->second;
    const size_t count = std::min(tasks.size(), index_->num_admitted(waiting->first));
    writes_.insert(writes_.begin(), tasks.begin(), tasks.begin() + static_cast<ptrdiff_t>(count));
    tasks.erase(tasks.begin(), tasks.begin() + static_cast<ptrdiff_t>(count));
    num_waiting_ -= count;
    wake(count);
    waiting = tasks.empty() ? waiting_.erase(waiting) : std::next(waiting);
  }
}

void DiskFiles::count_errors(bool done, uint64_t& errors_in_row) {
  errors_in_row = done ? 0 : errors_in_row + 1;
  if (!done) ++errors_;
}

// Values and records are counted apart: a disk that takes one of them only stores nothing.
bool DiskFiles::writes_fail() const {
  return std::max(value_errors_in_row_, record_errors_in_row_) >= kMostErrorsInRow;
}

// The next value is written, though writes fail. Every other time it may take room that failed before, so that neither
// a disk that fails for long loses its values, nor a bad place on it stops the tier.
void DiskFiles::begin_probe(int64_t stride) {
  probe_due_ = true;
  if (++num_probes_ % 2 == 1) index_->mend(stride);
}

}  // namespace kvservice::disk
