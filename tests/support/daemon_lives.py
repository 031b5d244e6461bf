"""The state and the calls of a daemon, whose process the test ends at any point, without its server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from kept_files import HeldFiles
from small_pool import SMALL_POOL

from kvservice.auth import CALLER, Identity
from kvservice.config import ServeConfig
from kvservice.errors import KVServiceError
from kvservice.kept import KeptFiles
from kvservice.server.daemon import KVServer
from kvservice.v1 import blocks_pb2

Array = npt.NDArray[np.float32]
SHAPE = (SMALL_POOL["num_layers"], SMALL_POOL["num_kv_heads"], SMALL_POOL["head_size"])


def end_stream(_: KVServiceError) -> None:
    """Stands for the stream that holds a session."""


class Life:
    """One process of the daemon, from its start until `kill`, or `end` in order. `held` are the descriptors that
    outlive it; None: nothing does."""

    def __init__(
        self,
        held: HeldFiles | None = None,
        clock: Any = None,
        *,
        wall: Callable[[], float] = time.time,
        **options: Any,
    ) -> None:
        self.config = ServeConfig(**SMALL_POOL | options)
        files = KeptFiles({}, None) if held is None else held.start()
        server = KVServer(self.config, files, clock=clock, wall=wall)
        self.core, self.dispatcher, self.pool_tier = server.core, server.dispatcher, server.pool_tier
        self.manager, self.sessions, self.events = server.engine.manager, server.sessions, server.events
        self.core.kept.ready()

    def kill(self) -> None:
        """Leave the state as it is. The threads end in order, because they are in the test's process."""
        self.core.saved.close()
        self.core.device.close()

    def end(self) -> None:
        """End in order, for a process that takes over."""
        self.core.close()
        self.manager.save_steps()
        self.core.kept.mark_clean()

    def open(self, name: str = "engine", *, attached: bool = True, **options: Any) -> Any:
        values: dict[str, Any] = {"tenant": "", "detachable": False, "detach_ttl_s": 0.0} | options
        session = self.sessions.open(name, **values)
        if attached:
            self.attach(session.token)
        return session

    def attach(self, token: bytes, holder: int = 1, *, reconnects: bool = False) -> Any:
        return self.sessions.attach(token, holder, reconnects, end_stream)

    async def call(self, session: Any, method: str, request: Any) -> Any:
        return await self.dispatcher.call(method, request, session, "stream", local=True)

    async def allocate(self, session: Any, sequence_id: int, tokens: list[int], request_id: int = 0) -> Any:
        one = blocks_pb2.SequenceAllocation(sequence_id=sequence_id, token_ids=tokens)
        return await self.call(session, "allocate", blocks_pb2.AllocateRequest(request_id=request_id, sequences=[one]))

    async def compute(self, session: Any, sequence_id: int, tokens: list[int], seed: int = 0) -> Array:
        """Allocate a sequence and write K/V for all its tokens. Returns K/V as `write` does."""
        await self.allocate(session, sequence_id, tokens)
        step = await self.call(session, "open_step", blocks_pb2.OpenStepRequest(sequence_ids=[sequence_id]))
        return await self.write(session, step.step_id, len(tokens), seed)

    async def write(self, session: Any, step_id: int, num_tokens: int, seed: int = 0) -> Array:
        """Write all layers of a step. Returns K/V, float32[2, layers, tokens, heads, head size]."""
        layers, heads, size = SHAPE
        kv = np.random.default_rng(seed).normal(size=(2, layers, num_tokens, heads, size)).astype(np.float32)
        await self.core.engine.write(session.namespace, step_id, None, kv[0], kv[1])
        return kv

    async def read(self, session: Any, sequence_id: int, num_tokens: int) -> Array:
        """Return K/V of the first tokens of a sequence, as `write` does."""
        keys, values = await self.core.engine.read(session.namespace, [(sequence_id, 0, num_tokens)], None)
        return cast(Array, np.stack([keys, values]))


def finish(slices: Any) -> Any:
    """Run an operation in slices without a pause. Returns its result."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value


@contextlib.contextmanager
def caller(name: str) -> Iterator[None]:
    """Make calls as this caller."""
    token = CALLER.set(Identity(name))
    try:
        yield
    finally:
        CALLER.reset(token)
