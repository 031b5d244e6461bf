"""Sessions that go to the disk and come back, in daemons without a server: what a client does, and what it finds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from blocks_calls import mark_layer
from daemon_lives import Life, end_stream, finish

from kvservice.v1 import blocks_pb2, session_pb2

KINDS = ("allocate", "allocate", "append", "fork", "swap_out", "swap_in", "truncate", "free", "chunk")


# The code that saves and restores sessions and sequences, below kvservice.
FOLDERS = (
    "saved/", "server/sessions/saved.py", "server/sessions/registry.py", "server/rpc/stream.py",
    "blocks/swapping.py",
)  # fmt: skip


# Options with which a daemon has little state to copy.
FEW: dict[str, Any] = {"max_sessions": 4, "store_gib": 0.0, "share_store": "off"}


class Found(NamedTuple):
    """What a client finds in a sequence; `kv` are the bytes of its computed tokens."""

    token_ids: tuple[int, ...]
    num_computed: int
    swapped: bool
    kv: bytes


async def detach(life: Life, session: Any, ttl_s: float = 0.0) -> session_pb2.DetachResponse:
    """Save a session. Its client then ends its stream."""
    response: session_pb2.DetachResponse = await life.call(
        session, "detach", session_pb2.DetachRequest(ttl_s=ttl_s, durable=True)
    )
    life.sessions.detach(session, end_stream)
    return response


async def resume(life: Life, token: bytes, holder: int = 2) -> Any:
    """Attach to a session as a client does that resumes it."""
    if (restoring := life.sessions.restoring(token)) is not None:
        await restoring
    return life.attach(token, holder)


async def swap_out(life: Life, session: Any, *ids: int, request_id: int = 0) -> int:
    """Swap sequences out to the disk. Returns the number of blocks."""
    request = blocks_pb2.SwapOutRequest(sequence_ids=ids, tier=blocks_pb2.SWAP_TIER_DISK, request_id=request_id)
    return int((await life.call(session, "swap_out", request)).moved_blocks)


async def swap_in(life: Life, session: Any, *ids: int, request_id: int = 0) -> int:
    """Swap sequences in. Returns the number of blocks."""
    request = blocks_pb2.SwapInRequest(sequence_ids=ids, request_id=request_id)
    moved = int((await life.call(session, "swap_in", request)).moved_blocks)
    await asyncio.sleep(0)
    return moved


async def found(life: Life, session: Any) -> dict[int, Found]:
    """Return what is in all sequences. Swapped ones are swapped in and out again."""
    described = life.manager.describe(session.namespace, include_tokens=True)
    result: dict[int, Found] = {}
    for one in described:
        ids = [one.sequence_id]
        if one.swapped:
            life.core.engine.swap_in(session.namespace, np.array(ids))
        kv = await life.read(session, one.sequence_id, one.num_computed) if one.num_computed else np.zeros(0)
        if one.swapped:
            life.core.engine.swap_out(session.namespace, np.array(ids))
        assert one.token_ids is not None
        tokens = tuple(one.token_ids.tolist())
        result[one.sequence_id] = Found(tokens, one.num_computed, one.swapped, kv.tobytes())
    life.manager.end_operation()
    return result


async def random_session(life: Life, session: Any, seed: int, *, num_operations: int = 25) -> None:
    """Make sequences with forks, extra keys, partial blocks, pending tokens, half-written steps and swaps."""
    made = random.Random(seed)
    names: list[int] = []
    space, manager = session.namespace, life.manager

    async def write(step_id: int, num_tokens: int) -> None:
        await life.write(session, step_id, num_tokens, made.randrange(1 << 30))

    for name in range(num_operations):
        resident = [one.sequence_id for one in manager.describe(space) if not one.swapped]
        kind = made.choice(
            ["allocate", "allocate", "append", "fork", "swap_out", "swap_in", "truncate", "free", "chunk"]
        )
        if kind == "allocate" and manager.stats().free_blocks > 12:
            keys = [blocks_pb2.ExtraKey(position=0, key=b"tenant %d" % made.randrange(3))] * made.randrange(2)
            tokens = [made.randrange(2) for _ in range(made.randrange(1, 14))]
            one = blocks_pb2.SequenceAllocation(sequence_id=name, token_ids=tokens, extra_keys=keys)
            await life.call(session, "allocate", blocks_pb2.AllocateRequest(sequences=[one]))
            names.append(name)
        if not resident:
            continue
        chosen = made.choice(resident)
        (state,) = manager.describe(space, [chosen])
        pending = state.length - state.num_computed
        if kind == "append" and manager.stats().free_blocks > 4:
            step = await life.call(
                session, "append", blocks_pb2.AppendRequest(sequence_ids=[chosen], token_ids=[name, 1], num_tokens=[2])
            )
            if made.random() < 0.7:
                await write(step.step_id, pending + 2)
        if kind == "chunk" and pending:
            count = made.randint(1, pending)
            request = blocks_pb2.OpenStepRequest(sequence_ids=[chosen], num_tokens=[count])
            step = await life.call(session, "open_step", request)
            if made.random() < 0.8:
                await write(step.step_id, count)
            else:
                mark_layer(life.manager, space, step.step_id, 0)
        if kind == "fork":
            await life.call(session, "fork", blocks_pb2.ForkRequest(parent_ids=[chosen], child_ids=[1000 + name]))
        if kind == "truncate":
            lengths = [made.randint(0, state.length)]
            await life.call(session, "truncate", blocks_pb2.TruncateRequest(sequence_ids=[chosen], lengths=lengths))
        if kind == "swap_out" and manager.can_swap_out(space, [chosen]):
            await life.call(session, "swap_out", blocks_pb2.SwapOutRequest(sequence_ids=[chosen]))
        if kind == "free" and len(resident) > 3:
            await life.call(session, "free", blocks_pb2.FreeRequest(sequence_ids=[chosen]))
        swapped = [one.sequence_id for one in manager.describe(space) if one.swapped]
        if kind == "swap_in" and swapped and manager.can_swap_in(space, swapped[:1]).value == "ok":
            await life.call(session, "swap_in", blocks_pb2.SwapInRequest(sequence_ids=swapped[:1]))


def sharing(life: Life, session: Any) -> list[list[tuple[bool, int]]]:
    """Return the tables of all sequences without lookahead: (swapped, block)."""
    tables = finish(life.manager.save_in_slices(session.namespace))
    return [
        [(bool(tables.in_swap[number]), int(tables.block_ids[number])) for number in one.blocks.tolist()]
        for one in tables.saved.sequences
    ]


class HeldLoads:
    """Lets the reads of blocks from the disk wait."""

    def __init__(self, life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
        self._loads: list[asyncio.Event] = []
        self._all, self._more = False, asyncio.Condition()
        load = life.core.device.load_blocks

        async def held(*args: Any) -> Any:
            go_on = asyncio.Event()
            async with self._more:
                self._loads.append(go_on)
                self._more.notify_all()
            if not self._all:
                await go_on.wait()
            return await load(*args)

        monkeypatch.setattr(life.core.device, "load_blocks", held)

    async def begun(self, count: int) -> None:
        """Wait until so many have begun. No more than these have."""
        async with self._more:
            await self._more.wait_for(lambda: len(self._loads) >= count)
        assert len(self._loads) == count

    def go_on(self, *, others: bool = True) -> None:
        """Let those that have begun go on, and those to come if `others`."""
        self._all = others
        for load in self._loads:
            load.set()


async def settle() -> None:
    """Let tasks and threads finish."""
    for _ in range(3):
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.gather(*others, return_exceptions=True)


def inline_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the calls of threads run on the event loop, so that a test sees each of their effects."""

    async def run_here(_: asyncio.AbstractEventLoop, __: Any, call: Callable[..., Any], *args: Any) -> Any:
        return call(*args)

    monkeypatch.setattr(asyncio.BaseEventLoop, "run_in_executor", run_here)
