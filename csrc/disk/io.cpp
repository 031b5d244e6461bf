#include "disk/io.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <stdexcept>
#include <system_error>

namespace kvservice::disk {
namespace {

[[noreturn]] void fail(const std::string& path, const std::string& reason) {
  throw std::runtime_error(path + ": " + reason);
}

[[noreturn]] void fail(const std::string& path, int error) { fail(path, std::generic_category().message(error)); }

// Returns a file without a descriptor, and errno, if there is none or the flags are not supported. What a link names is
// never opened, and a pipe is not waited for.
File try_open(const std::string& path, int flags) {
  File file(open(path.c_str(), flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (file.fd() < 0 && (errno == ENOENT || errno == EINVAL)) return file;
  const bool is_other = file.fd() < 0 && (errno == ELOOP || errno == ENXIO || errno == EISDIR);
  struct stat status{};
  if (!is_other && (file.fd() < 0 || fstat(file.fd(), &status) != 0)) fail(path, errno);
  if (is_other || !S_ISREG(status.st_mode)) fail(path, "is not a regular file");
  return file;
}

File open_file(const std::string& path, int flags) {
  File file = try_open(path, flags);
  if (file.fd() < 0) fail(path, errno);
  return file;
}

void write_meta(const std::string& directory, const Meta& meta) {
  const std::string path = directory + "/meta", draft = path + ".new";
  const File file = open_file(draft, O_WRONLY | O_CREAT | O_TRUNC);
  if (write(file.fd(), &meta, sizeof(meta)) != sizeof(meta) || fsync(file.fd()) != 0) fail(draft, errno);
  if (rename(draft.c_str(), path.c_str()) != 0) fail(path, errno);
  const File parent(open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (parent.fd() < 0 || fsync(parent.fd()) != 0) fail(directory, errno);
}

}  // namespace

File::~File() {
  if (fd_ >= 0) close(fd_);
}

char* SectorBuffer::reserve(int64_t num_bytes) {
  num_bytes = stride_of(num_bytes);
  if (num_bytes > num_bytes_) {
    num_bytes_ = 0;
    data_.reset(static_cast<char*>(std::aligned_alloc(kSectorBytes, static_cast<size_t>(num_bytes))));
    if (data_ != nullptr) num_bytes_ = num_bytes;
  }
  return data_.get();
}

// A short transfer goes on after its last whole sector, because the next one has to begin at a sector.
bool transfer(Direction direction, int fd, Transfer t) {
  int first = 0;
  for (;;) {
    while (first < 2 && t.parts[first].iov_len == 0) ++first;
    if (first == 2) return true;
    const ssize_t done = direction == Direction::kRead ? preadv(fd, t.parts + first, 2 - first, t.at)
                                                       : pwritev(fd, t.parts + first, 2 - first, t.at);
    if (done < 0 && errno == EINTR) continue;
    auto left = static_cast<size_t>(std::max<ssize_t>(done, 0)) / kSectorBytes * kSectorBytes;
    if (left == 0) return false;
    t.at += static_cast<int64_t>(left);
    for (int i = first; i < 2; ++i) {
      const size_t part = std::min(left, t.parts[i].iov_len);
      t.parts[i].iov_base = static_cast<char*>(t.parts[i].iov_base) + part;
      t.parts[i].iov_len -= part;
      left -= part;
    }
  }
}

File lock_directory(const std::string& directory) {
  if (mkdir(directory.c_str(), S_IRWXU) != 0 && errno != EEXIST) fail(directory, errno);
  const std::string path = directory + "/lock";
  File file = open_file(path, O_RDWR | O_CREAT);
  if (flock(file.fd(), LOCK_EX | LOCK_NB) != 0) {
    fail(directory, errno == EWOULDBLOCK ? "is in use by another process" : "cannot be locked");
  }
  return file;
}

int64_t open_meta(const std::string& directory, int64_t slab_bytes) {
  const std::string path = directory + "/meta";
  Meta meta = {kMetaMagic, kFormatVersion, kDataFiles, slab_bytes, 0};
  const File file = try_open(path, O_RDONLY);
  if (file.fd() < 0) {
    if (errno != ENOENT) fail(path, errno);
    meta.checksum = own_checksum(meta);
    write_meta(directory, meta);
    return slab_bytes;
  }
  const ssize_t size = read(file.fd(), &meta, sizeof(meta));
  if (size < 0) fail(path, errno);
  if (size != sizeof(meta) || meta.magic != kMetaMagic) fail(path, "is not of a disk tier");
  if (meta.version != kFormatVersion) {
    fail(path, "has format " + std::to_string(meta.version) + ", this version reads format " +
                   std::to_string(kFormatVersion) + "; an empty directory starts a new tier");
  }
  const bool right = meta.checksum == own_checksum(meta) && meta.num_data_files == kDataFiles &&
                     meta.slab_bytes >= kSectorBytes && meta.slab_bytes % kSectorBytes == 0;
  if (!right) fail(path, "is damaged; an empty directory starts a new tier");
  return meta.slab_bytes;
}

File open_data(const std::string& path, bool& direct) {
  if (direct) {
    File file = try_open(path, O_RDWR | O_CREAT | O_DIRECT);
    if (file.fd() >= 0) return file;
    if (errno != EINVAL) fail(path, errno);
    direct = false;
  }
  return open_file(path, O_RDWR | O_CREAT);
}

void check_room(const std::string& directory, int64_t num_bytes) {
  struct statvfs space{};
  if (statvfs(directory.c_str(), &space) != 0) fail(directory, errno);
  const auto room = static_cast<int64_t>(space.f_bavail * space.f_frsize);
  if (num_bytes <= room) return;
  fail(directory, "needs " + std::to_string(num_bytes >> 20) + " MiB more, its file system has " +
                      std::to_string(room >> 20) + " MiB");
}

int64_t allocated_bytes(const File& file) {
  struct stat status{};
  return fstat(file.fd(), &status) == 0 ? status.st_blocks * 512 : 0;
}

// A file system that cannot allocate blocks ahead gets a sparse file.
void set_size(const File& file, const std::string& path, int64_t num_bytes) {
  struct stat status{};
  if (fstat(file.fd(), &status) != 0) fail(path, errno);
  int error = 0;
  if (num_bytes > 0 && allocated_bytes(file) < num_bytes && fallocate(file.fd(), 0, 0, num_bytes) != 0) error = errno;
  if (error != 0 && error != EOPNOTSUPP) {
    ftruncate(file.fd(), status.st_size);
    fail(path, error);
  }
  if (status.st_size != num_bytes && ftruncate(file.fd(), num_bytes) != 0) fail(path, errno);
}

}  // namespace kvservice::disk
