"""Systemd's protocol, first the daemon's side: notifications, and file descriptors that outlive the process.

See sd_notify(3), sd_listen_fds(3) and FileDescriptorStoreMax= in systemd.service(5). The manager on the other side is
systemd, or the process of `kvservice.keeper`.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import select
import socket
import struct
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

# The first descriptor that a manager passes to a process that it starts.
FIRST_DESCRIPTOR = 3
# Limits of systemd on one message and on the name of a descriptor.
MAX_MESSAGE_BYTES = 4096
MAX_NAME_CHARACTERS = 255
# The time that a message may wait for a manager that is busy.
SEND_S = 10.0

READY = "READY=1"
# The process ends in order with status 0 so that another one takes its state over.
HANDOVER = "X_KVSERVICE_HANDOVER=1"
# The key of an assignment with the version of the process.
VERSION = "X_KVSERVICE_VERSION"

_LISTEN_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
# The variables that a manager sets for a process.
MANAGER_VARIABLES = ("NOTIFY_SOCKET", "FDSTORE", *_LISTEN_VARIABLES)


class Notifier:
    """Sends notifications to the manager of this process. Methods raise OSError if the manager does not get them."""

    def __init__(self, address: str) -> None:
        """`address` is a value of NOTIFY_SOCKET: the path of a socket, or @ and a name in the abstract namespace.

        Raises ValueError for another one, and OSError if there is no such socket.
        """
        if address[:1] not in ("/", "@") or len(address) < 2 or "\0" in address:
            raise ValueError(f"{address!r} is neither a path nor @ and a name")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.settimeout(SEND_S)
            self._socket.connect(f"\0{address[1:]}" if address[0] == "@" else address)
        except BaseException:
            self._socket.close()
            raise

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Notifier | None:
        """Return the notifier for the manager that NOTIFY_SOCKET names, or None without one. Raises ValueError and
        OSError as the constructor does."""
        address = environ.get("NOTIFY_SOCKET", "")
        return cls(address) if address else None

    def send(self, *assignments: str) -> None:
        """Send lines such as "READY=1" or "STATUS=text" in one message. Raises ValueError if they are more than 4096
        bytes, or if one has a line break."""
        self._send(assignments, ())

    def store(self, name: str, descriptor: int) -> None:
        """Have the manager keep a duplicate of the descriptor, in place of one that it keeps under this name.

        After a crash between the two messages the manager keeps none under the name. Raises ValueError for a name that
        systemd does not accept.
        """
        self.remove(name)
        # FDPOLL=0: without it systemd drops a descriptor once poll reports an error on it.
        self._send(("FDSTORE=1", f"FDNAME={name}", "FDPOLL=0"), (descriptor,))

    def remove(self, name: str) -> None:
        """Have the manager close what it keeps under this name, if it does. Raises ValueError as `store` does."""
        _check_name(name)
        self._send(("FDSTOREREMOVE=1", f"FDNAME={name}"), ())

    def barrier(self, timeout_s: float = SEND_S) -> None:
        """Wait until the manager has processed all earlier messages. Raises TimeoutError."""
        reading, writing = os.pipe()
        try:
            try:
                self._send(("BARRIER=1",), (writing,))
            finally:
                os.close(writing)
            # The manager closes its duplicate of the pipe's other end when it comes to the message.
            poll = select.poll()
            poll.register(reading, 0)
            if not poll.poll(timeout_s * 1000):
                raise TimeoutError(f"the manager did not answer for {timeout_s:g} s")
        finally:
            os.close(reading)

    def close(self) -> None:
        self._socket.close()

    def _send(self, assignments: Sequence[str], descriptors: Sequence[int]) -> None:
        if any("\n" in assignment for assignment in assignments):
            raise ValueError(f"a line break in the notification {assignments!r}")
        message = "\n".join(assignments).encode()
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a notification has {len(message)} bytes, at most {MAX_MESSAGE_BYTES} are possible")
        socket.send_fds(self._socket, [message], descriptors)


def report_version(version: str, environ: Mapping[str, str] = os.environ) -> None:
    """Tell the manager, if there is one that listens, which version this process is of."""
    _report(f"{VERSION}={version}", environ)


def report_failure(reason: str, environ: Mapping[str, str] = os.environ) -> None:
    """Tell the manager, if there is one that listens, why this process cannot start."""
    _report(f"STATUS=cannot start: {' '.join(reason.split())}", environ)


def _report(assignment: str, environ: Mapping[str, str]) -> None:
    with contextlib.suppress(OSError, ValueError):
        if (notifier := Notifier.from_environment(environ)) is not None:
            with contextlib.closing(notifier):
                notifier.send(assignment)


def is_name(text: str) -> bool:
    """Return whether a descriptor may have this name: 1 to 255 printable characters of ASCII, without a colon."""
    return (
        1 <= len(text) <= MAX_NAME_CHARACTERS
        and all(" " <= character <= "~" for character in text)
        and (":" not in text)
    )


def _check_name(name: str) -> None:
    if not is_name(name):
        raise ValueError(f"{name!r} is no name for a descriptor")


def taken_descriptors(environ: MutableMapping[str, str] = os.environ) -> dict[str, int]:
    """Return the descriptors that the manager passed to this process, by name. The caller owns them.

    The variables about them are removed from `environ`, and the descriptors are not inherited by child processes. If
    two different files have the same name, neither is returned. Raises ValueError if the variables contradict each
    other.
    """
    pid, count, names = (environ.pop(variable, "") for variable in _LISTEN_VARIABLES)
    if not pid or not count or int(pid) != os.getpid():
        return {}
    listed = names.split(":") if names else []
    if len(listed) != int(count):
        raise ValueError(f"LISTEN_FDNAMES has {len(listed)} names for {count} descriptors")
    taken: dict[str, int] = {}
    ambiguous: set[str] = set()
    for descriptor, name in enumerate(listed, FIRST_DESCRIPTOR):
        fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        if name not in taken:
            taken[name] = descriptor
            continue
        if not os.path.sameopenfile(descriptor, taken[name]):
            ambiguous.add(name)
        os.close(descriptor)
    for name in ambiguous:
        os.close(taken.pop(name))
    return taken


# ---- the keeper's side of systemd's protocol: the socket that the daemon's notifications arrive on


# The limit on descriptors in one message. The daemon sends one.
MAX_PASSED = 16
_CREDENTIALS = struct.Struct("iii")  # pid, uid, gid
_ANCILLARY_BYTES = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(MAX_PASSED * 4)


class BadNotificationError(Exception):
    """A message that breaks the protocol. Its descriptors are closed."""


@dataclass(frozen=True)
class Notification:
    """One message of the process `pid`: its assignments, and its descriptors, which the receiver owns."""

    pid: int
    values: dict[str, str]
    descriptors: tuple[int, ...] = ()

    def says(self, assignment: str) -> bool:
        """Return whether NAME=value is one of the assignments."""
        name, _, value = assignment.partition("=")
        return self.values.get(name) == value

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)


class NotifySocket:
    """A datagram socket to which only the keeper's user and root can send. The kernel says which process sent a
    message.

    Others must not be able to send at all: a message may carry descriptors that the keeper cannot close without
    waiting, such as that of a TCP connection with SO_LINGER and unsent data. So the socket is no abstract one, which
    every user reaches. It has a file, whose mode is 0600. The file loses its name at once, so that a killed keeper
    leaves none. The address is that of the keeper's own descriptor of the file.
    """

    def __init__(self, folder: str) -> None:
        """The file is made in `folder`. Raises OSError."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.setblocking(False)
        try:
            self._file = _bound_without_name(self._socket, folder)
        except OSError:
            self._socket.close()
            raise
        self.address = f"/proc/{os.getpid()}/fd/{self._file}"

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> Notification | None:
        """Return the next message, or None if none waits. Raises BadNotificationError."""
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                MAX_MESSAGE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        pid, descriptors = _read(ancillary)
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise BadNotificationError(f"a message of process {pid} is too large")
            if pid == 0:
                raise BadNotificationError("a message has no sender")
            return Notification(pid, _assignments(data, pid), descriptors)
        except BadNotificationError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def close(self) -> None:
        self._socket.close()
        os.close(self._file)


