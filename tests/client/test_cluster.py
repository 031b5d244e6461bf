"""Clusters of real daemons, of which one is killed, drained or frozen."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from random import Random
from typing import Any, get_args

import numpy as np
import pytest
from both_faces import Face
from cluster_rig import BLOCK_SIZE, CLUSTER_POOL, AnyCluster, cluster_of, daemons
from each_row import each_row
from waiting import PATIENCE_S

from kvservice.client import AsyncCluster, Cluster, KVClient, Sequence, Session, StoreNamespace
from kvservice.errors import (
    ConnectionLostError,
    FailedPreconditionError,
    InvalidArgumentError,
    NoDaemonError,
    QuotaExceededError,
)
from kvservice.launch import Daemon

BOTH = pytest.mark.parametrize("face", get_args(Face))
# For tests that start daemons of their own.
ONE_OF_BOTH = pytest.mark.parametrize("face", ["blocking", pytest.param("asyncio", marks=pytest.mark.slow)])
NAMESPACE = StoreNamespace("model", block_bytes=4096, weights="w", dtype="float32", layout="l")


@pytest.fixture(scope="module")
def shared() -> Iterator[list[Daemon]]:
    """Three daemons that no test stops."""
    with daemons(3) as running:
        yield running


@pytest.fixture(autouse=True)
def _empty(shared: list[Daemon]) -> None:
    for daemon in shared:
        with KVClient(daemon.address) as client, client.session() as kv:
            kv.reset_prefix_cache()


def write(kv: Session, token_ids: list[int], **options: Any) -> Sequence:
    """Allocate a prompt and write its K/V."""
    sequence = kv.allocate(token_ids, **options)
    step = kv.open_step([sequence])
    step.write(*(np.ones((kv.info.num_layers, step.num_tokens, 1, 32), np.float32),) * 2)
    return sequence


def fill(daemon: Daemon, token_ids: list[int], **options: Any) -> None:
    """Put a prompt into the prefix cache of a daemon."""
    with KVClient(daemon.address) as client, client.session() as kv:
        write(kv, token_ids, **options)


async def known(cluster: AnyCluster, running: list[Daemon], num_blocks: int) -> None:
    """Wait until the cluster knows so many cached blocks of all daemons."""
    await cluster.until(lambda: sum(cluster.of(daemon).known_blocks for daemon in running) == num_blocks)


async def found(cluster: AnyCluster, token_ids: list[int], num_cached_tokens: int, **options: Any) -> None:
    """Wait until the cluster finds so many cached tokens of a prompt. The daemons' earlier events come first."""
    async with asyncio.timeout(PATIENCE_S):
        while (await cluster.choose(token_ids, **options)).num_cached_tokens != num_cached_tokens:
            await asyncio.sleep(0.01)


@BOTH
def test_a_prompt_is_placed_where_its_prefix_is(face: Face, shared: list[Daemon]) -> None:
    async def run() -> None:
        async with cluster_of(face, shared) as cluster:
            for number, daemon in enumerate(shared):
                fill(daemon, [number] * 40)
            for number in range(3):
                await found(cluster, [number] * 41, 40)
            for number, daemon in enumerate(shared):
                prompt = [*[number] * 40, 7, 7, 7]
                assert (await cluster.choose(prompt))[::2] == (daemon.address, 40)
                async with cluster.session(prompt, name="engine") as (kv, address):
                    assert address == daemon.address
                    assert cluster.of(daemon).sessions == 1
                    assert (await kv.allocate(prompt)).num_cached_tokens == 40
                assert cluster.of(daemon).sessions == 0

    asyncio.run(run())


@BOTH
def test_extra_keys_keep_prompts_apart(face: Face, shared: list[Daemon]) -> None:
    async def run() -> None:
        prompt, keys = [5] * 40, [(0, b"image")]
        fill(shared[1], prompt, extra_keys=keys)
        async with cluster_of(face, shared) as cluster:
            await found(cluster, prompt, 40, extra_keys=keys)
            assert (await cluster.choose(prompt)).num_cached_tokens == 0

    asyncio.run(run())


