"""A daemon under steady work for minutes or hours: whether its memory, descriptors and latency stay as they were.

Sessions come and go at the unix socket and over TCP, in turns: each allocates a prompt, computes it, decodes, forks,
appends, swaps, frees, and puts blocks into the store and gets them back; what it reads is compared. A third of the
sessions are not closed but left. The figures of the first third of the time, after a warm-up, are compared with those
of the last third. Memory is judged by what each session of the second half adds to it: caches of a bounded size, such
as the 4096 connections that are known, are full by then in a run of half an hour.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console

from kvservice.bench import table
from kvservice.client import KVClient, Session, StoreNamespace
from kvservice.errors import KVServiceError
from kvservice.launch import Daemon

SAMPLES: Final = 30
# The part of the samples that is no figure yet: what the daemon keeps for good is made in it.
WARM_UP: Final = 3
PROMPT: Final = 40
BLOCK_BYTES: Final = 4096
SHAPE: Final = (2, 2, 32)
# The journal of events is full after the first sample: its memory grows until then.
POOL: dict[str, Any] = {
    "event_window": 256,
    "num_layers": SHAPE[0], "num_kv_heads": SHAPE[1], "head_size": SHAPE[2], "dtype": "float32", "num_blocks": 512,
    "swap_space_gib": 1 / 64, "num_threads": 1, "store_gib": 1 / 64, "session_grace_s": 0.25,
}  # fmt: skip
# How much a figure may grow from the first third to the last.
MAX_GROWTH: Final = {"files": 1.1, "threads": 1.1, "ping_p99_s": 2.0}
# How long the daemon may take to end the sessions that were left.
ENDED_S: Final = 10.0
# The bytes of private memory that a session may add, and those that are noise in a short run. gRPC's server loses about
# 100 with each stream that its client cancels.
MAX_SESSION_BYTES: Final = 200
NOISE_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class SoakSample:
    """Private resident memory, open descriptors and threads of the daemon when all sessions have ended, and pings and
    cycles since the sample before."""

    rss_mib: float
    files: int
    threads: int
    ping_p50_s: float
    ping_p99_s: float
    cycles: int


class SoakError(KVServiceError):
    """A value that was read is not the one that was written."""


def _status(pid: int, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None, "the kernel reports it"
    return int(found[1])


def _num_threads(pid: int) -> int:
    """Return the number of threads without those of gRPC's pool, which grows and shrinks with the load."""
    names = [(task / "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()]
    return len(names) - names.count("event_engine")


def _compare(what: str, found: Any, wanted: Any) -> None:
    if not np.array_equal(found, wanted):
        raise SoakError(f"{what}: what was read is not what was written")


def _sequences(kv: Session, rng: np.random.Generator) -> None:
    prompt = rng.integers(0, 1 << 15, PROMPT).tolist()
    key, value = (rng.standard_normal((SHAPE[0], PROMPT, *SHAPE[1:]), np.float32) for _ in range(2))
    sequence = kv.allocate(prompt)
    kv.open_step([sequence]).write(key, value)
    child = kv.fork(sequence)
    step = kv.append([child], [7])
    one = rng.standard_normal((1, *SHAPE[1:]), np.float32)
    for layer in range(SHAPE[0]):
        step.decode(layer, one, one, one)
    kv.swap_out([sequence])
    kv.swap_in([sequence])
    found_key, found_value = kv.read(sequence, 0, PROMPT)
    _compare("K", found_key, key)
    _compare("V", found_value, value)
    kv.free([child, sequence])


def _blocks(client: KVClient, rng: np.random.Generator) -> None:
    keys = [rng.bytes(32) for _ in range(4)]
    values = rng.integers(0, 256, (4, BLOCK_BYTES), np.uint8)
    with client.store(StoreNamespace("soak", BLOCK_BYTES)) as store:
        store.put(keys, values)
        out = np.zeros_like(values)
        found = np.asarray(store.get(keys, out), bool)
        _compare("the block store", out[found], values[found])


def _wait_for_sessions(client: KVClient) -> None:
    """Return when all sessions have ended, also those that were left: how many there are depends on the speed."""
    deadline = time.monotonic() + ENDED_S
    while client.stats().sessions:
        if time.monotonic() > deadline:
            raise SoakError(f"sessions have not ended within {ENDED_S:g} s")
        time.sleep(0.02)


def run(seconds: float) -> dict[str, Any]:
    """Return `samples`, those of equal parts of the time; `first` and `last`, the medians of the first and the last
    third of them after the warm-up; `session_bytes`, what each session of the second half added to the memory; and
    `grown`, the figures that grew more than they may."""
    rng = np.random.default_rng(0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        tcp_address = f"127.0.0.1:{free.getsockname()[1]}"
    samples = []
    with Daemon(**POOL, tcp_address=tcp_address) as daemon:
        pid = daemon.process.pid
        cycle = itertools.count()
        begin = time.monotonic()
        for part in range(1, SAMPLES + 1):
            pings, cycles = [], 0
            while time.monotonic() < begin + seconds * part / SAMPLES or cycles < 3:
                number = next(cycle)
                with KVClient(tcp_address if number % 2 else daemon.address) as client:
                    kv = client.session(name=f"soak-{number % 5}")
                    _sequences(kv, rng)
                    _blocks(client, rng)
                    for _ in range(20):
                        asked = time.perf_counter()
                        client.ping(b"soak")
                        pings.append(time.perf_counter() - asked)
                    if number % 3:
                        kv.close()
                cycles += 1
            p50, p99 = float(np.percentile(pings, 50)), float(np.percentile(pings, 99))
            with KVClient(daemon.address) as client:
                _wait_for_sessions(client)
            rss_mib = _status(pid, "RssAnon") / 1024
            num_files = len(os.listdir(f"/proc/{pid}/fd"))
            samples.append(SoakSample(rss_mib, num_files, _num_threads(pid), p50, p99, cycles))
    third = (SAMPLES - WARM_UP) // 3
    thirds = {"first": samples[WARM_UP : WARM_UP + third], "last": samples[-third:]}
    medians = {
        when: {name: statistics.median(asdict(each)[name] for each in some) for name in asdict(samples[0])}
        for when, some in thirds.items()
    }
    grown = [name for name, most in MAX_GROWTH.items() if medians["last"][name] > most * medians["first"][name]]
    half, later = samples[SAMPLES // 2 - 1], samples[SAMPLES // 2 :]
    num_sessions, num_bytes = sum(each.cycles for each in later), (later[-1].rss_mib - half.rss_mib) * 2**20
    if num_bytes > MAX_SESSION_BYTES * num_sessions + NOISE_BYTES:
        grown.append("session_bytes")
    results = {"seconds": seconds, "samples": [asdict(each) for each in samples], "grown": grown}
    return results | {"session_bytes": num_bytes / num_sessions} | medians


def render(results: dict[str, Any], console: Console) -> None:
    first, last = results["first"], results["last"]
    title = f"A daemon under steady work for {results['seconds']:g} s, medians of the first and the last third"
    rows = table(title, ("figure",), ("first third", "last third"))
    for name, label, scale, digits in (
        ("rss_mib", "private memory, MiB", 1, 1),
        ("files", "descriptors", 1, 0),
        ("threads", "threads", 1, 0),
        ("ping_p50_s", "ping p50, ms", 1e3, 2),
        ("ping_p99_s", "ping p99, ms", 1e3, 2),
        ("cycles", "sessions", 1, 0),
    ):
        rows.add_row(label, *(f"{when[name] * scale:.{digits}f}" for when in (first, last)))
    console.print(rows)
    console.print(f"Each session of the second half added {results['session_bytes']:.0f} bytes of memory.")
    console.print(f"Grown: {', '.join(results['grown']) or 'nothing'}.")
