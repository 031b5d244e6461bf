"""Another process that uses the GPU and executes functions that arrive over a pipe."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import numpy as np

WAIT_S = 60.0
# Objects that a peer keeps alive, by name.
kept: dict[str, Any] = {}


class Peer:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the peer. Raises its error as RuntimeError with type and text."""
        self._pipe.send((function, arguments))
        assert self._pipe.poll(WAIT_S), "the peer does not answer"
        result, error = self._pipe.recv()
        if error is not None:
            raise RuntimeError(error)
        return result

    def send_fd(self, fd: int) -> None:
        """Send a descriptor to `receive_fd` in the peer."""
        pid = self._process.pid
        assert pid is not None
        self._pipe.send((receive_fd, ()))
        send_handle(self._pipe, fd, pid)
        assert self._pipe.recv() == (None, None)

    def fetch_fd(self, function: Callable[..., int], *arguments: Any) -> int:
        """Call a function that returns a descriptor, and receive it. The peer closes its copy."""
        self._pipe.send((_send_fd, (function, arguments)))
        fd = recv_handle(self._pipe)
        assert self._pipe.recv() == (None, None)
        return fd

    def kill(self) -> None:
        pid = self._process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self._process.join(WAIT_S)
        assert self._process.exitcode == -signal.SIGKILL

    def close(self) -> None:
        self._pipe.close()
        self._process.join(WAIT_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(WAIT_S)


@contextlib.contextmanager
def peer() -> Iterator[Peer]:
    other = Peer()
    try:
        yield other
    finally:
        other.close()


def _serve(pipe: Connection) -> None:
    global connection
    connection = pipe
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((function(*arguments), None))
        except Exception as error:
            pipe.send((None, f"{type(error).__name__}: {error}"))


connection: Connection


def _send_fd(function: Callable[..., int], arguments: tuple[Any, ...]) -> None:
    fd = function(*arguments)
    send_handle(connection, fd, os.getppid())
    os.close(fd)


def receive_fd() -> None:
    kept["fd"] = recv_handle(connection)


# --- functions that run in a peer


def allocate(name: str, num_bytes: int, byte: int) -> bytes:
    """Allocate GPU memory filled with one value and return its IPC handle."""
    from kvservice import _cuda

    memory = kept[name] = _cuda.IpcAllocation(0, num_bytes)
    _cuda.fill_async(memory.pointer, byte, memory.num_bytes, 0)
    wait()
    handle: bytes = memory.handle
    return handle


def export_pool(name: str, num_bytes: int, byte: int) -> int:
    """Allocate GPU memory filled with one value and return a descriptor of it."""
    from kvservice import _cuda

    memory = kept[name] = _cuda.DeviceMemory(0, num_bytes)
    _cuda.fill_async(memory.pointer, byte, memory.num_bytes, 0)
    wait()
    return memory.export_fd()


def size_of(name: str) -> int:
    return int(kept[name].num_bytes)


def close(name: str) -> None:
    kept.pop(name).close()


def fill(name: str, byte: int) -> None:
    from kvservice import _cuda

    _cuda.fill_async(kept[name].pointer, byte, kept[name].num_bytes, 0)
    wait()


def read(name: str, offset: int = 0) -> int:
    return int(download(kept[name].pointer + offset, 1)[0])


def open_handle(name: str, handle: bytes, num_bytes: int) -> None:
    from kvservice import _cuda

    kept[name] = _cuda.IpcMemory(0, handle, num_bytes)


def probe_handle(handle: bytes, num_bytes: int) -> str:
    """Report whether a handle refers to memory filled with 6. The process may lose its device by this."""
    from kvservice import _cuda
    from kvservice.errors import InvalidArgumentError

    try:
        memory = _cuda.IpcMemory(0, handle, num_bytes)
    except (InvalidArgumentError, _cuda.CudaError):
        return "refused"
    try:
        for offset in (0, num_bytes - 1):
            if download(memory.pointer + offset, 1)[0] != 6:
                return "other memory"
    except _cuda.CudaError:
        return "a fault"
    memory.close()
    return "the same memory"


def import_pool(name: str, num_bytes: int, writable: bool) -> None:
    """Import the pool from the descriptor that was sent last."""
    from kvservice import _cuda

    fd = kept.pop("fd")
    kept[name] = _cuda.ImportedMemory(0, fd, num_bytes, writable)
    os.close(fd)


def wait() -> None:
    from kvservice import _cuda

    done = _cuda.Event(0)
    done.record(0)
    done.synchronize()


def download(pointer: int, num_bytes: int) -> np.ndarray:
    from kvservice import _cuda

    array = np.zeros(num_bytes, np.uint8)
    _cuda.copy_async(array.ctypes.data, pointer, num_bytes, 0)
    wait()
    return array