@BOTH
def test_what_was_cached_before_the_cluster_came_is_known(face: Face, shared: list[Daemon]) -> None:
    async def run() -> None:
        fill(shared[2], [9] * 20)
        async with cluster_of(face, shared) as cluster:
            await found(cluster, [9] * 21, 20)
            assert await cluster.placed_at([9] * 21) == shared[2].address
            with KVClient(shared[2].address) as client, client.session() as kv:
                kv.reset_prefix_cache()
            await known(cluster, shared, 0)

    asyncio.run(run())


@ONE_OF_BOTH
def test_a_killed_daemon_is_left_out(face: Face) -> None:
    async def run() -> None:
        with daemons(2) as running:
            gone, left = running
            async with cluster_of(face, running, wait_s=1.0) as cluster:
                fill(gone, [1] * 40)
                await known(cluster, running, 10)
                gone.process.kill()
                gone.process.wait()
                assert await cluster.placed_at([1] * 40) == left.address
                assert not cluster.of(gone).is_up
                assert cluster.of(gone).reason
                left.process.kill()
                left.process.wait()
                with pytest.raises(NoDaemonError, match=gone.address.removeprefix("unix://")) as caught:
                    async with cluster.session([1] * 40):
                        pass
                assert left.address in str(caught.value)

        with pytest.raises(NoDaemonError):
            async with cluster_of(face, running, connect_timeout_s=0.05):
                pass

    asyncio.run(run())


@ONE_OF_BOTH
def test_a_draining_daemon_gets_no_sessions(face: Face) -> None:
    async def run() -> None:
        with daemons(2, num_layers=2, drain_timeout_s=100.0, drain_stall_s=100.0) as running:
            busy = running[0]
            fill(busy, [1] * 40)
            with KVClient(busy.address) as client, client.session() as kv:
                async with cluster_of(face, running) as cluster:
                    await known(cluster, running, 10)
                    step, layer = kv.open_step([kv.allocate([2, 3])]), np.ones((2, 1, 32), np.float32)
                    step.extend(0, layer, layer, layer)
                    busy.process.send_signal(signal.SIGTERM)  # the daemon waits for the other layer
                    await cluster.until(lambda: not cluster.of(busy).is_up)
                    assert "shutting down" in cluster.of(busy).reason
                    assert await cluster.placed_at([1] * 40) == running[1].address
                    step.extend(1, layer, layer, layer)

    asyncio.run(run())


@ONE_OF_BOTH
def test_a_frozen_daemon_is_left_out_and_used_again(face: Face) -> None:
    async def run() -> None:
        with daemons(2) as running:
            frozen, left = running
            async with cluster_of(face, running, probe_timeout_s=0.5, open_timeout_s=0.5) as cluster:
                fill(frozen, [1] * 40)
                await known(cluster, running, 10)
                os.kill(frozen.process.pid, signal.SIGSTOP)
                try:
                    assert await cluster.placed_at([1] * 40) == left.address
                    await cluster.until(lambda: not cluster.of(frozen).is_up)
                finally:
                    os.kill(frozen.process.pid, signal.SIGCONT)
                await cluster.until(lambda: cluster.of(frozen).is_up)
                async with cluster.session([1] * 40) as (kv, address):
                    assert address == frozen.address
                    assert (await kv.allocate([1] * 41)).num_cached_tokens == 40

    asyncio.run(run())


@ONE_OF_BOTH
def test_a_cluster_closes_while_a_daemon_is_frozen(face: Face) -> None:
    """Otherwise it waits for the daemon, and the test times out."""

    async def run() -> None:
        with daemons(1) as running:
            async with cluster_of(face, running, probe_timeout_s=0.5) as cluster:
                await cluster.choose([1] * 8)
                os.kill(running[0].process.pid, signal.SIGSTOP)
            os.kill(running[0].process.pid, signal.SIGCONT)

    asyncio.run(run())


