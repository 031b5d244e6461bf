// A library for LD_PRELOAD that decides where a process listens, for libraries that would listen on all interfaces and
// cannot be configured. It is a library of its own, because only preloaded symbols come before those of libc.
//
// Mooncake 0.3.13 with each of its settings at 127.0.0.1 (`initialize`, MC_TCP_BIND_ADDRESS) listens on 0.0.0.0 and on
// [::], and whoever connects reads and writes all memory that is registered with it. A firewall or a network namespace
// would stop that as well, but only root can make one. Tried by tests/mooncake/test_listening.py:
// `test_mooncake_alone_listens_on_all_interfaces`.
//
// KVSERVICE_LISTEN_ADDRESS is a numeric IPv4 or IPv6 address, or "none". A stream socket that is bound to the wildcard
// address is bound to this address instead. With "none" it is bound to all addresses, which reserves its port, and
// never listens: `listen` succeeds without effect, and `accept` finds no connection. Sockets that are bound to another
// address, and other kinds of sockets, are not changed. Without the variable nothing is changed.
//
// KVSERVICE_PEER_ADDRESS is a numeric IPv4 or IPv6 address. A connection from another address is closed as soon as it
// is accepted, and `accept` fails with ECONNABORTED. `connect` to another address fails with EACCES: the peer of a
// library may name other hosts to connect to. Without the variable all connections are allowed.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>

namespace {

constexpr char kVariable[] = "KVSERVICE_LISTEN_ADDRESS";
constexpr char kPeerVariable[] = "KVSERVICE_PEER_ADDRESS";
constexpr char kNone[] = "none";
// How long `accept` takes on a blocking socket without a timeout.
constexpr timeval kAcceptTime{1, 0};

template <class Function>
Function* original(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

// Nothing in the process changes the environment.
const char* variable(const char* name) { return getenv(name); }  // NOLINT(concurrency-mt-unsafe)

const char* wanted_address() { return variable(kVariable); }

bool listens_nowhere() {
  const char* const wanted = wanted_address();
  return wanted != nullptr && strcmp(wanted, kNone) == 0;
}

bool is_stream(int fd) {
  int type = 0;
  socklen_t length = sizeof(type);
  return getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) == 0 && type == SOCK_STREAM;
}

int family_of(int fd) {
  int family = AF_UNSPEC;
  socklen_t length = sizeof(family);
  return getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &length) == 0 ? family : AF_UNSPEC;
}

bool is_internet_stream(int fd) {
  const int family = family_of(fd);
  return (family == AF_INET || family == AF_INET6) && is_stream(fd);
}

bool is_wildcard(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr == htonl(INADDR_ANY);
  }
  if (address.ss_family != AF_INET6) return false;
  const in6_addr& any = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  return IN6_IS_ADDR_UNSPECIFIED(&any);
}

// Replaces the wildcard in `address`. A socket of IPv4 gets the loopback address if another family is wanted: the
// library reserves ports with such sockets. Returns false if `wanted` is no address.
bool replace_wildcard(sockaddr_storage& address, const char* wanted) {
  in_addr v4{};
  in6_addr v6{};
  const bool is_v4 = inet_pton(AF_INET, wanted, &v4) == 1;
  const bool is_v6 = inet_pton(AF_INET6, wanted, &v6) == 1;
  if (!is_v4) v4.s_addr = htonl(INADDR_LOOPBACK);
  if (address.ss_family == AF_INET) {
    reinterpret_cast<sockaddr_in&>(address).sin_addr = v4;
  } else if (is_v6) {
    reinterpret_cast<sockaddr_in6&>(address).sin6_addr = v6;
  } else {  // ::ffff:a.b.c.d
    in6_addr& mapped = reinterpret_cast<sockaddr_in6&>(address).sin6_addr;
    mapped.s6_addr[10] = mapped.s6_addr[11] = 0xFF;
    memcpy(&mapped.s6_addr[12], &v4, sizeof(v4));
  }
  return is_v4 || is_v6;
}

// Writes an address as IPv6, an IPv4 address as ::ffff:a.b.c.d. Returns false for other texts.
bool parse_address(const char* text, in6_addr& address) {
  sockaddr_storage v6{};
  v6.ss_family = AF_INET6;
  if (!replace_wildcard(v6, text)) return false;
  address = reinterpret_cast<sockaddr_in6&>(v6).sin6_addr;
  return true;
}

