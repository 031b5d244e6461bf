"""The Mooncake tier, with a real master, a real node, and its real child process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from mooncake_rig import BLOCK_BYTES, Blocks, MooncakeCluster, keys_of, mooncake_cluster, programs
from waiting import PATIENCE_S

from kvservice.mooncake import STAGED_BYTES, MooncakeOptions
from kvservice.tiers import MooncakeTier, TierError
from kvservice.tiers import mooncake as child_module
from kvservice.tiers import mooncake as tier_module


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    with mooncake_cluster(tmp_path_factory.mktemp("mooncake")) as running:
        yield running


@contextlib.asynccontextmanager
async def opened(cluster: MooncakeCluster, blocks: Blocks) -> AsyncIterator[MooncakeTier]:
    tier = MooncakeTier.open(MooncakeOptions(cluster.address), blocks.memory.fd, blocks.memory.num_bytes)
    try:
        await eventually(lambda: tier.stats().state == "open")
        yield tier
    finally:
        await tier.close()


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def child() -> int:
    """Return the process id of the child of the one tier that is open."""
    children = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in children}
    (found,) = [pid for pid, command in commands.items() if "kvservice.mooncake.serving" in command]
    return found


def test_a_value_put_by_one_is_found_by_another(cluster: MooncakeCluster) -> None:
    ours, theirs = Blocks(1), Blocks(2)
    places = (3, 1, 7)
    ours.fill(*places)

    async def work() -> None:
        async with opened(cluster, ours) as tier, opened(cluster, theirs) as other:
            space = ours.space(b"shared")
            values = ours.values(*places)
            assert await other.lookup(space, values.keys) == bytes(3)
            assert await tier.put(space, values) == b"\1\1\1"
            assert await other.lookup(space, values.keys + keys_of(99)) == b"\1\1\1\0"
            got = await other.get(space, theirs.at(10, 11, 12, keys=values.keys))
            assert got == (b"\1\1\1", values.checksums)
            assert (theirs.bytes[10:13] == ours.bytes[list(places)]).all()

    asyncio.run(work())


def test_values_that_exist_are_stored_already(cluster: MooncakeCluster) -> None:
    blocks = Blocks()
    blocks.fill(0)

    async def work() -> None:
        async with opened(cluster, blocks) as tier:
            space, values = blocks.space(b"again"), blocks.values(0)
            assert await tier.put(space, values) == b"\1"
            assert await tier.put(space, values) == b"\1"

    asyncio.run(work())


def test_spaces_do_not_share_values(cluster: MooncakeCluster) -> None:
    blocks = Blocks()
    blocks.fill(0)

    async def work() -> None:
        async with opened(cluster, blocks) as tier:
            values = blocks.values(0)
            await tier.put(blocks.space(b"one"), values)
            assert await tier.lookup(blocks.space(b"other"), values.keys) == b"\0"
            assert (await tier.get(blocks.space(b"other"), blocks.at(1, keys=values.keys))).found == b"\0"

    asyncio.run(work())


def test_removed_values_are_gone(cluster: MooncakeCluster) -> None:
    blocks = Blocks()
    blocks.fill(0, 1, 2)

    async def work() -> None:
        async with opened(cluster, blocks) as tier:
            space, values = blocks.space(b"removed"), blocks.values(0, 1, 2)
            await tier.put(space, values)
            await tier.get(space, blocks.at(5, 6, 7, keys=values.keys))  # a value that was just read goes, too
            assert await tier.remove(space, keys_of(0, 9)) == 1
            assert await tier.lookup(space, values.keys) == b"\0\1\1"
            await tier.clear(space)
            assert await tier.lookup(space, values.keys) == bytes(3)
            assert tier.stats().removed == 1

    asyncio.run(work())


@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES, STAGED_BYTES + 1])
def test_large_batches_go_in_several_requests(
    cluster: MooncakeCluster, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    blocks = Blocks(block_bytes=block_bytes)
    places = range(30)
    blocks.fill(*places)
    monkeypatch.setattr(tier_module, "values_in_request", lambda _: 4)
    monkeypatch.setattr(tier_module, "REQUEST_VALUES", 7)

    async def work() -> None:
        async with opened(cluster, blocks) as tier:
            space, values = blocks.space(b"batches"), blocks.values(*places)
            assert await tier.put(space, values) == b"\1" * 30
            assert await tier.lookup(space, values.keys) == b"\1" * 30
            got = await tier.get(space, blocks.at(*range(30, 60), keys=values.keys))
            assert got == (b"\1" * 30, values.checksums)
            assert (blocks.bytes[30:60] == blocks.bytes[:30]).all()
            assert await tier.remove(space, values.keys) == 30

    asyncio.run(work())


def test_a_value_with_a_wrong_checksum_is_a_miss(cluster: MooncakeCluster) -> None:
    blocks = Blocks()
    blocks.fill(0, 1)

    async def work() -> None:
        async with opened(cluster, blocks) as tier:
            space, values = blocks.space(b"damaged"), blocks.values(0, 1)
            blocks.bytes[0, 100] ^= 1
            assert await tier.put(space, values) == b"\1\1"
            got = await tier.get(space, blocks.at(5, 6, keys=values.keys))
            assert got == (b"\0\1", bytes(8) + values.checksums[8:])
            assert tier.stats().corrupt == 1

    asyncio.run(work())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_child_that_dies_or_hangs_is_replaced(
    cluster: MooncakeCluster, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    blocks = Blocks()
    blocks.fill(0)
    monkeypatch.setattr(child_module, "BACKOFF_MAX_S", child_module.BACKOFF_MIN_S)

    async def work() -> None:
        async with opened(cluster, blocks) as tier:
            space, values = blocks.space(b"replaced"), blocks.values(0)
            await tier.put(space, values)
            for call in (
                lambda: tier.lookup(space, values.keys),
                lambda: tier.get(space, blocks.at(5, keys=values.keys)),
                lambda: tier.put(space, values),
                lambda: tier.remove(space, keys_of(1)),
                lambda: tier.clear(blocks.space(b"another")),
            ):
                before = child()
                os.kill(before, number)
                with monkeypatch.context() as limits:
                    limits.setattr(tier_module, "CALL_S", 1.0)
                    limits.setattr(tier_module, "TRANSFER_S", 1.0)
                    with pytest.raises(TierError):
                        await call()
                assert not Path(f"/proc/{before}").exists(), "it has let go of the memory"
                await eventually(lambda: tier.stats().state == "open")
                assert child() != before
            assert (await tier.get(space, blocks.at(6, keys=values.keys))).found == b"\1"

    asyncio.run(work())


def test_a_cancelled_get_ends_when_the_child_has_let_go_of_the_memory(
    cluster: MooncakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = Blocks()
    blocks.fill(0)

    async def work() -> None:
        async with opened(cluster, blocks) as tier:
            space, values = blocks.space(b"cancelled"), blocks.values(0)
            await tier.put(space, values)
            monkeypatch.setattr(tier_module, "TRANSFER_S", 1.0)
            pid = child()
            os.kill(pid, signal.SIGSTOP)
            get = asyncio.ensure_future(tier.get(space, blocks.at(5, keys=values.keys)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            get.cancel()
            with pytest.raises(asyncio.CancelledError):
                await get
            assert not Path(f"/proc/{pid}").exists()

    asyncio.run(work())


def test_values_outlive_the_daemon_that_put_them(cluster: MooncakeCluster) -> None:
    ours, theirs = Blocks(1), Blocks(2)
    ours.fill(0)

    async def work() -> None:
        space, values = ours.space(b"outlives"), ours.values(0)
        async with opened(cluster, theirs) as other:
            async with opened(cluster, ours) as tier:
                await tier.put(space, values)
            assert (await other.get(space, theirs.at(0))).found == b"\1"
            assert (theirs.bytes[0] == ours.bytes[0]).all()

    asyncio.run(work())


@pytest.mark.slow
def test_values_of_a_killed_node_are_misses(tmp_path: Path) -> None:
    blocks = Blocks()
    blocks.fill(0)

    async def work(cluster: MooncakeCluster) -> None:
        async with opened(cluster, blocks) as tier:
            space, values = blocks.space(b"lost"), blocks.values(0)
            await tier.put(space, values)
            cluster.node.kill()
            assert (await tier.get(space, blocks.at(5, keys=values.keys))).found == b"\0"
            async with asyncio.timeout(PATIENCE_S):  # the master notices after a while that the node is gone
                while await tier.lookup(space, values.keys) != b"\0":
                    await asyncio.sleep(0.05)
            assert await tier.put(space, values) == b"\0"
            assert tier.stats().refused == 1
            await asyncio.to_thread(cluster.start_node)
            assert await tier.put(space, values) == b"\1"
            assert (await tier.get(space, blocks.at(6, keys=values.keys))).found == b"\1"

    with mooncake_cluster(tmp_path) as cluster:
        asyncio.run(work(cluster))


@pytest.mark.slow
def test_without_a_master_calls_fail_and_work_again_when_it_is_back(tmp_path: Path) -> None:
    blocks = Blocks()
    blocks.fill(0)

    async def stored(tier: MooncakeTier) -> bool:
        with contextlib.suppress(TierError):
            return await tier.put(blocks.space(b"back"), blocks.values(0)) == b"\1"
        return False

    async def work(cluster: MooncakeCluster) -> None:
        async with opened(cluster, blocks) as tier:
            space, values = blocks.space(b"back"), blocks.values(0)
            assert await stored(tier)
            cluster.master.kill()
            for call in (tier.lookup(space, values.keys), tier.get(space, blocks.at(5, keys=values.keys))):
                with pytest.raises(TierError):
                    await call
            await asyncio.to_thread(cluster.start_master)
            async with asyncio.timeout(PATIENCE_S):  # the node joins again
                while not await stored(tier):
                    await asyncio.sleep(0.05)
            assert (await tier.get(space, blocks.at(6, keys=values.keys))).found == b"\1"

    with mooncake_cluster(tmp_path) as cluster:
        asyncio.run(work(cluster))


def test_without_a_master_the_tier_is_failed_at_once() -> None:
    programs()
    blocks = Blocks()

    async def work() -> None:
        tier = MooncakeTier.open(MooncakeOptions("127.0.0.1:1"), blocks.memory.fd, blocks.memory.num_bytes)
        with pytest.raises(TierError, match="is starting"):
            await tier.lookup(blocks.space(b"x"), keys_of(0))
        assert tier.stats().state == "opening"
        await eventually(lambda: tier.stats().state == "failed")
        with pytest.raises(TierError, match=r"the master 127\.0\.0\.1:1 cannot be reached"):
            await tier.lookup(blocks.space(b"x"), keys_of(0))
        await tier.close()

    asyncio.run(work())