@ONE_OF_BOTH
def test_a_daemon_that_restarts_is_found_again_and_corrected(face: Face) -> None:
    """It begins empty, at the same address: what the cluster knew of it is refuted by MatchPrefix."""

    async def run() -> None:
        with daemons(2) as running:
            first = running[0]
            fill(first, [1] * 40)
            async with cluster_of(face, running) as cluster:
                await known(cluster, running, 10)
                assert await cluster.placed_at([1] * 40) == first.address
                first.stop()
                await cluster.until(lambda: not cluster.of(first).is_up)
                with Daemon(**CLUSTER_POOL, unix_socket=first.address.removeprefix("unix://")) as again:
                    assert again.address == first.address
                    await cluster.until(lambda: cluster.of(first).is_up)
                    assert (await cluster.choose([1] * 40)).num_cached_tokens == 0
                    assert cluster.of(first).known_blocks == 0
                    fill(again, [2] * 40)
                    await known(cluster, running, 10)
                    assert await cluster.placed_at([2] * 40) == first.address

    asyncio.run(run())


@ONE_OF_BOTH
def test_lost_events_are_made_up_for_by_asking(face: Face) -> None:
    """The window of events is two blocks. The cluster comes later, and is told only the last two blocks of a chain.
    There is no store, whose events would fill the window."""

    async def run() -> None:
        with daemons(2, event_window=2, store_gib=0.0) as running:
            for length in (16, 32, 40):
                fill(running[1], [3] * length)
            async with cluster_of(face, running) as cluster:
                await known(cluster, running, 2)
                assert (await cluster.choose([3] * 44))[::2] == (running[1].address, 40)
                await known(cluster, running, 10)

    asyncio.run(run())


@ONE_OF_BOTH
def test_daemons_without_events_are_placed_by_load(face: Face) -> None:
    async def run() -> None:
        with daemons(2, event_window=0) as running:
            async with cluster_of(face, running) as cluster:
                placed = set()
                async with cluster.session([1] * 40) as (_, one), cluster.session([2] * 40) as (_, other):
                    placed = {one, other}
                assert placed == {daemon.address for daemon in running}
                await cluster.until(lambda: "event_window" in cluster.of(running[0]).events)

    asyncio.run(run())


@ONE_OF_BOTH
def test_a_daemon_without_room_for_sessions_is_passed_over(face: Face) -> None:
    async def run() -> None:
        with daemons(2, max_sessions=1) as running, KVClient(running[0].address) as client, client.session():
            async with cluster_of(face, running) as cluster, cluster.session([1] * 40) as (_, address):
                assert address == running[1].address
                with pytest.raises(QuotaExceededError, match="max_sessions"):
                    async with cluster.session([1] * 40):
                        pass

    asyncio.run(run())


@ONE_OF_BOTH
def test_a_daemon_of_another_shape_is_left_out(face: Face, shared: list[Daemon]) -> None:
    async def run() -> None:
        with daemons(1, block_size=2 * BLOCK_SIZE) as (other,):
            async with cluster_of(face, [*shared, other]) as cluster:
                await cluster.until(lambda: any("block_size is" in cluster.of(one).reason for one in [*shared, other]))
                assert any(cluster.of(one).is_up for one in [*shared, other])

    asyncio.run(run())


