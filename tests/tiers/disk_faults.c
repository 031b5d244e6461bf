// A library for LD_PRELOAD that makes the disk fail. disk_faults() sets how many of 1000 calls do.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/uio.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static unsigned state = 1;
static int read_errors, write_errors, full_disks, short_transfers;

void disk_faults(unsigned seed, int reads, int writes, int full, int shorts) {
  pthread_mutex_lock(&mutex);
  state = seed;
  read_errors = reads;
  write_errors = writes;
  full_disks = full;
  short_transfers = shorts;
  pthread_mutex_unlock(&mutex);
}

static int happens(int per_mille) {
  pthread_mutex_lock(&mutex);
  const int result = rand_r(&state) % 1000 < per_mille;
  pthread_mutex_unlock(&mutex);
  return result;
}

typedef ssize_t transfer_t(int, const struct iovec*, int, off_t);

// Transfers less than is asked for, and says that it was even less.
static ssize_t transfer(transfer_t* call, int fd, const struct iovec* parts, int count, off_t at) {
  if (!happens(short_transfers)) return call(fd, parts, count, at);
  struct iovec first = parts[0];
  if (first.iov_len > 4096) first.iov_len = first.iov_len / 8192 * 4096;
  const ssize_t done = call(fd, &first, 1, at);
  return done > 4096 && happens(500) ? done - 100 : done;
}

ssize_t preadv(int fd, const struct iovec* parts, int count, off_t at) {
  if (happens(read_errors)) return errno = EIO, -1;
  return transfer((transfer_t*)dlsym(RTLD_NEXT, "preadv"), fd, parts, count, at);
}

ssize_t pwritev(int fd, const struct iovec* parts, int count, off_t at) {
  if (happens(write_errors)) return errno = EIO, -1;
  if (happens(full_disks)) return errno = ENOSPC, -1;
  return transfer((transfer_t*)dlsym(RTLD_NEXT, "pwritev"), fd, parts, count, at);
}

int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  if (flags & O_DIRECT && getenv("NO_DIRECT") != NULL) return errno = EINVAL, -1;
  int (*call)(const char*, int, ...) = (int (*)(const char*, int, ...))dlsym(RTLD_NEXT, "open");
  return call(path, flags, mode);
}

int fallocate(int fd, int mode, off_t at, off_t num_bytes) {
  const char* error = getenv("FALLOCATE_ERROR");
  if (error != NULL) return errno = atoi(error), -1;
  return ((int (*)(int, int, off_t, off_t))dlsym(RTLD_NEXT, "fallocate"))(fd, mode, at, num_bytes);
}
