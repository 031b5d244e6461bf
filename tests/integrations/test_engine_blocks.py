"""The code that the connectors of SGLang and LMCache share, and their parts that need no engine."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import waiting
from fake_store import FakeStore
from small_pool import SMALL_POOL
from store_memory import zero_values
from vllm_connector import stores_of

from kvservice.client import StoreNamespace
from kvservice.client.store import memory as memory_module
from kvservice.client.store.values import SharedUses
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.common import ConnectorOptions, EngineBlocks, digest_key, hexadecimal_key
from kvservice.integrations.lmcache.checks import check_supported, chunk_namespace, plugin_options
from kvservice.integrations.sglang.pages import HostPages, page_namespace, weights_identity
from kvservice.launch import Daemon

PIECES = (64, 192)
BLOCK_BYTES = sum(PIECES)
KEYS = [bytes([n]) * 32 for n in range(6)]
# More blocks than the store of these tests has.
MANY = 1 << 20


@pytest.fixture(scope="module")
def store() -> Iterator[Daemon]:
    with Daemon(**SMALL_POOL | {"store_gib": 1 / 64}) as daemon:
        yield daemon


@pytest.fixture
def blocks(store: Daemon, request: pytest.FixtureRequest) -> Iterator[EngineBlocks]:
    opened = EngineBlocks(ConnectorOptions(store.address), StoreNamespace(request.node.name, BLOCK_BYTES), "test", 16)
    yield opened
    opened.close()


class Memory:
    """Blocks whose first pieces lie in one array and whose second pieces in another."""

    def __init__(self, count: int) -> None:
        self.arrays = [np.random.default_rng(p).integers(0, 256, (count, PIECES[p]), np.uint8) for p in range(2)]

    def addresses(self, *numbers: int) -> Any:
        starts = [array.ctypes.data + np.array(numbers) * array.shape[1] for array in self.arrays]
        return np.stack(starts, axis=1).astype(np.int64)

    def block(self, number: int) -> bytes:
        return b"".join(array[number].tobytes() for array in self.arrays)


def test_blocks_are_copied_between_scattered_places(blocks: EngineBlocks) -> None:
    memory = Memory(6)
    expected = [memory.block(n) for n in range(6)]
    assert blocks.save(KEYS[:3], memory.addresses(4, 0, 2), PIECES).all()
    assert blocks.num_leading(KEYS) == 3
    found = blocks.load(KEYS[:4], memory.addresses(5, 1, 3, 0), PIECES)
    assert found.tolist() == [True, True, True, False]
    assert [memory.block(n) for n in (5, 1, 3)] == [expected[n] for n in (4, 0, 2)]
    assert memory.block(2) == expected[2]


def test_the_first_value_of_a_key_stays(blocks: EngineBlocks) -> None:
    memory = Memory(2)
    first = memory.block(0)
    assert blocks.save(KEYS[:1], memory.addresses(0), PIECES).all()
    assert blocks.save(KEYS[:2], memory.addresses(1, 1), PIECES).tolist() == [True, True]
    assert blocks.load(KEYS[:1], memory.addresses(1), PIECES).all()
    assert memory.block(1) == first


def mapped_bytes(address: int) -> int:
    """Return how many bytes of the mapping at this address are in the page tables of this process."""
    parts = re.split(r"^([0-9a-f]+)-[0-9a-f]+ ", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    (text,) = (text for start, text in zip(parts[1::2], parts[2::2], strict=True) if int(start, 16) == address)
    found = re.search(r"^Rss: +(\d+) kB$", text, flags=re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def test_all_memory_is_mapped_before_blocks_are_copied(blocks: EngineBlocks) -> None:
    waiting.until(lambda: blocks._store.memory)
    memory = blocks._store.memory
    assert memory is not None
    assert memory.writable
    waiting.until(lambda: mapped_bytes(memory.address) == memory.num_bytes)


def test_mapped_blocks_are_found_and_loaded_without_a_call(
    blocks: EngineBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon hears of it later. For what the memory does not show when a block is loaded, it is asked."""
    monkeypatch.setattr(memory_module, "LOOKED_AT", MANY)
    waiting.until(lambda: blocks._store.memory)
    mapped = blocks._store.memory
    assert mapped is not None
    memory, touched, reported = Memory(6), list[bytes](), SharedUses()
    expected = [memory.block(n) for n in range(6)]

    def touch(keys: bytes, *, uses: SharedUses) -> None:
        touched.append(keys)
        reported.hits += uses.hits
        reported.misses += uses.misses
        reported.read += uses.read
        reported.missing += uses.missing

    assert blocks.save(KEYS[:3], memory.addresses(0, 1, 2), PIECES).all()
    waiting.until(lambda: np.all(mapped.find(b"".join(KEYS[:3]))))
    monkeypatch.setattr(blocks._store, "touch", touch)
    with monkeypatch.context() as patched:
        for name in ("lookup", "get", "put"):
            patched.setattr(blocks._store, name, None)
        assert blocks.num_leading(KEYS[:3]) == 3
        assert blocks.num_leading(KEYS[:2], counted=False) == 2
        assert blocks.num_leading([*KEYS[1:3], KEYS[5], KEYS[0]]) == 2
        assert blocks.num_leading(KEYS[4:]) == 0
        assert blocks.load(KEYS[:3], memory.addresses(3, 4, 5), PIECES).all()
        assert blocks.save(KEYS[:3], memory.addresses(0, 1, 2), PIECES).all()
    assert [memory.block(n) for n in (3, 4, 5)] == expected[:3]
    assert blocks.load(KEYS[:4], memory.addresses(5, 4, 3, 0), PIECES).tolist() == [True, True, True, False]
    assert [memory.block(n) for n in (5, 4, 3)] == expected[:3]
    waiting.until(lambda: (reported.hits, reported.misses, reported.read) == (5, 4, 6))
    assert reported.missing == [KEYS[5], KEYS[4]]
    assert touched[-1][: 3 * 32] == b"".join(KEYS[:3])


