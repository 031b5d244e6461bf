"""Latency of a client while another one sends the largest requests, or floods the daemon with frames that are no calls.

Processes of their own ping and flood: `python -m kvservice.bench.limits ping ADDRESS` and `... flood ADDRESS KIND
NUM_CONNECTIONS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc
import numpy as np
import numpy.typing as npt
import uvloop
from rich.console import Console

from kvservice.bench import table
from kvservice.bench.largest import Cycle, Sender, cycles
from kvservice.launch import Daemon
from kvservice.owned import OwnedProcess
from kvservice.v1 import pool_pb2, pool_pb2_grpc

# ---- a client that only pings
#
# It prints "pinging" after the first response and pings until its standard input ends. Then it writes the start and end
# time of each ping, two doubles of the clock of `time.monotonic`, which all processes of a host share.


# Pause between two pings. It is short enough that a blocked daemon delays most pings.
PAUSE_S = 0.001
Pings = npt.NDArray[np.float64]


async def ping(address: str) -> tuple[list[float], int]:
    """Return the start and end of each ping, one after the other, and how many later ones than the first failed."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = pool_pb2_grpc.PoolServiceStub(channel)  # type: ignore[no-untyped-call]
        request = pool_pb2.PingRequest(payload=bytes(100))
        await stub.Ping(request)
        print("pinging", flush=True)
        stopped = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        times, num_failed = [], 0
        while not stopped.done():
            times.append(time.monotonic())
            try:
                await stub.Ping(request)
            except grpc.aio.AioRpcError:
                num_failed += 1
            times.append(time.monotonic())
            await asyncio.sleep(PAUSE_S)
        return times, num_failed


