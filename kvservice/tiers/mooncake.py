"""A Mooncake Store as a tier: values that many daemons share.

The library runs in a child process (kvservice.mooncake), which maps the store's memory and moves values between it and
the nodes of the store. The child is killed if it does not answer in time: only then is it certain that the memory which
its requests name is not used any more.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from typing import Any, Final

from kvservice.mooncake.listening import NOWHERE, listening_environment
from kvservice.mooncake.messages import (
    CALLS_AT_A_TIME,
    GETS_AT_A_TIME,
    KEY_BYTES,
    PUTS_AT_A_TIME,
    REQUEST_VALUES,
    WORD_BYTES,
    MooncakeRequest,
    Operation,
    Outcome,
    values_in_request,
)
from kvservice.mooncake.options import MooncakeOptions
from kvservice.tiers.child import Child, ChildKeeper, ChildrenPipe
from kvservice.tiers.protocol import GetResult, Space, TierStats, Values

# Time limits on a request. They are longer than those of the library on its own calls of the master.
CALL_S, TRANSFER_S = 10.0, 20.0

_DONE: Final = bytes([Outcome.DONE])
# Maps an outcome to whether the value is there.
_IS_THERE: Final = bytes(outcome == Outcome.DONE for outcome in range(256))


def start_client(options: MooncakeOptions, memory_fd: int, num_bytes: int, children: ChildrenPipe) -> Child:
    """Start the child that serves requests. Raises OSError."""
    arguments = [str(memory_fd), str(num_bytes), options.to_json()]
    with children.writing() as writing:
        return Child("kvservice.mooncake", arguments, [memory_fd, writing], listening_environment(NOWHERE))


def start_node(options: MooncakeOptions, segment_gib: float) -> Child:
    """Start a child that gives memory to the store. It is another one, because whoever reaches it can read and write
    its memory. Raises OSError."""
    arguments = [f"--{name}={value}" for name, value in asdict(options).items()]
    arguments.append(f"--segment-gib={segment_gib}")
    return Child("kvservice.mooncake.node", arguments, [], listening_environment(options.address))


class MooncakeTier:
    """Values of a block store's memory in a Mooncake Store."""

    name = "mooncake"

    def __init__(self, client: ChildKeeper, node: ChildKeeper | None = None) -> None:
        self._client, self._node = client, node
        # The child has a thread for each request. Lookups and removals do not wait for values that travel.
        self._calls = asyncio.Semaphore(CALLS_AT_A_TIME)
        self._gets = asyncio.Semaphore(GETS_AT_A_TIME)
        self._puts = asyncio.Semaphore(PUTS_AT_A_TIME)
        self._outcomes: Counter[int] = Counter()
        self._num_removed = 0

    @classmethod
    def open(
        cls,
        options: MooncakeOptions,
        memory_fd: int,
        num_bytes: int,
        segment_gib: float = 0.0,
        children: ChildrenPipe | None = None,
    ) -> MooncakeTier:
        """Return a tier over the memory file of a block store, which gives `segment_gib` of other memory to the store.
        `children` will tell whether the processes that use the memory have ended. To be called in the event loop."""
        start = functools.partial(start_client, options, memory_fd, num_bytes, children or ChildrenPipe())
        client = ChildKeeper(f"the Mooncake client of {options.master}", start)
        if not segment_gib:
            return cls(client)
        name = f"the Mooncake node of {options.master} with {segment_gib:g} GiB"
        return cls(client, ChildKeeper(name, functools.partial(start_node, options, segment_gib)))

    async def lookup(self, space: Space, keys: bytes) -> bytes:
        batches = _batches(len(keys) // KEY_BYTES, REQUEST_VALUES)
        replies = await _all([self._call(Operation.EXIST, space, _part(keys, at, KEY_BYTES)) for at in batches])
        return b"".join(replies).translate(_IS_THERE)

    async def get(self, space: Space, values: Values) -> GetResult:
        replies = await self._transfer(Operation.GET, self._gets, space, values)
        outcomes, checksums = [], []
        for reply in replies:
            num_values = len(reply) // (1 + WORD_BYTES)
            outcomes.append(self._count(reply[:num_values]))
            checksums.append(reply[num_values:])
        return GetResult(b"".join(outcomes).translate(_IS_THERE), b"".join(checksums))

    async def put(self, space: Space, values: Values) -> bytes:
        replies = await self._transfer(Operation.PUT, self._puts, space, values)
        return b"".join(map(self._count, replies)).translate(_IS_THERE)

    async def remove(self, space: Space, keys: bytes) -> int:
        batches = _batches(len(keys) // KEY_BYTES, REQUEST_VALUES)
        replies = await _all([self._call(Operation.REMOVE, space, _part(keys, at, KEY_BYTES)) for at in batches])
        num_removed = sum(reply.count(_DONE) for reply in replies)
        self._num_removed += num_removed
        return num_removed

    async def clear(self, space: Space) -> None:
        await self._call(Operation.CLEAR, space, b"")

    def stats(self) -> TierStats:
        return TierStats(
            self.name,
            self._client.state,
            removed=self._num_removed,
            refused=self._outcomes[Outcome.REFUSED],
            corrupt=self._outcomes[Outcome.CORRUPT],
            errors=self._outcomes[Outcome.BROKEN] + self._client.num_deaths,
        )

    async def close(self) -> None:
        await self._client.close()
        if self._node is not None:
            await self._node.close()

    def _count(self, outcomes: bytes) -> bytes:
        self._outcomes.update(outcomes)
        return outcomes

    async def _call(self, operation: Operation, space: Space, keys: bytes) -> bytes:
        async with self._calls:
            return await self._client.child().ask(
                lambda request_id: MooncakeRequest(operation, request_id, space.digest, space.block_bytes, keys), CALL_S
            )

    async def _transfer(
        self, operation: Operation, turns: asyncio.Semaphore, space: Space, values: Values
    ) -> list[bytes]:
        async def transfer(at: slice) -> bytes:
            async with turns:
                return await self._client.child().ask(
                    lambda request_id: MooncakeRequest(
                        operation,
                        request_id,
                        space.digest,
                        space.block_bytes,
                        _part(values.keys, at, KEY_BYTES),
                        _part(values.offsets, at, WORD_BYTES),
                        _part(values.checksums, at, WORD_BYTES),
                    ),
                    TRANSFER_S,
                )

        return await _all([transfer(at) for at in _batches(len(values), values_in_request(space.block_bytes))])


async def _all(calls: Sequence[Coroutine[Any, Any, bytes]]) -> list[bytes]:
    """Run calls at a time and return their results, when all have ended. If one fails or the caller is cancelled,
    those that have not begun are dropped."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    cancelled = False
    waiting = set(tasks)
    while waiting:
        try:
            ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            cancelled, ended = True, set()
        if cancelled or any(task.cancelled() or task.exception() for task in ended):
            for task in waiting:
                task.cancel()
    if cancelled:
        raise asyncio.CancelledError
    failures = [task.exception() for task in tasks if not task.cancelled() and task.exception()]
    if failures:
        raise failures[0]  # type: ignore[misc]
    return [task.result() for task in tasks]


def _batches(num_values: int, most: int) -> list[slice]:
    return [slice(at, at + most) for at in range(0, num_values, most)]


def _part(packed: bytes, values: slice, size: int) -> bytes:
    return packed[values.start * size : values.stop * size]
