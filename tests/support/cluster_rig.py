"""Clusters of small daemons: one scenario for the sync and the async face."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from both_faces import Awaitable, Face
from waiting import PATIENCE_S

from kvservice.client import AsyncCluster, Cluster, ClusterDaemon
from kvservice.launch import Daemon

BLOCK_SIZE = 4
CLUSTER_POOL: dict[str, Any] = {
    "num_layers": 1, "num_kv_heads": 1, "head_size": 32, "dtype": "float32", "block_size": BLOCK_SIZE, "num_blocks": 64,
    "watermark": 0.0, "swap_space_gib": 0.0, "session_grace_s": 0.5, "drain_timeout_s": 0.5, "store_gib": 1 / 64,
}  # fmt: skip
# The daemons of tests answer at once, or never.
QUICK: dict[str, Any] = {"probe_interval_s": 0.05, "probe_timeout_s": 5.0, "open_timeout_s": 5.0}


@contextlib.contextmanager
def daemons(count: int, **options: Any) -> Iterator[list[Daemon]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Daemon(**CLUSTER_POOL | options)) for _ in range(count)]


class AnyCluster:
    """A cluster whose methods are awaited, with either face."""

    def __init__(self, cluster: Cluster | AsyncCluster) -> None:
        self._cluster = cluster
        self.is_blocking = isinstance(cluster, Cluster)

    @asynccontextmanager
    async def session(self, token_ids: Iterable[int] = (), **options: Any) -> AsyncIterator[tuple[Any, str]]:
        """Open a session. Yields it, with methods to be awaited, and the address of its daemon."""
        if isinstance(self._cluster, Cluster):
            with self._cluster.session(token_ids, **options) as kv:
                yield Awaitable(kv), self._cluster.address_of(kv)
        else:
            async with self._cluster.session(token_ids, **options) as waiting:
                yield waiting, self._cluster.address_of(waiting)

    async def placed_at(self, token_ids: Iterable[int] = (), **options: Any) -> str:
        """Return the address of the daemon at which a session for this prompt is placed."""
        async with self.session(token_ids, **options) as (_, address):
            return address

    async def choose(self, token_ids: Iterable[int], **options: Any) -> Any:
        chosen = self._cluster.choose(token_ids, **options)
        return chosen if self.is_blocking else await chosen  # type: ignore[misc]

    @asynccontextmanager
    async def store(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        if isinstance(self._cluster, Cluster):
            with self._cluster.store(*args, **options) as store:
                yield Awaitable(store)
        else:
            async with self._cluster.store(*args, **options) as waiting:
                yield waiting

    def of(self, daemon: Daemon) -> ClusterDaemon:
        """Return what the cluster knows of a daemon."""
        (found,) = [one for one in self._cluster.daemons() if one.address == daemon.address]
        return found

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until the cluster has noticed something. Fail if it never does."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.01)


@asynccontextmanager
async def cluster_of(face: Face, running: list[Daemon], **options: Any) -> AsyncIterator[AnyCluster]:
    addresses = [daemon.address for daemon in running]
    if face == "blocking":
        with Cluster(addresses, **QUICK | options) as cluster:
            yield AnyCluster(cluster)
    else:
        async with AsyncCluster(addresses, **QUICK | options) as waiting:
            yield AnyCluster(waiting)
