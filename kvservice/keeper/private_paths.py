"""Paths that are the daemon's alone. Folders whose content it trusts: it writes to the files that it finds there, and
clients get their bytes. Unix sockets at paths that are never free: a socket is made beside its path, and a rename puts
it in the place of the one before. At the end: the sockets beside the daemon's unix socket."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path

# Longest path of a unix socket; Linux's sun_path has one byte more, for the terminating zero.
MAX_SOCKET_PATH_BYTES = 107
_PROBE_S = 1.0
_SO_PASSRIGHTS = 83


def private_folder(path: Path) -> Path:
    """Create a folder that only the daemon's user can change, or check one that is there.

    Raises OSError for a link, for the folder of another user, and for one that others can write to: they could have
    put links or forged files there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is no directory", str(path))
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to user {found.st_uid}, not to the daemon's", str(path))
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, "other users can write to it", str(path))
    return path


def why_unusable(error: OSError, path: Path) -> str:
    """Return which part of a private folder cannot be used, why, and what to do about it."""
    where, why = error.filename or path, error.strerror or str(error)
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        why = "there is no directory at this path, but a file: name another one"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        why += f"; user {os.geteuid()}, the daemon's, must own it and may alone write to it"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        why += "; make room there, or name another directory"
    return f"{where} cannot be used: {why}"


def beside(path: str) -> str:
    """Return a path in the same folder, for a socket that `put_in_place` then moves."""
    folder, name = os.path.split(path)
    found = os.path.join(folder, f"{name}.{os.urandom(4).hex()}")
    if len(os.fsencode(found)) <= MAX_SOCKET_PATH_BYTES:
        return found
    return os.path.join(folder, f".{os.urandom(2).hex()}")


def put_in_place(made: str, path: str) -> os.stat_result:
    """Move a socket to its path, in place of a socket there that no process serves. Returns its status, by which
    `remove_own` knows it. Raises OSError."""
    found = os.lstat(made)
    try:
        os.link(made, path, follow_symlinks=False)
        os.unlink(made)
    except FileExistsError:
        check_unused(path)
        os.rename(made, path)
    except PermissionError:  # a file system without links
        check_unused(path)
        os.rename(made, path)
    return found


def check_unused(path: str) -> None:
    """Raise OSError if there is anything at the path but a socket that no process serves."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "it exists and is not a socket", path)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_PROBE_S)
            probe.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return
    raise OSError(errno.EADDRINUSE, "it is served by another process", path)


def refuse_descriptors(listening: socket.socket) -> None:
    """Have the kernel refuse messages with descriptors on the connections of a unix socket, from Linux 6.16 on.

    Nothing here expects any. The last close of some waits as long as their sender likes, such as that of a TCP
    connection with SO_LINGER and unsent data, and a message that is only dropped closes its descriptors, too.
    """
    try:
        listening.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise


def listen_at(path: str, backlog: int, mode: int = 0o600) -> socket.socket:
    """Return a socket that listens at the path. Nobody can connect before it has its mode, and it gets no descriptors.
    Raises OSError."""
    made = beside(path)
    listening = socket.socket(socket.AF_UNIX)
    umask = os.umask(0o177)
    try:
        refuse_descriptors(listening)
        listening.bind(made)
        listening.listen(backlog)
        os.chmod(made, mode)
        put_in_place(made, path)
    except OSError:
        listening.close()
        with contextlib.suppress(OSError):
            os.unlink(made)
        raise
    finally:
        os.umask(umask)
    return listening


def remove_own(path: str, made: os.stat_result) -> None:
    """Remove a socket that `put_in_place` has moved there, unless something else is in its place."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.lstat(path), made):
            os.unlink(path)


def control_path(unix_socket: str) -> str:
    """Return the path of the control socket beside the daemon's unix socket, or empty if there can be none."""
    return _beside(unix_socket, "keeper")


def door_path(unix_socket: str) -> str:
    """Return the path of the operator's door, the daemon's second gRPC socket, beside its unix socket, or empty if
    there can be none."""
    return _beside(unix_socket, "own")


def _beside(unix_socket: str, ending: str) -> str:
    path = f"{unix_socket}.{ending}"
    return path if unix_socket and len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES else ""
