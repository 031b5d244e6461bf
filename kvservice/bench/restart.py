"""How long clients wait while a daemon starts, while it is killed and starts again, and while it is upgraded."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console

from kvservice.auth.client import NO_CREDENTIALS
from kvservice.bench import seconds_of, table
from kvservice.bench.limits import Pinger
from kvservice.client import KVClient, PoolInfo, Sequence, Session
from kvservice.client.channel import CHANNEL_OPTIONS
from kvservice.health import ask
from kvservice.keeper.control import ask as ask_keeper
from kvservice.keeper.private_paths import control_path
from kvservice.launch import Daemon, StartError
from kvservice.pool.layout import DTYPES
from kvservice.pool.sealed import num_processors
from kvservice.v1 import inspect_pb2, inspect_pb2_grpc
from kvservice.wire.channels import open_channel

START_TIMEOUT_S = 600.0

# ---- how long a daemon with a block store takes until it serves, until all memory of the store is there, and how long
# calls wait meanwhile
#
# A client pings from the moment the daemon serves. The daemon has a small pool, so that the store is what counts.


START_POOL: dict[str, Any] = {"num_blocks": 32, "swap_space_gib": 0.0}
ASK_S = 5.0
# Between two looks at how much memory is there, and the time of the pings with which those before are compared.
LOOK_S, AFTER_S = 0.1, 2.0


@dataclass(frozen=True)
class StartOptions:
    store_gib: float = 4.0


def start_once(store_gib: float) -> dict[str, Any]:
    """Start a daemon. Returns the seconds until it serves and until its memory is complete, and the longest pings, None
    if none ended in that time."""
    pinger, began_s = Pinger(), time.monotonic()
    with Daemon(start_timeout_s=START_TIMEOUT_S, store_gib=store_gib, **START_POOL) as daemon:
        serving_s = time.monotonic()
        with pinger.pinging(daemon.address):
            while (answer := ask(daemon.address, ASK_S, NO_CREDENTIALS)).note:
                if answer.reason or time.monotonic() > began_s + START_TIMEOUT_S:
                    raise StartError(f"the memory of the store does not come: {answer.reason or answer.note}")
                time.sleep(LOOK_S)
            complete_s = time.monotonic()
            time.sleep(AFTER_S)
        ended = pinger.pings[:, 1]
        taken = pinger.pings[:, 1] - pinger.pings[:, 0]
        stop_s = seconds_of(daemon.stop)
    return {
        "serving_s": serving_s - began_s,
        "complete_s": complete_s - began_s,
        "ping_growing_max_s": _longest(taken[ended <= complete_s]),
        "ping_max_s": _longest(taken[ended > complete_s]),
        "stop_s": stop_s,
    }


def _longest(seconds: np.ndarray[Any, np.dtype[np.float64]]) -> float | None:
    return float(seconds.max()) if len(seconds) else None


def run_start(options: StartOptions) -> dict[str, Any]:
    """Return the figures of `start_once`, and `empty_serving_s`, those of a daemon without a store."""
    empty = start_once(0.0)
    return (
        asdict(options)
        | {"num_processors": num_processors(), "empty_serving_s": empty["serving_s"]}
        | start_once(options.store_gib)
    )


START_LABELS = {
    "empty_serving_s": "start until it serves, without a store",
    "serving_s": "start until it serves",
    "complete_s": "start until all memory is there",
    "ping_growing_max_s": "longest ping until then",
    "ping_max_s": "longest ping afterwards",
    "stop_s": "end",
}


def render_start(results: dict[str, Any], console: Console) -> None:
    size, processors = results["store_gib"], results["num_processors"]
    rows = table(f"Start of a daemon with a block store of {size:g} GiB, {processors} processors", ("what",), ("s",))
    for name, label in START_LABELS.items():
        rows.add_row(label, "" if results[name] is None else f"{results[name]:.3g}")
    console.print(rows)


# ---- how long a client waits while its daemon is killed and starts again, and while it is upgraded
#
# A daemon with a keeper has a pool that is full: half the blocks are of sequences, the other half are cached. Every
# round kills the process and appends a token to a sequence at once: the call waits, reconnects and is answered by the
# new process. Another client appends all the time while the daemon is upgraded to the same version; the longest of its
# calls is the pause.

# On the CPU small blocks, because the time depends on their number. On a GPU those of Llama-3-8B.
SHAPES: dict[str, dict[str, Any]] = {
    "cpu": {"num_layers": 1, "num_kv_heads": 1, "head_size": 32, "dtype": "float32"},
    "cuda": {"num_layers": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"},
}
POOL: dict[str, Any] = {"swap_space_gib": 0.0, "max_sequences": 4096, "max_sequence_tokens": 8192, "keeper": True}
# Blocks of a sequence, and the share of the pool that is filled.
SEQUENCE_BLOCKS, FILLED = 256, 0.95
WAIT_S, OBSERVER_WAIT_S = 120.0, 30.0


@dataclass(frozen=True)
class RestartOptions:
    """`gib` is the size of the pool, in place of `num_blocks`."""

    device: str = "cpu"
    num_blocks: int = 100_000
    gib: float | None = None
    rounds: int = 5


@dataclass(frozen=True)
class Round:
    """One restart, in seconds: from SIGKILL to the first answered append; from it until the new process serves, and the
    part of that for taking over; and the sequences that were lost."""

    total_s: float
    down_s: float
    take_over_s: float
    lost: int

    @property
    def parts(self) -> dict[str, float]:
        start_s, reconnect_s = self.down_s - self.take_over_s, self.total_s - self.down_s
        return {"start_s": start_s, "take_over_s": self.take_over_s, "reconnect_s": reconnect_s}


def fill(session: Session, info: PoolInfo) -> list[Sequence]:
    """Fill the pool, and return the sequences that stay."""
    blocks = min(SEQUENCE_BLOCKS, info.num_blocks // 16)
    length, kept = blocks * info.block_size, []
    tensor = np.zeros((length, info.num_kv_heads, info.head_size), DTYPES[info.dtype])
    for number in range(int(info.num_blocks * FILLED) // blocks):
        sequence = session.allocate(range(number * length, (number + 1) * length))
        step = session.open_step([sequence])
        for layer in range(info.num_layers):
            step.write(tensor, tensor, layer)
        if number % 2:
            session.free([sequence])
        else:
            kept.append(sequence)
    return kept


def append_once(session: Session, sequence: Sequence) -> float:
    """Append a token and take it back. Returns the seconds of the longer call."""
    return max(
        seconds_of(lambda: session.append([sequence], [7])),
        seconds_of(lambda: session.truncate(sequence, sequence.length - 1)),
    )


def kill_and_append(pid: int, session: Session, sequence: Sequence) -> None:
    os.kill(pid, signal.SIGKILL)
    session.append([sequence], [7])


def kill_once(daemon: Daemon, session: Session, sequence: Sequence) -> Round:
    pid = daemon.daemon_pid()
    total_s = seconds_of(lambda: kill_and_append(pid, session, sequence))
    session.truncate(sequence, sequence.length - 1)
    report = report_of(daemon.address)
    return Round(total_s, report.down_s, report.take_over_s, report.lost.sequences)


def report_of(address: str) -> inspect_pb2.RestartSnapshot:
    """Return what the daemon says about its latest start. Its observer may have to start for that."""
    with open_channel(address, NO_CREDENTIALS, CHANNEL_OPTIONS) as channel:
        stub = inspect_pb2_grpc.InspectServiceStub(channel)  # type: ignore[no-untyped-call]
        snapshot: inspect_pb2.Snapshot = stub.GetSnapshot(inspect_pb2.GetSnapshotRequest(), timeout=OBSERVER_WAIT_S)
    return snapshot.restart


@contextmanager
def appending(append: Callable[[], float]) -> Iterator[list[float]]:
    """Append all the time in another thread. Yields the seconds of the calls."""
    seconds: list[float] = []
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            seconds.append(append())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield seconds
    finally:
        done.set()
        thread.join()


def upgrade_once(daemon: Daemon, session: Session, sequence: Sequence) -> float:
    """Upgrade the daemon to its own version. Returns the seconds of the longest call meanwhile."""
    path = control_path(daemon.address.removeprefix("unix://"))
    with appending(lambda: append_once(session, sequence)) as seconds:
        *_, result = ask_keeper(path, "upgrade", START_TIMEOUT_S)
    if not result["ok"]:
        raise StartError(f"the upgrade failed: {result['message']}")
    return max(seconds)


def run_restart(options: RestartOptions) -> dict[str, Any]:
    """Return the medians `kill_to_append_s` with its parts `start_s`, `take_over_s` and `reconnect_s`, and
    `upgrade_pause_s`, their maxima, and what the pool held."""
    size = {"num_blocks": options.num_blocks} if options.gib is None else {"pool_gib": options.gib}
    shape = SHAPES[options.device.partition(":")[0]]
    with (
        Daemon(start_timeout_s=START_TIMEOUT_S, device=options.device, **shape, **size, **POOL) as daemon,
        KVClient(daemon.address, reconnect_wait_s=WAIT_S, timeout_s=WAIT_S) as client,
        client.session("bench") as session,
    ):
        info = client.info
        sequences = fill(session, info)
        idle = [append_once(session, sequences[0]) for _ in range(20)]
        rounds = [kill_once(daemon, session, sequences[0]) for _ in range(options.rounds)]
        pauses = [upgrade_once(daemon, session, sequences[0]) for _ in range(options.rounds)]
        stats = client.stats()
        held = {
            "pool_bytes": info.num_blocks * info.block_bytes,
            "sequences": len(session.describe()),
            "cached_blocks": stats.cached_blocks,
        }
    return asdict(options) | {"num_blocks": info.num_blocks} | held | summarized(rounds, pauses, idle)


def summarized(rounds: list[Round], pauses: list[float], idle: list[float]) -> dict[str, Any]:
    parts = {name: statistics.median(one.parts[name] for one in rounds) for name in rounds[0].parts}
    totals = [one.total_s for one in rounds]
    return {
        "kill_to_append_s": statistics.median(totals),
        "kill_to_append_max_s": max(totals),
        **parts,
        "upgrade_pause_s": statistics.median(pauses),
        "upgrade_pause_max_s": max(pauses),
        "append_s": statistics.median(idle),
        "lost_sequences": sum(one.lost for one in rounds),
    }


LABELS = {
    "kill_to_append_s": "SIGKILL to the first answered append",
    "start_s": "  start of the process and its imports",
    "take_over_s": "  take-over of the state",
    "reconnect_s": "  reconnection of the client",
    "upgrade_pause_s": "upgrade, the longest call of a client",
    "append_s": "a call otherwise",
}


def render_restart(results: dict[str, Any], console: Console) -> None:
    rows = table(
        f"Restarts of a daemon, {results['device']}, {results['rounds']} rounds, s", ("what",), ("median", "max")
    )
    for name, label in LABELS.items():
        longest = results.get(name.replace("_s", "_max_s"))
        rows.add_row(label, f"{results[name]:.4g}", "" if longest is None else f"{longest:.4g}")
    console.print(rows)
    gib = results["pool_bytes"] / (1 << 30)
    pool = f"{results['num_blocks']:,} blocks, {gib:.1f} GiB"
    held = f"{results['sequences']:,} sequences, {results['cached_blocks']:,} cached blocks"
    console.print(f"The pool: {pool}; {held}; lost sequences: {results['lost_sequences']}.")