@BOTH
def test_a_key_has_its_store(face: Face, shared: list[Daemon]) -> None:
    async def run() -> None:
        async with cluster_of(face, shared) as cluster:
            for key in (b"a", b"b", b"c"):
                async with cluster.store(NAMESPACE, key) as store:
                    await store.put([key * 32], np.full((1, 4096), key[0], np.uint8))
            for key in (b"a", b"b", b"c"):
                async with cluster.store(NAMESPACE, key) as store:
                    assert (await store.lookup([key * 32])).num_leading == 1

    asyncio.run(run())


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "addresses"),
    ("unix:a", {}, "addresses"),
    (["unix:a", "unix:a"], {}, "addresses"),
    ([f"unix:{n}" for n in range(257)], {}, "addresses"),
    ([7], {}, "addresses"),
    ([["unix:a"]], {}, "addresses"),
    (None, {}, "addresses"),
    (5, {}, "addresses"),
    (["unix:a"], {"placement": 5}, "placement"),
    (["unix:a"], {"probe_interval_s": 0}, "probe_interval_s"),
    (["unix:a"], {"probe_timeout_s": -1}, "probe_timeout_s"),
    (["unix:a"], {"open_timeout_s": 2e9}, "open_timeout_s"),
    (["unix:a"], {"wait_s": float("nan")}, "wait_s"),
    (["unix:a"], {"connect_timeout_s": "soon"}, "connect_timeout_s"),
    (["unix:a"], {"timeout_s": 0}, "timeout_s"),
]


def test_wrong_arguments_are_refused() -> None:
    kinds: list[Any] = [Cluster, AsyncCluster]
    with each_row() as row:
        for kind in kinds:
            for addresses, options, field in WRONG:
                with row((kind.__name__, repr(addresses)[:40], options)):
                    with pytest.raises(InvalidArgumentError) as caught:
                        kind(addresses, **options)
                    assert caught.value.field == field


def test_wrong_prompts_are_refused(shared: list[Daemon]) -> None:
    square = np.ones((2, 2), np.int32)
    wrong: list[Any] = [[-1], [2**31], [1.5], ["a"], [2**70], square, list(square), [[1], [2, 3]]]
    with Cluster([shared[0].address]) as cluster, each_row() as row:
        for tokens in wrong:
            with row(tokens), pytest.raises(InvalidArgumentError, match="token_ids"):
                cluster.choose(tokens)
        for position in (-1, 1.5):
            with row(position), pytest.raises(InvalidArgumentError, match="extra_keys"):
                cluster.choose([1], extra_keys=[(position, b"key")])  # type: ignore[list-item]


@BOTH
def test_a_closed_cluster_says_so(face: Face, shared: list[Daemon]) -> None:
    async def run() -> None:
        async with cluster_of(face, shared) as cluster:
            pass
        with pytest.raises(ConnectionLostError, match="the cluster is closed"):
            await cluster.choose([1])

    asyncio.run(run())


def test_hashes_are_the_daemons(shared: list[Daemon]) -> None:
    """The cluster finds every full block of random prompts with extra keys that a daemon has, and knows it without
    asking."""

    async def run() -> None:
        random = Random(0)
        prompts = []
        for _ in range(12):
            tokens = [random.randrange(2**31) for _ in range(random.randint(BLOCK_SIZE, 5 * BLOCK_SIZE))]
            keys = [(random.randrange(len(tokens)), random.randbytes(random.randint(1, 9))) for _ in range(3)]
            prompts.append((tokens, keys))
            fill(shared[1], tokens, extra_keys=keys)
        num_blocks = sum(len(tokens) // BLOCK_SIZE for tokens, _ in prompts)
        assert num_blocks < CLUSTER_POOL["num_blocks"], "none is evicted"
        async with cluster_of("blocking", shared) as cluster:
            await known(cluster, shared, num_blocks)
            for tokens, keys in prompts:
                chosen = await cluster.choose([*tokens, 1], extra_keys=keys)
                full = len(tokens) // BLOCK_SIZE * BLOCK_SIZE
                assert chosen[::2] == (shared[1].address, full), (tokens, keys)

    asyncio.run(run())


def test_an_address_that_is_not_the_clusters_is_refused(shared: list[Daemon]) -> None:
    with Cluster([shared[0].address]) as cluster:
        assert cluster.client(shared[0].address).info.block_size == BLOCK_SIZE
        with pytest.raises(InvalidArgumentError, match="address"):
            cluster.client("unix:elsewhere")


def test_an_async_cluster_has_to_be_entered() -> None:
    with pytest.raises(FailedPreconditionError, match="async with"):
        AsyncCluster(["unix:a"]).daemons()
