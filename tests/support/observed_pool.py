"""A block manager whose arrays are shared as in the daemon, with the observer's reader in the same process, and random
operations on it."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvservice.blocks import AllocationRequest, BlockManager, BlocksConfig, BlocksStats, SessionNamespace
from kvservice.errors import KVServiceError
from kvservice.kept import KeptArrays
from kvservice.observer.history import History
from kvservice.observer.views import Views
from kvservice.scheduler import Scheduler
from kvservice.telemetry import (
    CallTable,
    DaemonStatsTable,
    EngineTable,
    FiguresTable,
    Reader,
    Reading,
    SavedStats,
    SchedulerTable,
    ServerStats,
    SessionRow,
    SessionTable,
    SharedArrays,
    SpillStats,
    StoreTable,
    TierTable,
    TransferTable,
    names_of,
    open_arrays,
)

METHODS = ["allocate", "free"]
MAX_SESSIONS, MAX_TENANTS = 5, 3


@dataclass(eq=False)
class OpenSession:
    session_id: int
    name: str
    tenant: str
    row: SessionRow
    space: SessionNamespace


class ObservedPool:
    """`methods` are the RPC methods that were called, `info` is the configuration that the page shows."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        methods: Sequence[str] = METHODS,
        info: dict[str, Any] | None = None,
        store_bytes: int = 0,
        **changes: int,
    ) -> None:
        sizes: dict[str, Any] = {
            "num_blocks": 40,
            "block_size": 4,
            "num_swap_blocks": 16,
            "max_sequences": 32,
            "max_sequence_tokens": 64,
        }
        shared = SharedArrays()
        memory = KeptArrays(shared, SharedArrays())
        self.manager = BlockManager(BlocksConfig(**(sizes | changes), watermark=0.0), clock=clock, memory=memory)
        self.table = SessionTable(MAX_SESSIONS, MAX_TENANTS, shared.zeros)
        self.calls = CallTable(methods, shared.zeros)
        self.stats = DaemonStatsTable(2, shared.zeros)
        self.store_table = StoreTable(store_bytes, 3, shared.zeros)
        self.tier_table = TierTable(shared.zeros)
        self.spill_table = FiguresTable("spill", SpillStats, shared.zeros)
        self.saved_table = FiguresTable("saved", SavedStats, shared.zeros)
        self.transfer_table = TransferTable(shared.zeros)
        self.schedulers = Scheduler(self.manager)
        self.scheduler_table = SchedulerTable(MAX_SESSIONS, shared.zeros)
        self.engine_table = EngineTable(MAX_SESSIONS, shared.zeros)
        self.sessions: list[OpenSession] = []
        self.num_opened = 0
        descriptor = shared.read_only()
        arrays = open_arrays(descriptor, shared.manifest)
        os.close(descriptor)
        self.reader = Reader(arrays, methods, started_s=time.monotonic())
        self.history = History(self.reader.call_keys, block_bytes=100)
        self.views = Views(arrays, self.reader, self.history, info or {}, self._read, self._block_hash)

    async def _read(self) -> Reading:
        return self.history.latest

    async def _block_hash(self, block: int) -> bytes:
        """Return the expected hash of a block, from the oracle."""
        found = [chain_hash for chain_hash, at in self.manager.device.index.blocks.items() if at == block]
        return found[0] if found else b""

    def open(self, name: str = "", tenant: str = "") -> OpenSession:
        self.num_opened += 1
        row = self.table.open(self.num_opened, name, tenant, int(time.monotonic() * 1000))
        space = self.manager.open_namespace(row.number + 1, row.counters)
        self.sessions.append(OpenSession(self.num_opened, name, tenant, row, space))
        return self.sessions[-1]

    def close(self, session: OpenSession) -> None:
        self.sessions.remove(session)
        self.manager.close_namespace(session.space)
        self.table.close(session.row)

    def compute(self, session: OpenSession, sequence_id: int, token_ids: list[int]) -> None:
        """Allocate and compute a sequence of these tokens."""
        self.manager.allocate(session.space, [AllocationRequest(sequence_id, token_ids)])
        self.manager.mark_all_layers(session.space, self.manager.open_step(session.space, [sequence_id]).step_id)

    def read(self, **stats: int) -> None:
        """Do the observer's work of one second, with these gauges and counters in place of the real ones."""
        num_blocks = {"num_blocks": self.manager.config.num_blocks}
        blocks = num_blocks | {name: value for name, value in stats.items() if name in names_of(BlocksStats)}
        server = {name: value for name, value in stats.items() if name not in blocks}
        self.stats.write(BlocksStats(**blocks), ServerStats(**server), [0, 0])
        self.write_schedulers()
        self.history.add(self.reader.read(), time.time())

    def write_schedulers(self) -> None:
        schedulers = self.schedulers
        rows = {number - 1: figures for number, figures in schedulers.figures().items()}
        self.scheduler_table.write(rows, schedulers.totals(), schedulers.latencies)


