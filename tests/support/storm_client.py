"""A client process of the storm: threads that run random operations, each in a session of its own, until stdin ends.

python -m storm_client ADDRESS TRANSPORT SEED PROGRESS INDEX NUM_THREADS

Each thread counts its operations in an int64 of the file PROGRESS, from INDEX on. At the end a line of JSON on stdout
says what happened.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
import threading
import traceback
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from storm_sequences import SequenceStorm
from storm_store import StoreStorm

from kvservice.client import KVClient

# Longer than any restart, on any machine.
PATIENCE_S = 120.0
MAX_FAILURES = 20
# The number of operations of a thread that has ended.
ENDED = 1 << 62


@dataclass
class Outcome:
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, counts: Counter[str], failures: list[str]) -> None:
        self.counts += counts
        self.failures += failures


class Threads:
    """Threads with a session each; `store` adds one with a store."""

    def __init__(self, address: str, transport: str, seed: int, progress: np.ndarray) -> None:
        self.outcome = Outcome()
        self._address, self._transport, self._seed, self._progress = address, transport, seed, progress
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(len(progress))]

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        sys.stdin.read()
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        try:
            with KVClient(self._address, transport=self._client_transport(), reconnect_wait_s=PATIENCE_S) as client:
                work = self._of_store if self._transport == "store" else self._of_sequences
                work(client, number)
        except Exception:
            with self._lock:
                self.outcome.failures.append(traceback.format_exc())

    def _client_transport(self) -> str:
        return "auto" if self._transport == "store" else self._transport

    def _of_sequences(self, client: KVClient, number: int) -> None:
        with client.session(f"{self._transport}-{number}") as kv:
            if kv.transport != self._transport:
                raise AssertionError(f"the transport is {kv.transport}")
            storm = SequenceStorm(kv, self._seed * 100 + number)
            self._repeat(storm, number)

    def _of_store(self, client: KVClient, number: int) -> None:
        storm = StoreStorm(client, self._seed * 100 + number)
        self._repeat(storm, number)

    def _repeat(self, storm: SequenceStorm | StoreStorm, number: int) -> None:
        try:
            while not self._stopping.is_set() and len(storm.failures) < MAX_FAILURES:
                storm.run_one()
                self._progress[number] += 1
            storm.finish()
        finally:
            self._progress[number] = ENDED
            with self._lock:
                self.outcome.add(storm.counts, storm.failures)


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    address, transport, seed, path, index, num_threads = sys.argv[1:]
    first = int(index)
    progress = np.memmap(path, np.int64, "r+")[first : first + int(num_threads)]
    threads = Threads(address, transport, int(seed), progress)
    threads.run()
    print(json.dumps({"counts": threads.outcome.counts, "failures": threads.outcome.failures}))


if __name__ == "__main__":
    main()
