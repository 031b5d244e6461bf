"""Memory that a session shares with a client on the same host: its regions, its lane, the mapped pool, step tables.

open_step ─▶ publish ─▶ the client works on the step in the mapped pool or by its lane ─▶ commit
                └── the step ends (append, fork, truncate, swap, free, close) ─▶ retire: the step is no longer usable
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvservice.blocks import BlockManager, SessionNamespace, Slices, StepPlan
from kvservice.config import ServeConfig
from kvservice.devices import CudaRegion, Device, FinishedSteps, LaneServer, LaneSession
from kvservice.errors import FailedPreconditionError, PoolNotSharedError, QuotaExceededError, ResourceExhaustedError
from kvservice.logs import LogBudget
from kvservice.server.loop import Clock
from kvservice.server.memory.budget import Budget, BudgetedMemory, descriptors_needed
from kvservice.server.memory.fd_passing import FdServer, OnFetch, SessionUser, Trust, Writers
from kvservice.server.memory.remote import Transfers
from kvservice.server.memory.step_tables import TABLE_BYTES, Run, SharedStepTables
from kvservice.telemetry.tables import LANE, SessionRow


@dataclass
class PoolMappings:
    """The number of sessions that have mapped the pool. It is limited, because their step tables use memory."""

    count: int = 0


@dataclass(frozen=True)
class Sharing:
    """The objects that the SharedWithClient of all sessions have in common."""

    trust: Trust
    budget: Budget
    fd_server: FdServer
    lanes: Lanes
    mappings: PoolMappings
    clock: Clock
    transfers: Transfers
    writers: Writers
    log: LogBudget


class SharedWithClient:
    """The memory that one session shares with its client. All methods must be called on the event loop."""

    def __init__(
        self,
        config: ServeConfig,
        device: Device,
        manager: BlockManager,
        namespace: SessionNamespace,
        sharing: Sharing,
        row: SessionRow,
        session_id: int,
    ) -> None:
        self._config = config
        self._device = device
        self._manager = manager
        self._namespace = namespace
        self.budget, self._fd_server, self._lanes = sharing.budget, sharing.fd_server, sharing.lanes
        self._mappings, self._writers, self._log = sharing.mappings, sharing.writers, sharing.log
        self.transfers = sharing.transfers
        self._lane_number = sharing.lanes.new_number()
        self._row, self._session_id = row, session_id
        self.user = SessionUser(sharing.trust, sharing.clock)
        self._shared: LaneSession | None = None
        self._lane: LaneServer | None = None
        self._lane_memory: BudgetedMemory | None = None
        self._tables: SharedStepTables | None = None
        self._table_memory: BudgetedMemory | None = None
        self._writable = False
        self._published: set[int] = set()
        self.shares_steps = False
        """Whether steps are published, to a lane or in step tables."""

    # ---- regions

    def make_memory(self, name: str, num_bytes: int, field: str) -> Slices[BudgetedMemory]:
        """Allocate memory for a region in slices. Raises QuotaExceededError and ResourceExhaustedError naming
        `field`."""
        return self.budget.make_in_slices(name, num_bytes, field=field)

    def hand_over(self, memory: BudgetedMemory) -> bytes:
        """Offer the memory on the fd-passing socket, and return the handover token. Raises QuotaExceededError."""
        return self._fd_server.offer([memory.descriptor()], self)

    def offer_store(self, descriptor: int, on_fetch: OnFetch) -> bytes:
        """Offer the memory of the block store, and return the handover token. Raises QuotaExceededError."""
        return self._fd_server.offer([descriptor], self, on_fetch)

    def withdraw(self, token: bytes) -> None:
        """Cancel the offer of this handover token, if it is still pending."""
        self._fd_server.withdraw(token)

    def add_region(self, address: int, num_bytes: int) -> int:
        """Register memory of the daemon for use in lane entries. Returns the region's number."""
        return self._of_lane().add_region(address, num_bytes)

    def remove_region(self, number: int) -> None:
        """Unregister a region. Blocks until no call of the lane uses it."""
        self._of_lane().remove_region(number)

    def open_cuda_region(self, raw_handle: bytes, device_id: int, byte_size: int) -> CudaRegion:
        """Open a CUDA IPC handle.

        The caller must check that the user may share memory, because a forged handle that the driver accepts can make
        the daemon lose its GPU. Raises RegionsNotAllowedError, RegionNotOpenedError, InvalidArgumentError.
        """
        return self._device.open_cuda_region(self._of_lane(), raw_handle, device_id, byte_size)

    def _of_lane(self) -> LaneSession:
        if self._shared is None:
            finished_ids = self._manager.finished_ids(self._namespace)
            self._shared = self._device.lane_session(self._lane_number, finished_ids)
        return self._shared

    # ---- the lane

    def open_lane(self) -> bytes:
        """Open the session's lane. Returns a handover token for its memory. Raises RegionsNotAllowedError,
        FailedPreconditionError, QuotaExceededError, ResourceExhaustedError."""
        self.user.check_may_share()
        if self._lane is not None and not self._lane.closed:
            raise FailedPreconditionError("the session has a lane")
        self.close_lane()
        limit = self._config.max_lanes
        if len(self._lanes) >= limit:
            raise QuotaExceededError(f"{limit} lanes are open", limit="max_lanes", value=limit)
        memory = self.budget.make("kvservice-lane", self._device.lane_bytes)
        try:
            token = self.hand_over(memory)
            self._lane = self._device.open_lane(memory.sealed, self._of_lane())
        except BaseException:
            memory.close()
            raise
        self._lane_memory = memory
        self._share_steps()
        self._lanes.add(self._lane_number, self, self._lane)
        self._row.set(LANE, 1)
        return token

    def close_lane(self) -> None:
        """Close the lane, if it is open, after its running calls. Steps that it finished are committed."""
        if self._lane is not None:
            assert self._lane_memory is not None, "a lane has memory"
            self._lanes.end(self._lane_number)
            self._lane = None
            self._lane_memory.close()
            self._lane_memory = None
            self._share_steps()
            self._row.set(LANE, 0)

    # ---- the pool

    def map_pool(self, writable: bool) -> tuple[bytes, int, int]:
        """Let the client map the pool.

        Returns a handover token for the memory of the pool and of the step tables, and the size of each in bytes.
        Raises PoolNotSharedError, ResourceExhaustedError, QuotaExceededError.
        """
        shared = self._config.share_pool
        if shared == "off" or (writable and shared != "write"):
            raise PoolNotSharedError(f"the daemon runs with --share-pool {shared}", field="writable")
        self.user.check_may_map()
        memory = self._table_memory or self._make_tables()
        try:
            with descriptors_needed(), self._device.exported_pool() as pool:
                token = self._offer_pool(pool.descriptor, memory, writable)
        except BaseException:
            if self._table_memory is None:
                memory.close()
            raise
        if self._table_memory is None:
            self._table_memory = memory
            self._tables = SharedStepTables(memory.sealed)
            self._share_steps()
            self._mappings.count += 1
        self._writable = self._writable or writable
        return token, pool.num_bytes, TABLE_BYTES

    def _make_tables(self) -> BudgetedMemory:
        limit = self._config.max_pool_mappings
        if self._mappings.count >= limit:
            raise QuotaExceededError(f"{limit} sessions have mapped the pool", limit="max_pool_mappings", value=limit)
        return self.budget.make("kvservice-tables", TABLE_BYTES, read_only=True)

    def _offer_pool(self, pool_descriptor: int, tables: BudgetedMemory, writable: bool) -> bytes:
        copy = os.dup(pool_descriptor)
        try:
            table_descriptor = tables.descriptor()
        except BaseException:
            os.close(copy)
            raise
        return self._fd_server.offer([copy, table_descriptor], self, self._add_writer if writable else _any_process)

    def _add_writer(self, connection: socket.socket) -> None:
        self._manager.add_writer(self._namespace, self._writers.add(connection))

    def unmap_pool(self) -> None:
        """End the mapping at the client's request, which promises with it that it writes to the pool no more."""
        self._manager.quarantine.forget_writers(self._namespace.number)
        self._close_tables()

    def _close_tables(self) -> None:
        if self._tables is not None and self._table_memory is not None:
            self._tables.close()
            self._table_memory.close()
            self._tables, self._table_memory = None, None
            self._mappings.count -= 1
            self._share_steps()
        self._writable = False

    def check_writable(self) -> None:
        """Raise PoolNotSharedError unless the session has mapped the pool for writing."""
        if not self._writable:
            raise PoolNotSharedError("the session has not mapped the pool for writing")

    # ---- steps

    def _share_steps(self) -> None:
        """Note whether there is a lane or a mapped pool."""
        self.shares_steps = self._lane is not None or self._tables is not None
        if self.shares_steps:
            self._namespace.on_step_end = self._retire

    def check_in_tables(self, step_id: int) -> None:
        """Raise FailedPreconditionError unless the client can know the slots of a step."""
        if self._tables is None or step_id not in self._tables:
            raise FailedPreconditionError(
                f"step {step_id} is not in the step tables: they were full, or it is older than the mapping",
                field="step_id", step_id=step_id,
            )  # fmt: skip

    def following(self, step_id: int) -> contextlib.AbstractContextManager[Run | None]:
        """See SharedStepTables.following."""
        return contextlib.nullcontext() if self._tables is None else self._tables.following(step_id)

    def publish(
        self, step: StepPlan, *, to_lane: bool = True, run: Run | None = None
    ) -> tuple[tuple[int, int] | None, Awaitable[None] | None]:
        """Publish a step that was just opened to the lane, unless it has no layers, and in the step tables, of which
        there is one (`shares_steps`). `run` is what `following` has yielded.

        Returns its slot and offset in the step tables, or None if it has none; and an awaitable after which the client
        may work on the step, or None if it may at once.
        """
        try:
            prepared = self._device.prepare(step)
        except ResourceExhaustedError:
            return None, None  # the step stays open, and the client sends its layers in messages
        if prepared is None and to_lane:
            self._publish_to_lane(step)
        mapped = None if self._tables is None else self._tables.publish(step, run)
        if prepared is not None and to_lane:
            prepared = self._publish_when(prepared, step)
        return mapped, prepared

    async def _publish_when(self, prepared: Awaitable[None], step: StepPlan) -> None:
        await prepared
        self._publish_to_lane(step)

    def _publish_to_lane(self, step: StepPlan) -> None:
        if self._lane is None or step.step_id in self._published:
            return
        written = self._manager.hand_to_lane(self._namespace, step.step_id)
        if written is not None:  # else the step has ended in the meantime
            self._device.publish(self._of_lane(), step, written)
            self._published.add(step.step_id)

    def _retire(self, step_id: int) -> None:
        if self._tables is not None:
            self._tables.retire(step_id)
        if step_id in self._published:
            self._published.remove(step_id)
            self._of_lane().retire(step_id)

    def commit(self, step_id: int) -> None:
        """Commit a step whose last layer was written by the lane."""
        self._manager.commit_written(self._namespace, step_id)

    def drain(self) -> None:
        """Make the lane refuse steps that have not begun."""
        if self._shared is not None:
            self._shared.set_draining()

    def close(self, *, writers_done: bool = False) -> None:
        """Close all of it. `writers_done`: the client has promised that it does not write to the pool any more; else
        the blocks that it may write wait for its end."""
        self._fd_server.withdraw_all(self)
        try:
            self.close_lane()
        finally:
            self._close_tables()
            if writers_done:
                self._manager.quarantine.forget_writers(self._namespace.number)
            num_blocks, writers = self._manager.quarantine_writable(self._namespace)
        if num_blocks:
            self._log.write(
                logging.WARNING,
                "%d blocks of session %d are in quarantine: process %s may still write them, until it ends",
                num_blocks, self._session_id, ", ".join(map(str, self._writers.pids(writers))),
                extra={"session_id": self._session_id},
            )  # fmt: skip