class RandomOperations:
    """Random operations of all kinds, of all sessions, one at a time. Refused operations change nothing."""

    def __init__(self, pool: ObservedPool, seed: int) -> None:
        self._pool, self._manager = pool, pool.manager
        self._random = random.Random(seed)
        self._next_id = 0
        self.done: set[str] = set()

    def step(self) -> None:
        pool = self._pool
        if not pool.sessions or (len(pool.sessions) < MAX_SESSIONS and self._random.random() < 0.1):
            number = self._random.randrange(6)
            pool.open(f"name {number}", f"tenant {number}")
            return
        operations = (
            self._allocate, self._allocate, self._compute, self._compute, self._append, self._append, self._fork,
            self._truncate, self._free, self._swap_out, self._swap_out, self._swap_in, self._pin, self._reset,
            self._close,
        )  # fmt: skip
        operation = self._random.choice(operations)
        session = self._random.choice(pool.sessions)
        with contextlib.suppress(KVServiceError):
            operation(session)
            self.done.add(operation.__name__)

    def _some_of(self, session: OpenSession, most: int = 1) -> list[int]:
        """Return up to `most` sequences of a session, or an unknown one if it is empty."""
        known = session.space.sequence_ids() or [0]
        return self._random.sample(known, self._random.randint(1, min(most, len(known))))

    def _prompt(self) -> list[int]:
        return [self._random.randrange(4)] * self._random.randrange(1, 24)

    def _new_id(self) -> int:
        self._next_id += self._random.randrange(1, 1 << 40)
        return self._next_id

    def _allocate(self, session: OpenSession) -> None:
        self._manager.allocate(session.space, [AllocationRequest(self._new_id(), self._prompt())])

    def _compute(self, session: OpenSession) -> None:
        self._pool.compute(session, self._new_id(), self._prompt())

    def _append(self, session: OpenSession) -> None:
        step = self._manager.append(session.space, self._some_of(session), self._prompt()[:1])
        if self._random.random() < 0.5:
            self._manager.mark_all_layers(session.space, step.step_id)

    def _fork(self, session: OpenSession) -> None:
        self._manager.fork(session.space, self._some_of(session), [self._new_id()])

    def _truncate(self, session: OpenSession) -> None:
        chosen = self._some_of(session)
        (info,) = self._manager.describe(session.space, chosen)
        self._manager.truncate(session.space, chosen, [self._random.randrange(1, info.length + 1)])

    def _free(self, session: OpenSession) -> None:
        self._manager.free(session.space, self._some_of(session))

    def _swap_out(self, session: OpenSession) -> None:
        self._manager.swap_out(session.space, self._some_of(session, most=4))  # these may share blocks

    def _swap_in(self, session: OpenSession) -> None:
        self._manager.swap_in(session.space, self._some_of(session))

    def _pin(self, session: OpenSession) -> None:
        self._manager.pin(session.space, self._prompt(), ttl_s=1e6)

    def _reset(self, _: OpenSession) -> None:
        if self._random.random() < 0.2:
            self._manager.reset_prefix_cache()

    def _close(self, session: OpenSession) -> None:
        if self._random.random() < 0.3:
            self._pool.close(session)