// Returns whether KVSERVICE_PEER_ADDRESS allows connections with an address.
bool is_wanted(const sockaddr_storage& peer) {
  const char* const wanted = variable(kPeerVariable);
  if (wanted == nullptr) return true;
  in6_addr expected{}, found{};
  if (peer.ss_family == AF_INET6) {
    found = reinterpret_cast<const sockaddr_in6&>(peer).sin6_addr;
  } else if (peer.ss_family == AF_INET) {
    found.s6_addr[10] = found.s6_addr[11] = 0xFF;
    memcpy(&found.s6_addr[12], &reinterpret_cast<const sockaddr_in&>(peer).sin_addr, sizeof(in_addr));
  } else {
    return true;  // not of the network
  }
  return parse_address(wanted, expected) && memcmp(&expected, &found, sizeof(found)) == 0;
}

bool has_wanted_peer(int fd) {
  sockaddr_storage peer{};
  socklen_t length = sizeof(peer);
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0) return variable(kPeerVariable) == nullptr;
  return is_wanted(peer);
}

// Returns an accepted connection, unless its peer is not wanted.
int checked(int fd) {
  if (fd < 0 || has_wanted_peer(fd)) return fd;
  close(fd);
  errno = ECONNABORTED;
  return -1;
}

// Returns what a call to `accept` returns that has found no connection: on a blocking socket after its timeout.
int accept_nothing(int fd) {
  timeval time{};
  socklen_t length = sizeof(time);
  getsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &time, &length);
  if (time.tv_sec == 0 && time.tv_usec == 0) time = kAcceptTime;
  if ((fcntl(fd, F_GETFL) & O_NONBLOCK) == 0) {
    const timespec pause{time.tv_sec, time.tv_usec * 1000};
    nanosleep(&pause, nullptr);
  }
  errno = EAGAIN;
  return -1;
}

}  // namespace

// The declarations of libc have reserved names for their parameters.
// NOLINTBEGIN(readability-inconsistent-declaration-parameter-name)
extern "C" {

__attribute__((visibility("default"))) int bind(int fd, const sockaddr* address, socklen_t length) noexcept {
  auto* const real = original<int(int, const sockaddr*, socklen_t)>("bind");
  const char* const wanted = wanted_address();
  if (wanted == nullptr || listens_nowhere() || address == nullptr || length > sizeof(sockaddr_storage) ||
      !is_internet_stream(fd)) {
    return real(fd, address, length);
  }
  sockaddr_storage changed{};
  memcpy(&changed, address, length);
  if (!is_wildcard(changed)) return real(fd, address, length);
  if (!replace_wildcard(changed, wanted)) {
    errno = EADDRNOTAVAIL;
    return -1;
  }
  return real(fd, reinterpret_cast<const sockaddr*>(&changed), length);
}

__attribute__((visibility("default"))) int listen(int fd, int backlog) noexcept {
  if (listens_nowhere() && is_internet_stream(fd)) return 0;
  return original<int(int, int)>("listen")(fd, backlog);
}

__attribute__((visibility("default"))) int accept(int fd, sockaddr* address, socklen_t* length) {
  if (listens_nowhere() && is_internet_stream(fd)) return accept_nothing(fd);
  return checked(original<int(int, sockaddr*, socklen_t*)>("accept")(fd, address, length));
}

__attribute__((visibility("default"))) int accept4(int fd, sockaddr* address, socklen_t* length, int flags) {
  if (listens_nowhere() && is_internet_stream(fd)) return accept_nothing(fd);
  return checked(original<int(int, sockaddr*, socklen_t*, int)>("accept4")(fd, address, length, flags));
}

__attribute__((visibility("default"))) int connect(int fd, const sockaddr* address, socklen_t length) {
  sockaddr_storage target{};
  if (address != nullptr && length <= sizeof(target) && is_internet_stream(fd)) {
    memcpy(&target, address, length);
    if (!is_wanted(target)) {
      errno = EACCES;
      return -1;
    }
  }
  return original<int(int, const sockaddr*, socklen_t)>("connect")(fd, address, length);
}
}
// NOLINTEND(readability-inconsistent-declaration-parameter-name)