def _any_process(_: socket.socket) -> None:
    """Hand memory for reading over to any process of the user."""


# ---- the lanes of all sessions

# The thread of a lane adds a step to `Device.finished_steps` before it completes the call for the last layer. The event
# loop commits the step when the lane signals it, and before any call. So a call that a client makes after it has seen
# the completion finds the step committed.

# The number of calls, the number of failed calls, the latency histogram (calls per bucket, the last entry is the
# overflow), and the sum of the latencies in seconds.
LaneStats: TypeAlias = tuple[int, int, list[int], float]


class LaneOwner(Protocol):
    """The session that a lane belongs to."""

    def commit(self, step_id: int) -> None:
        """Commit a step whose last layer was written by the lane."""

    def drain(self) -> None:
        """Make the lane refuse steps that have not begun."""

    def close_lane(self) -> None:
        """Close the lane."""


@dataclass(frozen=True)
class OpenLane:
    owner: LaneOwner
    server: LaneServer


class Lanes:
    """All open lanes, by the number of their session, see `new_number`."""

    def __init__(self, num_buckets: int, finished_steps: FinishedSteps) -> None:
        """`num_buckets` is the length of the latency histograms."""
        self.finished_steps = finished_steps
        self._lanes: dict[int, OpenLane] = {}
        self._numbers = itertools.count()
        # Totals over closed lanes.
        self._ended: LaneStats = (0, 0, [0] * num_buckets, 0.0)

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def descriptor(self) -> int:
        """The file descriptor that is readable while there are steps for `commit_finished`."""
        return self.finished_steps.descriptor

    def new_number(self) -> int:
        """Return a number for the lanes of a session. It identifies the session in the finished steps."""
        return next(self._numbers)

    def add(self, number: int, owner: LaneOwner, server: LaneServer) -> None:
        self._lanes[number] = OpenLane(owner, server)

    def end(self, number: int) -> None:
        """Close a lane after its running calls, and commit the steps that it completed."""
        server = self._lanes[number].server
        server.close()
        self.commit_finished()
        del self._lanes[number]
        self._ended = _sum(self._ended, server.stats())

    def commit_finished(self) -> None:
        """Commit the steps whose last layer was written by a lane."""
        self.commit(self.finished_steps.take())

    def commit(self, steps: Iterable[tuple[int, int]]) -> None:
        """Commit these finished steps."""
        for number, step_id in steps:
            self._lanes[number].owner.commit(step_id)

    def stats(self) -> LaneStats:
        """Return totals over open and closed lanes."""
        stats = self._ended
        for lane in self._lanes.values():
            stats = _sum(stats, lane.server.stats())
        return stats

    def drain(self) -> None:
        """Make all lanes refuse steps that have not begun."""
        for lane in self._lanes.values():
            lane.owner.drain()

    def close(self) -> None:
        for lane in list(self._lanes.values()):
            lane.owner.close_lane()


def _sum(one: LaneStats, other: LaneStats) -> LaneStats:
    counts = [a + b for a, b in zip(one[2], other[2], strict=True)]
    return one[0] + other[0], one[1] + other[1], counts, one[3] + other[3]
