// A library for LD_PRELOAD that limits how often one process can connect to the daemon's unix sockets. It is a library
// of its own, because only preloaded symbols come before those of libc.
//
// gRPC accepts connections as fast as they come, and has no option that limits that. Each can leave a call in the queue
// of the daemon, in which the calls of all clients wait, although its client has gone. A process that connects 10,000
// times a second fills this queue, and gRPC then cancels calls of other clients. So `accept4` closes the connections of
// a process that are over the limit before gRPC knows of them. Connections over TCP are not changed: the kernel does
// not tell from which process they come. Tried by tests/server/test_unix_connects.py.
#include <dlfcn.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <ctime>
#include <mutex>

namespace {

// Connections of one process that are accepted at once, and how many more each second.
constexpr double kBurst = 512;
constexpr double kPerSecond = 1024;
// The number of processes that are known. A new one replaces the one that connected longest ago.
constexpr size_t kProcesses = 256;

// A process that has connected. Its pid is 0 if it is of another pid namespace: all of them of one user are then one.
struct Process {
  ucred peer{-1, 0, 0};
  double allowed = 0;
  double connected_at = 0;

  bool is(const ucred& other) const { return peer.pid == other.pid && peer.uid == other.uid; }
};

double now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

bool is_within_limit(const ucred& peer) {
  static std::mutex mutex;
  static std::array<Process, kProcesses> processes;
  const std::lock_guard<std::mutex> lock(mutex);
  Process* process = processes.data();
  for (Process& known : processes) {
    if (known.is(peer)) {
      process = &known;
      break;
    }
    if (known.connected_at < process->connected_at) process = &known;
  }
  const double time = now();
  if (!process->is(peer)) *process = {peer, kBurst, time};
  process->allowed += (time - process->connected_at) * kPerSecond;
  if (process->allowed > kBurst) process->allowed = kBurst;
  process->connected_at = time;
  if (process->allowed < 1) return false;
  process->allowed -= 1;
  return true;
}

bool is_allowed(int fd) {
  int family = AF_UNSPEC;
  socklen_t length = sizeof(family);
  if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &length) != 0 || family != AF_UNIX) return true;
  ucred peer{};
  length = sizeof(peer);
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 || is_within_limit(peer);
}

}  // namespace

// The declarations of libc have reserved names for their parameters.
// NOLINTBEGIN(readability-inconsistent-declaration-parameter-name)
extern "C" __attribute__((visibility("default"))) int accept4(int fd, sockaddr* address, socklen_t* length, int flags) {
  static auto* const real = reinterpret_cast<int (*)(int, sockaddr*, socklen_t*, int)>(dlsym(RTLD_NEXT, "accept4"));
  const socklen_t room = length == nullptr ? 0 : *length;
  while (true) {
    const int accepted = real(fd, address, length, flags);
    if (accepted < 0 || is_allowed(accepted)) return accepted;
    close(accepted);
    if (length != nullptr) *length = room;
  }
}
// NOLINTEND(readability-inconsistent-declaration-parameter-name)
