"""A proxy between client and daemon whose connections tests can break."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path


class CuttingProxy:
    """A context manager that forwards a unix socket. Clients connect to `address`. `handover`: clients can also reach
    the daemon's fd-passing socket, which bypasses the proxy."""

    def __init__(self, directory: Path, address: str, *, handover: bool = False) -> None:
        self._target = address.removeprefix("unix://")
        self._path = directory / "proxy.sock"
        self.address = f"unix://{self._path}"
        if handover:
            Path(f"{self._path}.fds").symlink_to(f"{self._target}.fds")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._mute = threading.Event()
        self._refuse = False

    def lose_replies(self) -> None:
        """Drop all data from the daemon to the client until the next cut. Data to the daemon still pass."""
        self._mute.set()

    def cut(self, *, stay_down: bool = False) -> None:
        """Break all connections. `stay_down`: accept no new ones until `up`."""
        self._refuse = stay_down
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._ends.clear()
        self._mute = threading.Event()  # the old connections still drop data

    def up(self) -> None:
        self._refuse = False

    def __enter__(self) -> CuttingProxy:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut(stay_down=True)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        self._listener.close()

    def _start(self, work: object, *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._refuse:
                    client.close()
                    continue
                daemon = socket.socket(socket.AF_UNIX)
                daemon.connect(self._target)
                self._ends += [client, daemon]
                self._start(self._serve, client, daemon, self._mute)

    def _serve(self, client: socket.socket, daemon: socket.socket, mute: threading.Event) -> None:
        back = threading.Thread(target=_pump, args=(daemon, client, mute), daemon=True)
        with client, daemon:
            back.start()
            _pump(client, daemon, threading.Event())
            back.join()


def _pump(source: socket.socket, target: socket.socket, mute: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            if not mute.is_set():
                target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
