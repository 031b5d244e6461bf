"""LMCache's own storage manager over a daemon's store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_pool import SMALL_POOL
from waiting import until

from kvservice.launch import Daemon

# LMCache warns about devices at import.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def rig() -> Any:
    import lmcache_rig

    return lmcache_rig


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with Daemon(**SMALL_POOL | {"store_gib": 1 / 64}) as daemon:
        yield daemon.address


def test_another_process_finds_the_chunks(rig: Any, address: str) -> None:
    with rig.cache(address, model="shared") as writer, rig.cache(address, model="shared") as reader:
        keys = [reader.key(number) for number in (1, 2, 3)]
        contents = writer.put(keys[:2], [writer.chunk(), writer.chunk()])
        assert reader.remote.batched_contains(keys) == 2
        assert [reader.remote.contains(key) for key in keys] == [True, True, False]
        assert reader.run(reader.remote.batched_async_contains("lookup", keys)) == 2
        found = reader.get(keys)
        assert len(found) == 2
        assert all(torch.equal(one, other) for one, other in zip(contents, found, strict=True))
        assert reader.remote.remove(keys[0]) is True
        assert reader.remote.batched_contains(keys) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"weights": "others"},
        {"dtype": torch.float16},
        {"chunk_size": 32},
        {"worker": (1, 2)},
        {"heads": 4},
        {"mla": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_makes_other_bytes_is_a_miss(rig: Any, address: str, change: dict[str, Any]) -> None:
    options = {"model": f"of {change}"}
    with rig.cache(address, **options) as writer, rig.cache(address, **options | change) as reader:
        writer.put([writer.key(1)], [writer.chunk()])
        assert writer.remote.contains(writer.key(1))
        assert not reader.remote.contains(reader.key(1))


def test_tags_are_part_of_the_key(rig: Any, address: str) -> None:
    with rig.cache(address, model="tags") as cache:
        cache.put([cache.key(1, a="1@b%2")], [cache.chunk()])
        assert cache.remote.contains(cache.key(1, a="1@b%2"))
        assert not cache.remote.contains(cache.key(1, a="1", b="2"))
        assert not cache.remote.contains(cache.key(1))


def test_workers_with_mla_read_what_the_first_has_stored(rig: Any, address: str) -> None:
    options = {"model": "latent", "mla": True}
    with (
        rig.cache(address, worker=(0, 2), **options) as first,
        rig.cache(address, worker=(1, 2), **options) as second,
    ):
        contents = first.put([first.key(1)], [first.chunk()])
        assert torch.equal(second.get([second.key(1)])[0], contents[0])


def test_a_part_of_a_chunk_is_not_stored(rig: Any, address: str) -> None:
    with rig.cache(address, model="parts", save_unfull_chunk=True) as cache:
        keys = [cache.key(1), cache.key(2)]
        contents = cache.put(keys, [cache.chunk(), cache.chunk(num_tokens=5)])
        found = cache.get(keys)
        assert len(found) == 1
        assert torch.equal(found[0], contents[0])


def test_without_the_daemon_nothing_is_found(rig: Any) -> None:
    with Daemon(**SMALL_POOL | {"store_gib": 1 / 64}) as daemon, rig.cache(daemon.address) as cache:
        cache.put([cache.key(1)], [cache.chunk()])
        assert cache.remote.contains(cache.key(1))
        daemon.process.kill()
        daemon.process.wait()
        until(lambda: not cache.remote.contains(cache.key(1)))
        assert cache.get([cache.key(1)]) == []
        cache.put([cache.key(2)], [cache.chunk()])


@pytest.mark.parametrize("cancelled", ["put", "get"])
def test_memory_is_kept_until_the_copy_has_ended(
    rig: Any, address: str, cancelled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache may use the memory of a cancelled call for other chunks, whose bytes would be stored under the key."""
    with rig.cache(address, model=f"cancelled {cancelled}") as cache:
        blocks, copying, go_on = cache.connector._blocks, threading.Event(), threading.Event()
        key, chunk = cache.key(1), cache.chunk()
        cache.put([key], [chunk])
        used: list[Any] = []
        name = {"put": "save", "get": "load"}[cancelled]
        copy = getattr(blocks, name)

        def slow(*args: Any) -> Any:
            copying.set()
            assert go_on.wait(60)
            return copy(*args)

        monkeypatch.setattr(blocks, name, slow)
        allocate = cache.connector._memory.allocate

        def noted(*args: Any, **options: Any) -> Any:
            used.append(allocate(*args, **options))
            return used[-1]

        monkeypatch.setattr(cache.connector._memory, "allocate", noted)
        call = cache.connector.put(key, chunk) if cancelled == "put" else cache.connector.get(key)
        future = asyncio.run_coroutine_threadsafe(call, cache.manager.loop)
        assert copying.wait(60)
        future.cancel()
        cache.run(asyncio.sleep(0))
        held = chunk if cancelled == "put" else used[0]
        before = held.get_ref_count()
        go_on.set()
        cache.connector._threads.shutdown()
        assert (before, held.get_ref_count()) == ((2, 1) if cancelled == "put" else (1, 0))


@pytest.mark.parametrize("config", [{"use_layerwise": True}, {"weights": ""}])
def test_unsupported_configurations_have_no_connector(rig: Any, address: str, config: dict[str, Any]) -> None:
    """LMCache logs the reason and goes on without the plugin."""
    with rig.cache(address, **config) as cache:
        assert cache.remote.connection is None