def _bound_without_name(unbound: socket.socket, folder: str) -> int:
    """Bind the socket to a new file of mode 0600, and return a descriptor of the file, which has no name any more."""
    directory = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    name = f".kvservice-{os.urandom(8).hex()}"
    umask = os.umask(0o177)
    try:
        # The folder's own path may be too long for the address of a socket.
        unbound.bind(f"/proc/self/fd/{directory}/{name}")
        try:
            return os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=directory)
        finally:
            os.unlink(name, dir_fd=directory)
    finally:
        os.umask(umask)
        os.close(directory)


def _read(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, tuple[int, ...]]:
    """Return the sender and the descriptors in the ancillary data. The sender is 0 if it is not known."""
    pid = 0
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            pid = _CREDENTIALS.unpack(content)[0]
    return pid, tuple(descriptors)


def _assignments(data: bytes, pid: int) -> dict[str, str]:
    """Return NAME=value lines as a dict. Raises BadNotificationError."""
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError:
        raise BadNotificationError(f"a message of process {pid} is not UTF-8") from None
    values = {}
    for line in lines:
        name, equals, value = line.partition("=")
        if line and not equals:
            raise BadNotificationError(f"a message of process {pid} has a line without =")
        values[name] = value
    values.pop("", None)
    return values


# ---- the start of a process that is to take over from a running daemon: what it says before, and the signal to go
#
# keeper                          standby process                old daemon
# start, duplicates of the
# descriptors           ────────▶ imports, checks the state      serves
#                       ◀──────── ready, or refused: why
# SIGUSR1               ───────────────────────────────────────▶ drains, saves its steps, ends with status 0
# go, the newest
# descriptors           ────────▶ opens the state, serves
#                       ◀──────── READY=1


