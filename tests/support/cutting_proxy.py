"""A network between client and daemon that breaks when it is told to."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path


class CuttingProxy:
    """Forwards a unix socket. A context manager; clients connect to `address`. `handover`: they reach the socket for
    descriptors, too, past the proxy."""

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
        """From now on the daemon hears the client, and the client hears nothing, until the next cut."""
        self._mute.set()

    def cut(self, *, stay_down: bool = False) -> None:
        """Break all connections. `stay_down`: and accept none until `up`."""
        self._refuse = stay_down
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._ends.clear()
        self._mute = threading.Event()  # the old connections stay mute

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
