"""Clients that cause every kind of traffic that a daemon's metrics count, once or repeatedly."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from small_pool import SMALL_POOL

from kvservice.client import BatchReport, KVClient, ScheduledRequest, Session, StoreNamespace
from kvservice.client import Sequence as KVSequence
from kvservice.errors import KVServiceError, OutOfBlocksError

BLOCK_SIZE, NUM_BLOCKS = int(SMALL_POOL["block_size"]), int(SMALL_POOL["num_blocks"])
# A client that ends without closing its session.
VANISHING_CLIENT = """
import os, signal, sys
from kvservice.client import KVClient
KVClient(sys.argv[1]).session("vanishes")
os.kill(os.getpid(), signal.SIGKILL)
"""


class Traffic:
    """Sessions of two tenants, and one without a tenant. One uses a lane and a region, the others use messages."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._numbers = np.random.default_rng(0)
        self._rounds = 0

    @contextlib.contextmanager
    def open(self) -> Iterator[Traffic]:
        with contextlib.ExitStack() as stack:
            messages = stack.enter_context(KVClient(self.address, transport="inline"))
            lanes = stack.enter_context(KVClient(self.address, transport="lane"))
            self.chat = stack.enter_context(lanes.session("chat", tenant="chat"))
            self.search = stack.enter_context(messages.session("search", tenant="search"))
            self.nameless = stack.enter_context(messages.session())
            self.store = stack.enter_context(messages.store(StoreNamespace(model="stored", block_bytes=4096)))
            self.chat.create_region(4096)
            self.scheduler = self.search.open_scheduler()
            yield self

    def play(self) -> None:
        """Cause each kind of traffic once. Leaves a sequence in each tier."""
        self._rounds += 1
        for session in (self.chat, self.search, self.nameless):
            self._generate(session)
        self._fill(self.search)
        self._use_store()
        self._schedule()
        with pytest.raises(KVServiceError):
            self.chat.append([KVSequence(10**6, 1)], [1])
        _, waiting = self.chat.allocate_batch([[1], [2]])
        self.chat.swap_out([waiting])
        with KVClient(self.address) as client, client.session("visitor"):
            pass  # this session is the last: when its end is counted, everything else is, too

    def lose_session(self) -> None:
        command = [sys.executable, "-P", "-c", VANISHING_CLIENT, self.address]
        assert subprocess.run(command, timeout=60, check=False).returncode == -signal.SIGKILL

    def _compute(self, session: Session, sequence: KVSequence) -> None:
        step = session.open_step([sequence])
        for layer in range(session.info.num_layers):
            step.extend(layer, *self._tensors(session, step.num_tokens))

    def _tensors(self, session: Session, num_tokens: int) -> np.ndarray:
        shape = (3, num_tokens, session.info.num_kv_heads, session.info.head_size)
        return self._numbers.normal(size=shape).astype(session.info.dtype)

    def _generate(self, session: Session) -> None:
        """Allocate a prompt whose prefix is cached from the second time on, fork it with a copy-on-write, swap it, and
        free it."""
        own = [1000 * self._rounds + token for token in range(BLOCK_SIZE + 2)]
        sequence = session.allocate([*range(2 * BLOCK_SIZE), *own])
        self._compute(session, sequence)
        child = session.fork(sequence)
        step = session.append([sequence, child], [1, 2])
        for layer in range(session.info.num_layers):
            step.decode(layer, *self._tensors(session, 2))
        session.swap_out([child])
        session.swap_in([child])
        session.free([sequence, child])
        session.unpin(session.pin([*range(BLOCK_SIZE)], ttl_s=60))

    def _use_store(self) -> None:
        """Store a block, and look for it and for another one."""
        key, missing = (bytes([self._rounds] * 31) + last for last in (b"a", b"b"))
        block = np.zeros((1, 4096), np.uint8)
        self.store.put(key, block)
        self.store.lookup(key + missing)
        assert self.store.get(key, block).all()

    def _schedule(self) -> None:
        """Generate two tokens for a request, and for the one that the last round has left in the queue."""
        self.scheduler.add([ScheduledRequest(10**6 + 2 * self._rounds, range(3), 2)])
        batch = self.scheduler.schedule()
        while batch.step is not None:
            for layer in range(self.search.info.num_layers):
                batch.step.extend(layer, *self._tensors(self.search, batch.step.num_tokens))
            batch = self.scheduler.schedule([BatchReport(batch.number, [7] * len(batch.sampled))])
        self.scheduler.add([ScheduledRequest(10**6 + 2 * self._rounds + 1, range(3), 2)])

    def _fill(self, session: Session) -> None:
        """Fill the pool until it is exhausted, so that cached blocks are evicted."""
        first = 100_000 * self._rounds
        prompts = [
            range(at, at + 8 * BLOCK_SIZE) for at in range(first, first + 2 * NUM_BLOCKS * BLOCK_SIZE, 8 * BLOCK_SIZE)
        ]
        held: list[KVSequence] = []
        with pytest.raises(OutOfBlocksError):
            held.extend(map(session.allocate, prompts))
        session.free(held)