# Its value is the descriptor of the socket on which the process gets the signal to go.
STANDBY_VARIABLE = "KVSERVICE_STANDBY"
STANDBY_READY = "ready"
# The key of the assignment that says STANDBY_READY, or why the process cannot take over.
STANDBY_SAYS = "X_KVSERVICE_STANDBY"
MAX_REASON_CHARACTERS = 1000
_MAX_GO_BYTES = 1 << 16
_MAX_DESCRIPTORS = 253  # the kernel's limit for one message


class Standby:
    """The side of the process that takes over."""

    def __init__(self, channel: socket.socket, notifier: Notifier) -> None:
        self._channel, self._notifier = channel, notifier

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str] = os.environ) -> Standby | None:
        """Return the standby if a keeper has started this process as one, else None. The variable that says so is
        removed from `environ`. Raises ValueError and OSError if the variables are wrong."""
        number = environ.pop(STANDBY_VARIABLE, "")
        notifier = Notifier.from_environment(environ) if number else None
        if notifier is None:
            return None
        channel = socket.socket(fileno=int(number))
        channel.set_inheritable(False)
        return cls(channel, notifier)

    def refuse(self, reason: str) -> None:
        """Say why this process cannot take over. The old daemon goes on serving, and this process must end."""
        self._say(" ".join(reason.split())[:MAX_REASON_CHARACTERS] or "no reason given")

    def wait_for_go(self, environ: MutableMapping[str, str] = os.environ) -> dict[str, int]:
        """Say that this process can take over, and wait until the old daemon has ended. Returns the descriptors that
        the keeper holds now, by name; the caller owns them.

        The variables about the end of the old daemon are set in `environ`. Raises EOFError if the keeper has given the
        upgrade up.
        """
        self._say(STANDBY_READY)
        data, descriptors, _, _ = socket.recv_fds(
            self._channel, _MAX_GO_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        if not data:
            raise EOFError("the keeper has given the upgrade up")
        go = json.loads(data)
        environ.update(go["environ"])
        self._channel.close()
        self._notifier.close()
        return dict(zip(go["names"], descriptors, strict=True))

    def _say(self, text: str) -> None:
        self._notifier.send(f"{STANDBY_SAYS}={text}")


def send_go(channel: socket.socket, descriptors: Mapping[str, int], environ: Mapping[str, str]) -> None:
    """Tell the process on the other end that the old daemon has ended. Raises OSError if that process has ended."""
    message = json.dumps({"names": [*descriptors], "environ": dict(environ)}).encode()
    socket.send_fds(channel, [message], [*descriptors.values()])