class Pinger:
    """The pinger process. `pings` float64[n, 2] (start, end), and how many of them failed, are available after
    `pinging`."""

    def __init__(self, *, may_fail: bool = False) -> None:
        """`may_fail`: failed pings are counted, not an error."""
        self.pings: Pings = np.zeros((0, 2))
        self.num_failed, self._may_fail = 0, may_fail

    @contextlib.contextmanager
    def pinging(self, address: str) -> Iterator[None]:
        """Raises RuntimeError if the process ends early, or if pings fail that may not."""
        command = [sys.executable, "-P", "-m", "kvservice.bench.limits", "ping", address]
        with OwnedProcess(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                if process.stdout.readline() != b"pinging\n":
                    raise RuntimeError("the pinging process has ended")
                yield
                said, _ = process.communicate()
                if process.returncode:
                    raise RuntimeError("the pinging process has failed")
                (self.num_failed,) = struct.unpack_from("=q", said)
                if self.num_failed and not self._may_fail:
                    raise RuntimeError(f"{self.num_failed} pings have failed")
                self.pings = np.frombuffer(said, np.float64, offset=8).reshape(-1, 2)
            finally:
                process.kill()


def _ping(address: str) -> None:
    measured, num_failed = uvloop.run(ping(address))
    sys.stdout.buffer.write(struct.pack(f"=q{len(measured)}d", num_failed, *measured))


# ---- pings while another client sends the largest requests that the daemon accepts or refuses
#
# One process sends each request of `largest.py` repeatedly, one at a time. Another process only pings, on a separate
# connection. A ping counts for the request that is in progress at the midpoint of the ping. Pings during idle times are
# the baseline; they alternate with the requests, so that a slow machine affects both.

# Goal for the longest time that a request blocks the event loop.
LIMITS_GOAL_S: Final = 0.020
QUANTILES: Final = {"ping_p50_s": 50, "ping_p99_s": 99, "ping_max_s": 100}
IDLE: Final = ("idle", "")
IDLE_S, IDLE_QUICK_S = 0.5, 0.02
# Seconds for which each cycle is repeated.
REPEAT_S, REPEAT_QUICK_S = 3.0, 0.0
# Block events include token ids, and there are enough blocks for the largest requests.
LIMITS_POOL: dict[str, Any] = {
    "num_layers": 1,
    "num_kv_heads": 1,
    "head_size": 32,
    "dtype": "bfloat16",
    "num_blocks": 65536,
    "swap_space_gib": 0.0625,
    "max_sequences": 4096,
    "event_token_ids": "true",
    "num_threads": 1,
    "share_pool": "write",
    "store_gib": 0.0625,
    "share_store": "write",
}


@dataclass(frozen=True)
class Span:
    """The time of a request from sending to response, named by RPC and content, or an idle time."""

    name: tuple[str, str]
    start: float
    end: float
    status: str


class Timeline:
    """The sequence of spans. They do not overlap."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @asynccontextmanager
    async def span(self, rpc: str, content: str) -> AsyncIterator[list[str]]:
        """Open a span. The caller appends the status of the response to the list."""
        status: list[str] = []
        start = time.monotonic()
        yield status
        self.spans.append(Span((rpc, content), start, time.monotonic(), *status))

    async def idle(self, seconds: float) -> None:
        async with self.span(*IDLE) as status:
            await asyncio.sleep(seconds)
            status.append("OK")

    def rows(self, pings: Pings) -> dict[tuple[str, str], dict[str, Any]]:
        """Return the pings of each span by RPC and content. `pings` is float64[n, 2]."""
        starts, ends = (np.array([getattr(span, name) for span in self.spans]) for name in ("start", "end"))
        middles = pings.mean(1)
        during = np.searchsorted(starts, middles, "right") - 1
        inside = (during >= 0) & (middles < ends[during])
        seconds, during = (pings[:, 1] - pings[:, 0])[inside], during[inside]
        return {name: self._row(name, seconds, during) for name in dict.fromkeys(span.name for span in self.spans)}

    def _row(self, name: tuple[str, str], seconds: Pings, during: Any) -> dict[str, Any]:
        chosen = [i for i, span in enumerate(self.spans) if span.name == name]
        felt = seconds[np.isin(during, chosen)]
        spans = [self.spans[i] for i in chosen]
        row = {
            "requests": len(spans),
            "statuses": sorted({span.status for span in spans}),
            "request_p50_s": float(np.median([span.end - span.start for span in spans])),
            "pings": len(felt),
        }
        # A request may be answered before the first ping.
        return row | (quantiles(felt) if len(felt) else dict.fromkeys(QUANTILES))


def quantiles(seconds: Pings) -> dict[str, Any]:
    return {name: float(np.percentile(seconds, percent)) for name, percent in QUANTILES.items()}


async def repeat(cycle: Cycle, seconds: float) -> None:
    stop = time.monotonic() + seconds
    while True:
        await cycle()
        if time.monotonic() >= stop:
            return


async def send_all(address: str, timeline: Timeline, quick: bool) -> None:
    async with Sender.connected(address, timeline.span) as sender:
        async for cycle in cycles(sender):
            await timeline.idle(IDLE_QUICK_S if quick else IDLE_S)
            await repeat(cycle, REPEAT_QUICK_S if quick else REPEAT_S)


def run_limits(quick: bool = False) -> dict[str, Any]:
    """Return `idle`, the row without requests, and `rows`: `{rpc, content, requests, statuses, request_p50_s, pings,
    ping_p50_s, ping_p99_s, ping_max_s}`. The quantiles are None if no ping counts for a request."""
    timeline, pinger = Timeline(), Pinger()
    with Daemon(**LIMITS_POOL) as daemon, pinger.pinging(daemon.address):
        uvloop.run(send_all(daemon.address, timeline, quick))
    rows = timeline.rows(pinger.pings)
    idle = rows.pop(IDLE)
    return {"idle": idle, "rows": [{"rpc": rpc, "content": content} | row for (rpc, content), row in rows.items()]}


def render_limits(results: dict[str, Any], console: Console) -> None:
    idle = results["idle"]
    title = "Pings while another client sends its largest requests, ms; in brackets: in units of pings while it is idle"
    rows = table(title, ("RPC", "content", "answer"), ("ms", "ping p50", "p99", "max"))
    rows.add_row(*IDLE, "", "", *(_ms(idle[name]) for name in QUANTILES))
    for row in results["rows"]:
        cells = (_cell(row, idle, name) for name in QUANTILES)
        rows.add_row(row["rpc"], row["content"], ", ".join(row["statuses"]), _ms(row["request_p50_s"]), *cells)
    console.print(rows)
    slow = [f"{row['rpc']} ({row['content']})" for row in results["rows"] if (row["ping_p99_s"] or 0.0) > LIMITS_GOAL_S]
    console.print(f"p99 above {_ms(LIMITS_GOAL_S)} ms: {', '.join(slow) or 'none'}.")


def _cell(row: dict[str, Any], idle: dict[str, Any], name: str) -> str:
    return "-" if row[name] is None else f"{_ms(row[name])} ({row[name] / idle[name]:.1f})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


# ---- pings while another client floods the daemon with HTTP/2 frames that are no calls, over 20 connections
#
# The flood needs no token: gRPC reads all frames before the daemon knows whose they are. The pings are on the unix
# socket. Both processors of a small host are then busy, so the first row is a process that computes and sends nothing.

# Goal for the longest ping under a flood.
FLOODS_GOAL_S: Final = 0.1
NUM_CONNECTIONS: Final = 20
SECONDS: Final = 4.0
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 8, 9
END_HEADERS, ACK = 4, 1
# Bytes of a flood that are written, and of the answers that are read, at a time.
CHUNK_BYTES: Final = 1 << 18
UNKNOWN: Final = 200
FLOODS_POOL: dict[str, Any] = {
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
    command = [sys.executable, "-P", "-m", "kvservice.bench.limits", "flood", address, kind, str(num_connections)]
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


def run_floods(options: FloodOptions) -> dict[str, Any]:
    """Return `rows`: `{at, kind, sent_bytes, closed, failed, longest_s, ping_p50_s, ping_p99_s, ping_max_s}`. `failed`
    is a number of pings. `longest_s` lists the longest ping of each round; the other figures are of all rounds
    together."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        tcp_address = f"127.0.0.1:{free.getsockname()[1]}"
    rows = []
    with Daemon(**FLOODS_POOL, tcp_address=tcp_address) as daemon:
        for at, address in (("tcp", tcp_address), ("unix", daemon.address)):
            for kind in options.kinds or (COMPUTING, *FLOODS):
                found, sent, closed, failed, longest = [], 0, 0, 0, []
                for _ in range(options.rounds):
                    pinger = Pinger(may_fail=True)
                    with pinger.pinging(daemon.address), flooding(address, kind) as told:
                        time.sleep(options.seconds)
                    seconds = pinger.pings[:, 1] - pinger.pings[:, 0]
                    found.append(seconds)
                    longest.append(float(seconds.max()))
                    sent, closed = sent + told["sent_bytes"], closed + told["closed"]
                    failed += pinger.num_failed
                row = {"at": at, "kind": kind, "sent_bytes": sent, "closed": closed, "failed": failed}
                rows.append(row | {"longest_s": longest} | quantiles(np.concatenate(found)))
    return {"rows": rows}


def render_floods(results: dict[str, Any], console: Console) -> None:
    columns = ("MB sent", "closed", "failed pings", "ping p50, ms", "p99", "longest of each round")
    rows = table("Pings on the unix socket while 20 connections send frames without calls", ("at", "frames"), columns)
    for row in results["rows"]:
        longest = ", ".join(f"{seconds * 1e3:.0f}" for seconds in row["longest_s"])
        rows.add_row(
            row["at"], row["kind"], f"{row['sent_bytes'] / 1e6:.0f}", str(row["closed"]), str(row["failed"]),
            f"{row['ping_p50_s'] * 1e3:.2f}", f"{row['ping_p99_s'] * 1e3:.1f}", longest,
        )  # fmt: skip
    console.print(rows)


def _flood(address: str, kind: str, num_connections: str) -> None:
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
    if sys.argv[1] == "ping":
        _ping(sys.argv[2])
    else:
        _flood(*sys.argv[2:])
