"""The daemon is killed under puts, gets and removals by every way. A block that was stored is there with its bytes, and
one that was removed is not."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from kept_daemon import next_process
from store_daemons import BLOCK_BYTES, SMALL_STORE, blocks_of, keys_of, new_namespace
from waiting import until

from kvservice.client import KVClient, PutStatus, Store
from kvservice.launch import Daemon

pytestmark = pytest.mark.slow

NUM_KILLS = 4
BATCH = 4
# Blocks of a client that are stored at a time: those of all clients have room.
MOST = 400


@pytest.fixture(scope="module")
def kept_daemon() -> Iterator[Daemon]:
    with Daemon(keeper=True, **SMALL_STORE | {"share_store": "write"}) as daemon:
        yield daemon


class Load:
    """A client that puts, gets and removes blocks in a thread, and knows which there must be."""

    def __init__(self, store: Store, stop: threading.Event, seed: int) -> None:
        self._store, self._stop, self._random = store, stop, random.Random(seed)
        # The blocks that there are, and those of calls without an answer.
        self.stored: list[int] = []
        self.removed: list[int] = []
        self.num_gets = 0
        self._next = 0
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if len(self.stored) > MOST:
                    self._remove()
                else:
                    self._put()
                self._get()
        except BaseException as error:
            self.failure = error

    def _put(self) -> None:
        numbers = range(self._next, self._next + BATCH)
        self._next += BATCH
        statuses = self._store.put(keys_of(*numbers), blocks_of(*numbers))
        if (statuses == PutStatus.UNREACHABLE).any():
            self._stop.wait(0.01)
            return
        assert set(statuses.tolist()) <= {PutStatus.DONE, PutStatus.PRESENT}
        self.stored += numbers

    def _remove(self) -> None:
        numbers, self.stored = self.stored[:BATCH], self.stored[BATCH:]
        if self._store.remove(keys_of(*numbers)) == BATCH:
            self.removed += numbers

    def _get(self) -> None:
        if self.stored:
            numbers = self._random.sample(self.stored, min(BATCH, len(self.stored)))
            found = self._read(numbers)
            self.num_gets += int(found.sum())

    def _read(self, numbers: list[int]) -> np.ndarray:
        out = np.zeros((len(numbers), BLOCK_BYTES), np.uint8)
        found = self._store.get(keys_of(*numbers), out)
        np.testing.assert_array_equal(out[found], blocks_of(*numbers)[found])
        return found

    def await_progress(self) -> None:
        """Wait until blocks were put and got since this call."""
        stored, gets = self._next, self.num_gets
        until(lambda: self.failure is not None or (self._next > stored and self.num_gets > gets))

    def check(self) -> None:
        """Check all blocks at rest."""
        assert self.failure is None, self.failure
        until(lambda: self._store.reachable)
        for begin in range(0, len(self.stored), BATCH):
            assert self._read(self.stored[begin : begin + BATCH]).all(), "a block is lost"
        for begin in range(0, len(self.removed), BATCH):
            assert not self._read(self.removed[begin : begin + BATCH]).any(), "a removed block is there"


def test_kills_under_load(kept_daemon: Daemon) -> None:
    stop = threading.Event()
    with KVClient(kept_daemon.address) as client:
        stores = [client.store(new_namespace(), transport=way) for way in ("mapped", "region", "inline")]
        assert [store.transport for store in stores] == ["mapped", "region", "inline"]
        loads = [Load(store, stop, seed) for seed, store in enumerate(stores)]
        try:
            for kill in range(NUM_KILLS):
                for load in loads:
                    load.await_progress()
                next_process(kept_daemon, signal.SIGKILL if kill else signal.SIGABRT)
        finally:
            stop.set()
            for load in loads:
                load.thread.join()
        for load in loads:
            load.check()
        for store in stores:
            store.close()
