"""Kill the daemon again and again under the load of several clients that check all contents.

python -m storm --kills 300 --seed 1        (with tests/support in PYTHONPATH)

Clients of every transport and of the block store run random operations, see storm_sequences.py and storm_store.py. The
daemon is killed with SIGKILL after a random number of operations; a few times again during the take-over, and a few
times it is upgraded instead. Afterwards everything is freed, and the pool must be empty and its bookkeeping consistent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from storm_client import ENDED

from kvservice.client import KVClient
from kvservice.errors import KVServiceError
from kvservice.health import check
from kvservice.launch import Daemon, StartError

TRANSPORTS = ("inline", "region", "lane", "mapped", "store")
# Sessions whose clients could not close them, because the daemon was away, end after this time.
GRACE_S = 6.0
DAEMON: dict[str, Any] = {
    "num_layers": 2,
    "num_kv_heads": 2,
    "head_size": 32,
    "dtype": "float32",
    "block_size": 4,
    "num_blocks": 400,
    "swap_space_gib": 200 * 4096 / 2**30,
    "watermark": 0.0,
    "max_sequences": 200,
    "max_sequence_tokens": 64,
    "session_grace_s": GRACE_S,
    "share_pool": "write",
    "store_gib": 1 / 64,
    "share_store": "write",
    "integrity_interval_s": 0.5,
    "keeper": True,
}
# Everything hangs if a client makes no operation for so long.
STUCK_S = 60.0
# The keeper takes more deaths at the start of the daemon for a crash loop.
MAX_KILLS_AT_START = 3
POLL_S = 0.001


@dataclass
class Report:
    seed: int
    kills: int = 0
    kills_at_start: int = 0
    upgrades: int = 0
    # Seconds from a kill until every client has made its next operation.
    pauses_s: list[float] = field(default_factory=list)
    # The longest time without an operation of one of the clients during each upgrade, in seconds.
    upgrade_pauses_s: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def text(self) -> str:
        lines = [
            f"seed {self.seed}: {self.kills} kills, {self.kills_at_start} of them during a take-over, "
            f"{self.upgrades} upgrades, {len(self.failures)} failures"
        ]
        for name, pauses in (("kill", self.pauses_s), ("upgrade", self.upgrade_pauses_s)):
            if pauses:
                mean, longest = sum(pauses) / len(pauses), max(pauses)
                lines.append(f"pause of the clients after a {name}: mean {mean:.2f} s, longest {longest:.2f} s")
        lines += [f"  {name}: {count}" for name, count in sorted(self.counts.items())]
        return "\n".join([*lines, *self.failures])


class Clients:
    """The client processes, and the operations that each of their threads has made."""

    def __init__(self, address: str, transports: Sequence[str], num_threads: int, seed: int, directory: Path) -> None:
        path = directory / "progress"
        path.write_bytes(bytes(8 * num_threads * len(transports)))
        self._progress = np.memmap(path, np.int64, "r")
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", "storm_client", address, transport, str(seed * 10 + index), str(path),
                 str(index * num_threads), str(num_threads)],
                env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for index, transport in enumerate(transports)
        ]  # fmt: skip

    def operations(self) -> np.ndarray:
        return np.array(self._progress)

    def wait_for(self, before: np.ndarray, each: int) -> None:
        """Wait until each thread has made so many operations since. Raises TimeoutError."""
        deadline = time.monotonic() + STUCK_S
        while (late := self.operations() < before + each).any():
            if (self.operations() >= ENDED).any():
                raise TimeoutError(f"threads {np.flatnonzero(self.operations() >= ENDED)} have failed")
            if time.monotonic() > deadline:
                self.show_stacks()
                raise TimeoutError(f"threads {np.flatnonzero(late)} are stuck")
            time.sleep(POLL_S)

    def longest_pause_s(self, done: Callable[[], bool]) -> float:
        """Return the longest time without an operation of one of the threads, until `done` and an operation of each."""
        counts, since, longest = self.operations(), np.full(len(self._progress), time.monotonic()), 0.0
        waiting = None
        while waiting is None or (self.operations() <= waiting).any():
            now, now_counts = time.monotonic(), self.operations()
            longest = max(longest, float((now - since).max()))
            if longest > STUCK_S or (now_counts >= ENDED).any():
                raise TimeoutError("threads have failed or are stuck during an upgrade")
            since[now_counts != counts], counts = now, now_counts
            if waiting is None and done():
                waiting = now_counts
            time.sleep(POLL_S)
        return longest

    def finish(self, report: Report) -> None:
        """Have the clients free everything and end, and add what they report."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            assert process.stdout is not None
            try:
                process.wait(STUCK_S)
                said = json.loads(process.stdout.read() or "{}")
            except subprocess.TimeoutExpired:
                said = {"failures": ["a client does not end"]}
            report.counts += Counter(said.get("counts", {}))
            report.failures += said.get("failures", ["a client has said nothing"])

    def show_stacks(self) -> None:
        """Have all threads write their stacks to stderr."""
        for process in self._processes:
            process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()