def test_a_store_of_more_blocks_than_a_look_sees_is_asked_for_the_missing_ones(
    blocks: EngineBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting.until(lambda: blocks._store.memory)
    lookup, asked = blocks._store.lookup, list[int]()

    def count(keys: Any, **options: Any) -> Any:
        asked.append(len(keys) // 32)
        return lookup(keys, **options)

    monkeypatch.setattr(blocks._store, "lookup", count)
    for most, expected in ((MANY, []), (1, [len(KEYS)])):
        monkeypatch.setattr(memory_module, "LOOKED_AT", most)
        assert blocks.num_leading(KEYS) == 0
        assert asked == expected


@contextlib.contextmanager
def over(store: FakeStore, block_bytes: int = BLOCK_BYTES, **options: Any) -> Iterator[EngineBlocks]:
    """Open blocks of 16 tokens over a store in this process."""
    namespace = StoreNamespace("fake", block_bytes)
    with stores_of(lambda _: store):
        opened = EngineBlocks(ConnectorOptions("unix:///none", **options), namespace, "test", 16)
    with contextlib.closing(opened):
        yield opened


def test_what_is_removed_is_missing(blocks: EngineBlocks) -> None:
    memory = Memory(6)
    assert blocks.save(KEYS, memory.addresses(*range(6)), PIECES).all()
    assert blocks.remove(KEYS[1:2]) == 1
    assert blocks.num_leading(KEYS) == 1
    assert blocks.clear() is True
    assert blocks.num_leading(KEYS[2:]) == 0


def test_a_loss_in_the_middle_ends_the_load() -> None:
    """Two blocks of 6 MiB fit a call, unless memory is mapped: then all do, for reading here."""
    size, store = 6 << 20, FakeStore()
    store.is_mapped = False
    memory = np.zeros((6, size), np.uint8)
    addresses = (memory.ctypes.data + np.arange(6)[:, None] * size).astype(np.int64)
    with over(store, size) as blocks:
        assert blocks.save(KEYS, addresses, (size,)).all()
        del store.values[KEYS[1]]
        assert blocks.load(KEYS, addresses, (size,)).tolist() == [True] + [False] * 5
        assert [store.calls.count(name) for name in ("put", "get")] == [3, 1]
        store.is_mapped = True
        assert blocks.load(KEYS, addresses, (size,)).tolist() == [True, False, True, True, True, True]
        assert blocks.save(KEYS, addresses, (size,)).all()
        assert [store.calls.count(name) for name in ("put", "get")] == [4, 2]
        assert blocks.load(KEYS, addresses, (size,)).all()
        assert store.memory is not None
        store.memory.writable = True
        store.values.clear()
        assert blocks.save(KEYS, addresses, (size,)).all()
        assert [store.calls.count(name) for name in ("put", "get")] == [5, 3]


def test_damaged_blocks_are_missing_if_loads_are_verified(store: Daemon) -> None:
    for verify in (False, True):
        options = ConnectorOptions(store.address, verify=verify)
        namespace = StoreNamespace(f"damaged {verify}", BLOCK_BYTES)
        with contextlib.closing(EngineBlocks(options, namespace, "test", 16)) as blocks:
            memory = Memory(1)
            assert blocks.save(KEYS[:1], memory.addresses(0), PIECES).all()
            assert zero_values(store.process.pid) > 0
            assert blocks.load(KEYS[:1], memory.addresses(0), PIECES).tolist() == [not verify]


def test_blocks_below_memory_are_found_if_they_come_sooner_than_computed() -> None:
    """The tier of the fake store takes a second for a block."""
    for block_s, found in ((0.9, 0), (1.5, 4)):
        store, memory = FakeStore(), Memory(4)
        store.below = dict.fromkeys(KEYS[:4], bytes(BLOCK_BYTES))
        with over(store, prefill_tokens_per_s=16 / block_s) as blocks:
            assert blocks.num_leading(KEYS) == found, block_s
            assert blocks.load(KEYS[:found], memory.addresses(*range(4))[:found], PIECES).all()
        assert list(store.values) == KEYS[:found]


def test_a_load_waits_for_blocks_as_long_as_computing_takes() -> None:
    """No wait is longer than 10 s."""
    for block_s, count, found in ((0.6, 6, 3), (4.0, 12, 9)):
        keys, store, memory = [bytes([n]) * 32 for n in range(count)], FakeStore(), Memory(count)
        store.below = dict.fromkeys(keys, bytes(BLOCK_BYTES))
        with over(store, prefill_tokens_per_s=16 / block_s) as blocks:
            right = blocks.load(keys, memory.addresses(*range(count)), PIECES)
        assert right.tolist() == [True] * found + [False] * (count - found), block_s


def test_without_a_speed_the_engine_is_taken_for_a_fast_one() -> None:
    """It computes 50,000 tokens in a second, or 4 GB of K/V if that takes longer."""
    for block_bytes, block_s in ((BLOCK_BYTES, 16 / 50_000), (8_000_000, 0.002)):
        store = FakeStore()
        with over(store, block_bytes) as blocks:
            blocks.num_leading(KEYS[:3])
        assert store.waits_s == [pytest.approx(3 * block_s)], block_bytes


def test_without_a_daemon_nothing_is_found(tmp_path: Path) -> None:
    blocks = EngineBlocks(
        ConnectorOptions(f"unix://{tmp_path}/none.sock"), StoreNamespace("away", BLOCK_BYTES), "test", 16
    )
    memory = Memory(1)
    assert blocks.num_leading(KEYS) == 0
    assert not blocks.load(KEYS[:1], memory.addresses(0), PIECES).any()
    assert not blocks.save(KEYS[:1], memory.addresses(0), PIECES).any()
    assert (blocks.remove(KEYS), blocks.clear()) == (0, False)
    blocks.close()


def test_keys() -> None:
    name = hashlib.sha256(b"page").hexdigest()
    assert hexadecimal_key("sglang", name) == bytes.fromhex(name)
    others = {
        hexadecimal_key("sglang", key) for key in (name.upper(), f"{name}.mamba", name[:-2], "page", f" {name[1:]}")
    }
    assert len(others) == 5
    assert bytes.fromhex(name) not in others
    assert digest_key("lmcache", "ab", "c") != digest_key("lmcache", "a", "bc")
    assert digest_key("lmcache", "a") != digest_key("sglang", "a")


# ---- SGLang


class Pool:
    """A pool of SGLang in the layout `page_first`, as its interface has it."""

    layer_num, layout, page_size, size_per_token = 2, "page_first", 4, 32

    def __init__(self) -> None:
        self.kv_buffer = torch.zeros(8, 4, 32, dtype=torch.uint8)

    def get_size_per_token(self) -> int:
        return self.size_per_token

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        starts = [self.kv_buffer.data_ptr() + 16 * int(index) for index in indices[:: self.page_size]]
        return [start + half for start in starts for half in (0, 512)], [64] * (2 * len(starts))


CONFIG = SimpleNamespace(
    model_name="model", is_mla_model=False, tp_rank=1, tp_size=2, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1
)


def test_pages_of_a_host_pool() -> None:
    pool = Pool()
    pages = HostPages(pool)
    assert (pages.piece_bytes, pages.page_bytes) == ((64, 64), 128)
    addresses = pages.addresses(2, torch.tensor([8, 9, 10, 11, 0, 1, 2, 3]))
    first = pool.kv_buffer.data_ptr()
    assert addresses.tolist() == [[first + 128, first + 640], [first, first + 512]]


def test_pools_without_whole_pages_are_refused() -> None:
    changes: list[dict[str, Any]] = [{"kv_buffer": None}, {"size_per_token": 33}]
    for change in changes:
        pool = Pool()
        vars(pool).update(change)
        with pytest.raises(InvalidArgumentError):
            HostPages(pool)


def test_the_namespace_of_pages() -> None:
    namespace = page_namespace(CONFIG, HostPages(Pool()), "w", torch.bfloat16, "1")
    assert (namespace.block_bytes, namespace.tp_rank, namespace.tp_size) == (128, 1, 2)
    namespace.message()
    mla = SimpleNamespace(**vars(CONFIG) | {"is_mla_model": True})
    shared = page_namespace(mla, HostPages(Pool()), "w", torch.bfloat16, "1")
    assert (shared.tp_rank, shared.tp_size) == (0, 1)
    assert shared.layout != namespace.layout
    context = SimpleNamespace(**vars(CONFIG) | {"attn_cp_size": 2})
    assert page_namespace(context, HostPages(Pool()), "w", torch.bfloat16, "1").layout != namespace.layout
    pool = Pool()
    pool.layout = "layer_first"
    assert page_namespace(CONFIG, HostPages(pool), "w", torch.bfloat16, "1") == replace(
        namespace, layout=namespace.layout.replace("page_first", "layer_first")
    )


def test_weights_of_sglang(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    arguments = SimpleNamespace(model_path=str(tmp_path), revision=None, load_format="auto", random_seed=1)
    found = [weights_identity(arguments, "")]
    assert weights_identity(arguments, "") == found[0]
    for change in (
        {"quantization": "fp8"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"load_format": "dummy"},
        {"load_format": "dummy", "random_seed": 2},
        {"model_path": "org/name", "revision": "main"},
    ):
        found.append(weights_identity(SimpleNamespace(**vars(arguments) | change), ""))
    found += [weights_identity(arguments, "mine"), weights_identity(None, "mine")]
    assert len(set(found)) == len(found)
    for unknown in (None, SimpleNamespace(**vars(arguments) | {"model_path": "org/name"})):
        with pytest.raises(InvalidArgumentError, match="weights"):
            weights_identity(unknown, "")


# ---- LMCache

SUPPORTED = SimpleNamespace(
    use_layerwise=False, enable_blending=False, remote_serde="naive", pre_caching_hash_algorithm="sha256_cbor"
)
METADATA = SimpleNamespace(
    model_name="model", kv_dtype=torch.bfloat16, kv_shape=(2, 2, 16, 2, 8), use_mla=False, worker_id=1, world_size=2
)


def test_values_that_are_not_full_chunks_are_refused() -> None:
    check_supported(SUPPORTED)
    changes: dict[str, Any] = {"use_layerwise": True, "enable_blending": True, "remote_serde": "cachegen"}
    for name, value in changes.items():
        with pytest.raises(InvalidArgumentError) as caught:
            check_supported(SimpleNamespace(**vars(SUPPORTED) | {name: value}))
        assert caught.value.field == name


def test_options_of_a_plugin() -> None:
    given = {
        "remote_storage_plugin.kvservice.module_path": "kvservice.integrations.lmcache",
        "remote_storage_plugin.kvservice.address": "unix:///a",
        "remote_storage_plugin.kvservice.second.address": "unix:///b",
        "save_chunk_meta": False,
    }
    assert plugin_options("kvservice.second", given).address == "unix:///b"
    del given["remote_storage_plugin.kvservice.second.address"]
    assert plugin_options("kvservice", given).address == "unix:///a"
    with pytest.raises(InvalidArgumentError, match="adress"):
        plugin_options("kvservice", given | {"remote_storage_plugin.kvservice.adress": "unix:///a"})
    with pytest.raises(InvalidArgumentError, match="address"):
        plugin_options("kvservice", None)


def test_the_namespace_of_chunks(tmp_path: Path) -> None:
    options = ConnectorOptions("unix:///a", weights="w")
    found = chunk_namespace(SUPPORTED, METADATA, options, "layout", 64)
    found.message()
    assert (found.block_bytes, found.tp_rank, found.tp_size) == (64, 1, 2)
    namespaces = {found}
    for change in ({"use_mla": True}, {"kv_shape": (2, 2, 16, 4, 4)}, {"kv_dtype": torch.float16}, {"worker_id": 0},
                   {"model_name": str(tmp_path)}):  # fmt: skip
        namespaces.add(chunk_namespace(SUPPORTED, SimpleNamespace(**vars(METADATA) | change), options, "layout", 64))
    assert len(namespaces) == 6
    for unknown in ({}, {"model_name": str(tmp_path), "kv_dtype": torch.uint8}):
        with pytest.raises(InvalidArgumentError, match="weights"):
            chunk_namespace(
                SUPPORTED, SimpleNamespace(**vars(METADATA) | unknown), ConnectorOptions("unix:///a"), "layout", 64
            )
