"""Latency of a client while another one floods the daemon with HTTP/2 frames that are no calls, over 20 connections.

The flood is a process of its own, `python -m kvservice.bench.floods ADDRESS KIND`. It needs no token: gRPC reads all
frames before the daemon knows whose they are. A second process only pings, on the unix socket. Both processors of a
small host are then busy, so the first row is a process that computes and sends nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console

from kvservice.bench.harness import table
from kvservice.owned import OwnedProcess

# Goal for the longest ping under a flood.
GOAL_S: Final = 0.1
NUM_CONNECTIONS: Final = 20
SECONDS: Final = 4.0
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 8, 9
END_HEADERS, ACK = 4, 1
# Bytes of a flood that are written, and of the answers that are read, at a time.
CHUNK_BYTES: Final = 1 << 18
UNKNOWN: Final = 200
POOL: dict[str, Any] = {
    "num_layers": 1, "num_kv_heads": 1, "head_size": 32, "num_blocks": 64, "num_threads": 1, "swap_space_gib": 0,
}  # fmt: skip


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _headers(flags: int, stream: int, path: str = "/kvservice.v1.PoolService/Ping") -> bytes:
    """Return the headers of a call. The strings have less than 127 bytes."""
    fields = {
        ":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost", "te": "trailers",
        "content-type": "application/grpc",
    }  # fmt: skip
    texts = (text.encode() for pair in fields.items() for text in pair)
    written = [bytes((len(text),)) + text for text in texts]
    block = b"".join(b"\0" + name + value for name, value in zip(written[::2], written[1::2], strict=True))
    return frame(HEADERS, block, flags=flags, stream=stream)


def _repeated(*frames: bytes) -> Callable[[], Iterator[bytes]]:
    """Return a flood of the last frame after the others."""
    *first, last = frames
    chunk = last * max(1, CHUNK_BYTES // len(last))
    return lambda: itertools.chain([b"".join(first)], itertools.repeat(chunk))


def _resets() -> Iterator[bytes]:
    """Open streams, and reset each at once."""
    streams = range(1, 1 << 31, 2)
    for start in range(0, len(streams), 1024):
        yield b"".join(
            _headers(END_HEADERS, stream) + frame(RST_STREAM, bytes((0, 0, 0, 8)), stream=stream)
            for stream in streams[start : start + 1024]
        )


FLOODS: Final[dict[str, Callable[[], Iterator[bytes]]]] = {
    "WINDOW_UPDATE": _repeated(frame(WINDOW_UPDATE, struct.pack(">I", 1))),
    "WINDOW_UPDATE of a stream": _repeated(
        _headers(END_HEADERS, 1), frame(WINDOW_UPDATE, struct.pack(">I", 1), stream=1)
    ),
    "PING": _repeated(frame(PING, bytes(8))),
    "PING, acknowledged": _repeated(frame(PING, bytes(8), flags=ACK)),
    "SETTINGS": _repeated(frame(SETTINGS)),
    "SETTINGS of a window": _repeated(frame(SETTINGS, struct.pack(">HI", 4, 65535))),
    "PRIORITY": _repeated(frame(PRIORITY, bytes(5), stream=1)),
    "DATA, empty": _repeated(_headers(END_HEADERS, 1), frame(DATA, stream=1)),
    "RST_STREAM": _repeated(frame(RST_STREAM, bytes((0, 0, 0, 8)), stream=1)),
    "HEADERS and RST_STREAM": _resets,
    "CONTINUATION, empty": _repeated(_headers(0, 1), frame(CONTINUATION, stream=1)),
    "CONTINUATION": _repeated(_headers(0, 1), frame(CONTINUATION, b"\0\1a" + b"\x7f\x81\1" + b"b" * 256, stream=1)),
    "of an unknown type": _repeated(frame(UNKNOWN)),
}


class _Connection:
    """A connection of the flood. It is made again when the daemon closes it."""

    def __init__(self, address: str, kind: str) -> None:
        self._address, self._kind = address, kind
        self.num_closed = 0
        self.num_bytes = 0
        self.connect()

    def connect(self) -> None:
        if self._address.startswith("unix:"):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(self._address.removeprefix("unix://"))
        else:
            host, _, port = self._address.rpartition(":")
            self.socket = socket.create_connection((host, int(port)))
        self.socket.setblocking(False)
        self._chunks = FLOODS[self._kind]()
        self._unsent = memoryview(PREFACE + frame(SETTINGS))

    def turn(self, events: int) -> bool:
        """Read and write what is possible at once. Returns False if the daemon has closed the connection."""
        try:
            if events & selectors.EVENT_READ and not self.socket.recv(CHUNK_BYTES):
                return False
            if events & selectors.EVENT_WRITE:
                sent = self.socket.send(self._unsent)
                self.num_bytes += sent
                self._unsent = self._unsent[sent:] or memoryview(next(self._chunks))
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True


def flood(address: str, kind: str, num_connections: int, stopped: threading.Event) -> tuple[int, int]:
    """Send frames until stopped. Returns the bytes that were sent, and how often the daemon closed a connection."""
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        both = selectors.EVENT_READ | selectors.EVENT_WRITE
        connections = [_Connection(address, kind) for _ in range(num_connections)]
        for connection in connections:
            stack.callback(lambda of: of.socket.close(), connection)
            selector.register(connection.socket, both, connection)
        while not stopped.is_set():
            for key, events in selector.select(0.1):
                connection = key.data
                if not connection.turn(events):
                    connection.num_closed += 1
                    selector.unregister(connection.socket)
                    connection.socket.close()
                    with contextlib.suppress(OSError):
                        connection.connect()
                        selector.register(connection.socket, both, connection)
        return sum(each.num_bytes for each in connections), sum(each.num_closed for each in connections)


COMPUTING: Final = "none: a process computes"


@contextlib.contextmanager
def flooding(address: str, kind: str, num_connections: int = NUM_CONNECTIONS) -> Iterator[dict[str, int]]:
    """Run a flood in a process. The dictionary gets `sent_bytes` and `closed` at the end."""
    command = [sys.executable, "-P", "-m", "kvservice.bench.floods", address, kind, str(num_connections)]
    told: dict[str, int] = {}
    with OwnedProcess(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != b"flooding\n":
                raise RuntimeError("the flooding process has ended")
            yield told
            said, _ = process.communicate()
            told["sent_bytes"], told["closed"] = map(int, said.split())
        finally:
            process.kill()


@dataclass(frozen=True)
class FloodOptions:
    """`seconds` of each flood. `kinds`: all if empty."""

    seconds: float = SECONDS
    kinds: tuple[str, ...] = ()
    rounds: int = 3


def run(options: FloodOptions) -> dict[str, Any]:
    """Return `rows`: `{at, kind, sent_bytes, closed, longest_s, ping_p50_s, ping_p99_s, ping_max_s}`. `longest_s` lists
    the longest ping of each round; the other figures are of all rounds together."""
    import numpy as np

    from kvservice.bench.limits import quantiles
    from kvservice.bench.pinger import Pinger
    from kvservice.launch import Daemon

    with socket.create_server(("127.0.0.1", 0)) as free:
        tcp_address = f"127.0.0.1:{free.getsockname()[1]}"
    rows = []
    with Daemon(**POOL, tcp_address=tcp_address) as daemon:
        for at, address in (("tcp", tcp_address), ("unix", daemon.address)):
            for kind in options.kinds or (COMPUTING, *FLOODS):
                found, sent, closed, longest = [], 0, 0, []
                for _ in range(options.rounds):
                    pinger = Pinger()
                    with pinger.pinging(daemon.address), flooding(address, kind) as told:
                        time.sleep(options.seconds)
                    seconds = pinger.pings[:, 1] - pinger.pings[:, 0]
                    found.append(seconds)
                    longest.append(float(seconds.max()))
                    sent, closed = sent + told["sent_bytes"], closed + told["closed"]
                row = {"at": at, "kind": kind, "sent_bytes": sent, "closed": closed}
                rows.append(row | {"longest_s": longest} | quantiles(np.concatenate(found)))
    return {"rows": rows}


def render(results: dict[str, Any], console: Console) -> None:
    columns = ("MB sent", "closed", "ping p50, ms", "p99", "longest of each round")
    rows = table("Pings on the unix socket while 20 connections send frames without calls", ("at", "frames"), columns)
    for row in results["rows"]:
        longest = ", ".join(f"{seconds * 1e3:.0f}" for seconds in row["longest_s"])
        rows.add_row(
            row["at"], row["kind"], f"{row['sent_bytes'] / 1e6:.0f}", str(row["closed"]),
            f"{row['ping_p50_s'] * 1e3:.2f}", f"{row['ping_p99_s'] * 1e3:.1f}", longest,
        )  # fmt: skip
    console.print(rows)


def _main(address: str, kind: str, num_connections: str) -> None:
    stopped = threading.Event()
    print("flooding", flush=True)

    def wait() -> None:
        sys.stdin.read()
        stopped.set()

    threading.Thread(target=wait).start()
    sent, closed = 0, 0
    if kind == COMPUTING:
        while not stopped.is_set():
            pass
    else:
        sent, closed = flood(address, kind, int(num_connections), stopped)
    print(sent, closed)


if __name__ == "__main__":
    _main(*sys.argv[1:])