class Storm:
    def __init__(self, daemon: Daemon, clients: Clients, seed: int) -> None:
        self.daemon, self.clients = daemon, clients
        self._random = random.Random(seed)
        self.report = Report(seed)

    def run(self, num_kills: int, num_at_start: int, num_upgrades: int) -> None:
        """`num_at_start` of the kills are followed by another one during the take-over."""
        events = ["kill at start"] * num_at_start + ["kill"] * (num_kills - num_at_start) + ["upgrade"] * num_upgrades
        self._random.shuffle(events)
        self.clients.wait_for(self.clients.operations() * 0, 1)
        for event in events:
            self._wait_for_operations()
            if event == "upgrade":
                self.report.upgrade_pauses_s.append(self._upgrade())
                continue
            before, begin = self.clients.operations(), time.monotonic()
            self._kill(at_start=event == "kill at start")
            self.clients.wait_for(before, 2)  # one may have been made before the daemon was gone
            self.report.pauses_s.append(time.monotonic() - begin)

    def _wait_for_operations(self) -> None:
        """Wait for a random number of operations, and for a fraction of one."""
        wanted = self.clients.operations().sum() + self._random.randint(1, 60)
        deadline = time.monotonic() + STUCK_S
        while self.clients.operations().sum() < wanted and time.monotonic() < deadline:
            time.sleep(POLL_S)
        time.sleep(self._random.random() * 0.01)

    def _kill(self, *, at_start: bool) -> None:
        pid = self.daemon.daemon_pid()
        os.kill(pid, signal.SIGKILL)
        self.report.kills += 1
        if at_start:
            pid = self._next_pid(pid)
            time.sleep(self._random.random() * 1.5)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.report.kills += 1
            self.report.kills_at_start += 1

    def _next_pid(self, pid: int) -> int:
        while True:
            with contextlib.suppress(StartError):
                if (found := self.daemon.daemon_pid()) != pid:
                    return found
            time.sleep(POLL_S)

    def _upgrade(self) -> float:
        """Upgrade, and return the longest time in seconds without an operation of one of the clients."""
        socket = self.daemon.address.removeprefix("unix://")
        command = [sys.executable, "-P", "-m", "kvservice", "upgrade", "--unix-socket", socket]
        deadline = time.monotonic() + STUCK_S
        while True:
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as asking:
                pause_s = self.clients.longest_pause_s(lambda: asking.poll() is not None)
                said, _ = asking.communicate()
            # The daemon serves before it tells its keeper that it is ready.
            if asking.returncode == 0 or "is starting" not in said or time.monotonic() > deadline:
                break
        self.report.upgrades += 1
        if asking.returncode:
            self.report.failures.append(f"the upgrade failed: {said}")
        return pause_s

    def check_empty(self) -> None:
        """Check that nothing is left of the clients, and that the daemon's bookkeeping is consistent."""
        with KVClient(self.daemon.address) as client, client.session() as kv:
            deadline = time.monotonic() + 2 * GRACE_S
            while client.stats().sessions > 1 and time.monotonic() < deadline:
                time.sleep(0.1)
            kv.reset_prefix_cache()
            stats = client.stats()
            left = {
                "sequences": stats.sequences,
                "used swap blocks": stats.used_swap_blocks,
                "pinned blocks": stats.pinned_blocks,
                "used blocks": stats.num_blocks - stats.free_blocks,
                "other sessions": stats.sessions - 1,
            }
        self.report.failures += [f"{count} {name} are left" for name, count in left.items() if count]
        time.sleep(2 * DAEMON["integrity_interval_s"])
        if not check(self.daemon.address, timeout_s=10.0):
            self.report.failures.append("the daemon does not serve")
        log = self.daemon.log.read_text(errors="replace")
        bad = [line for line in log.splitlines() if "Traceback" in line or " ERROR " in line or "refused" in line]
        self.report.failures += [f"the daemon's log: {line}" for line in bad[:20]]


@contextlib.contextmanager
def storm(seed: int, transports: Sequence[str], num_threads: int, **options: Any) -> Iterator[Storm]:
    with tempfile.TemporaryDirectory(prefix="storm-") as directory, Daemon(**DAEMON | options) as daemon:
        clients = Clients(daemon.address, transports, num_threads, seed, Path(directory))
        try:
            yield Storm(daemon, clients, seed)
        finally:
            clients.stop()


def run(
    num_kills: int,
    seed: int,
    *,
    num_at_start: int = 0,
    num_upgrades: int = 0,
    transports: Sequence[str] = TRANSPORTS,
    num_threads: int = 2,
    **options: Any,
) -> Report:
    """Run a storm and return what happened. `options` are those of the daemon."""
    with storm(seed, transports, num_threads, **options) as one:
        try:
            one.run(num_kills, min(num_at_start, MAX_KILLS_AT_START, num_kills), num_upgrades)
            one.clients.finish(one.report)
            one.check_empty()
        except (TimeoutError, KVServiceError, OSError) as error:
            one.report.failures.append(f"{type(error).__name__}: {error}")
            one.clients.finish(one.report)
            one.report.failures.append(one.daemon.log.read_text(errors="replace")[-4000:])
        return one.report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--at-start", type=int, default=MAX_KILLS_AT_START)
    parser.add_argument("--upgrades", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    given = parser.parse_args()
    begin = time.monotonic()
    report = run(
        given.kills,
        given.seed,
        num_at_start=given.at_start,
        num_upgrades=given.upgrades,
        transports=given.transports.split(","),
        num_threads=given.threads,
        device=given.device,
    )
    print(report.text())
    print(f"{time.monotonic() - begin:.0f} s")
    sys.exit(bool(report.failures))


if __name__ == "__main__":
    main()
