// Files of the disk tier: opening, locking, preallocation, and transfers that end whole or fail.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "disk/format.h"

namespace kvservice::disk {

// A file descriptor.
class File {
 public:
  explicit File(int fd = -1) : fd_(fd) {}
  ~File();
  File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  File& operator=(File&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }

  int fd() const { return fd_; }

 private:
  int fd_;
};

// Memory for O_DIRECT.
class SectorBuffer {
 public:
  // Returns nullptr if there is no memory.
  char* reserve(int64_t num_bytes);

 private:
  std::unique_ptr<char, decltype(&std::free)> data_{nullptr, &std::free};
  int64_t num_bytes_ = 0;
};

enum class Direction { kRead, kWrite };

// Two buffers, the second of which may be empty. Positions and sizes are multiples of sectors.
struct Transfer {
  iovec parts[2];
  int64_t at;
};

// Returns whether everything was read or written.
bool transfer(Direction direction, int fd, Transfer transfer);

// These throw std::runtime_error with the path and the reason.

// Makes the directory, if necessary, and locks it. The lock ends with the file.
File lock_directory(const std::string& directory);
// Returns the size of slabs: that of the files there are, or this one, which is then recorded.
int64_t open_meta(const std::string& directory, int64_t slab_bytes);
// Opens or makes a file without the page cache. Sets `direct` to false if the file system cannot do that.
File open_data(const std::string& path, bool& direct);
// Throws unless the file system has room for this growth.
void check_room(const std::string& directory, int64_t num_bytes);
int64_t allocated_bytes(const File& file);
// Gives the file its size and its blocks on the disk.
void set_size(const File& file, const std::string& path, int64_t num_bytes);

}  // namespace kvservice::disk
