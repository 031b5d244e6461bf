"""The daemon's side of systemd's protocol: notifications, and file descriptors that outlive the process.

See sd_notify(3), sd_listen_fds(3) and FileDescriptorStoreMax= in systemd.service(5). The manager on the other side is
systemd, or the process of `kvservice.keeper`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
from collections.abc import Mapping, MutableMapping, Sequence

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
