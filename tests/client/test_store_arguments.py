"""Arguments of the block store's client that are refused, with the name of the argument, before anything is sent; and
answers of the daemon that cannot be right."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from client_calls import changed_calls, failing_calls, seen_calls
from each_row import each_row
from store_daemons import BLOCK_BYTES, OpenStore, blocks_of, keys_of, new_namespace

from kvservice.client import AsyncKVClient, KVClient, PutStatus, Scatter, Store, StoreNamespace
from kvservice.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    RegionsNotAllowedError,
)

NOBODY = "unix:///nobody/is/there"
# Blocks of these tests are small.
BLOCK = 96
BASE = np.zeros((4, BLOCK), np.uint8)
# Longest finite time in seconds that a caller may name.
MAX_WAIT_S = 1e9


@pytest.fixture(scope="module")
def store(store_daemon: OpenStore) -> Iterator[Store]:
    with KVClient(store_daemon("off").address) as client, client.store(new_namespace(BLOCK)) as opened:
        yield opened


WRONG_NAMESPACES: list[tuple[str, Any]] = [
    ("model", None), ("model", 5), ("weights", b"x"), ("layout", None), ("block_bytes", 0), ("block_bytes", -1),
    ("block_bytes", 1.5), ("tp_size", 0), ("tp_size", 2**32), ("pp_size", -1), ("tp_rank", -1), ("tp_rank", 1),
    ("pp_rank", 7), ("tp_rank", "0"),
]  # fmt: skip
WRONG_OPTIONS: list[tuple[str, Any]] = [
    ("namespace", None), ("tenant", 7), ("name", b"\xff"), ("unreachable", "wait"), ("transport", "lane"),
    ("copy_threads", 0), ("copy_threads", 1.5), ("quota_gib", -1), ("quota_gib", math.nan), ("quota_gib", "1"),
    ("quota_gib", 1e-12),
]  # fmt: skip


def test_wrong_namespaces_and_options() -> None:
    client = KVClient(NOBODY, connect_timeout_s=None)
    with each_row() as row:
        for field, value in WRONG_NAMESPACES:
            with row(("namespace", field, value)):
                namespace = StoreNamespace(**cast(Any, {"model": "m", "block_bytes": 64} | {field: value}))
                with pytest.raises(InvalidArgumentError) as refused:
                    client.store(namespace)
                assert refused.value.field == field
        for field, value in WRONG_OPTIONS:
            with row(("option", field, value)):
                with pytest.raises(InvalidArgumentError) as refused:
                    client.store(**cast(Any, {"namespace": StoreNamespace("m", 1)} | {field: value}))
                assert refused.value.field == field
    client.close()


def test_the_daemon_refuses_ranks_that_are_not_below_their_size(store_daemon: OpenStore) -> None:
    """A namespace without sizes is that of one rank."""
    ranks = {"tp_rank": {"tp_rank": 5, "tp_size": 2}, "pp_rank": {"pp_rank": 1, "pp_size": 0}, "": {"tp_size": 0}}
    namespace = new_namespace()
    with KVClient(store_daemon("off").address) as client, client.store(namespace) as alone, each_row() as row:
        alone.put(keys_of(1), blocks_of(1))
        for field, values in ranks.items():

            def change(name: str, request: Any, values: dict[str, int] = values) -> None:
                if name == "store_open_namespace":
                    for one, value in values.items():
                        setattr(request.namespace, one, value)

            with row(field), changed_calls(change):
                if field:
                    with pytest.raises(InvalidArgumentError) as refused:
                        client.store(namespace)
                    assert refused.value.field == f"namespace.{field}"
                else:
                    with client.store(namespace) as same:
                        assert same.lookup(keys_of(1)).found.all()


def test_times_that_no_clock_has(store: Store) -> None:
    with each_row() as row:
        for seconds in (1e10, 1e18, 1e300, -1.0, math.nan):
            for field, call in (
                ("timeout_s", lambda seconds: store.lookup(keys_of(1), timeout_s=seconds)),
                ("ttl_s", lambda seconds: store.acquire(keys_of(1), seconds)),
                ("max_wait_s", lambda seconds: store.get(keys_of(1), BASE[:1], max_wait_s=seconds)),
            ):
                with row((field, seconds)):
                    with pytest.raises(InvalidArgumentError) as refused:
                        call(seconds)
                    assert refused.value.field == field
            for make in (KVClient, AsyncKVClient):
                for option in ("timeout_s", "connect_timeout_s", "reconnect_wait_s"):
                    with row((make.__name__, option, seconds)):
                        with pytest.raises(InvalidArgumentError) as refused:
                            make(NOBODY, **cast(Any, {option: seconds}))
                        assert refused.value.field == option
        with row("a time that is no number"):
            with pytest.raises(InvalidArgumentError) as refused:
                store.get(keys_of(1), BASE[:1], max_wait_s=cast(Any, "1"))
            assert refused.value.field == "max_wait_s"


def test_the_longest_times(store_daemon: OpenStore) -> None:
    with KVClient(store_daemon("off").address, timeout_s=MAX_WAIT_S) as client:
        assert client.ping(b"x", timeout_s=math.inf) == b"x"
        assert client.ping(b"x") == b"x"
        with client.store(new_namespace()) as store:
            assert store.lookup(keys_of(1), timeout_s=MAX_WAIT_S).num_leading == 0


def test_requests_wait_for_blocks_half_of_their_time_limit(store_daemon: OpenStore) -> None:
    """0 stands for no limit: then the tiers decide."""
    address = store_daemon("off").address
    rows: list[tuple[float | None, dict[str, float], float]] = [
        (math.inf, {}, 0.0),
        (8.0, {}, 4.0),
        (8.0, {"timeout_s": 2.0}, 1.0),
        (math.inf, {"max_wait_s": 1000.0, "timeout_s": 2.0}, 1.0),
        (math.inf, {"max_wait_s": 1e-9}, 1e-6),
    ]
    with each_row() as row:
        for default_s, options, wait_s in rows:
            with row((default_s, options)), KVClient(address) as client:
                with client.store(new_namespace(BLOCK), timeout_s=default_s) as store, seen_calls() as seen:
                    store.get(keys_of(1), np.zeros((1, BLOCK), np.uint8), **cast(Any, options))
                    store.acquire(keys_of(1), **cast(Any, options))
                waits = [one.max_wait_s for name, one in seen if name in ("store_batch_get", "store_acquire")]
                assert waits == pytest.approx([wait_s] * 2, abs=0.0 if wait_s != 1e-6 else 1e-9)
                assert (min(waits) > 0) == (wait_s > 0), "time that has passed is not unlimited"


KEYS = keys_of(*range(2))
WRONG_KEYS: list[Any] = [
    b"\0" * 31, b"\0" * 33, [b"\0" * 31], [KEYS[0], KEYS[1][:-1]], "a" * 32, ["a" * 32], [7], 7, None,
    bytearray(32), np.zeros(32, np.uint8),
]  # fmt: skip


def test_wrong_keys(store_daemon: OpenStore) -> None:
    with KVClient(store_daemon("write").address) as client, client.store(new_namespace()) as store:
        block = np.zeros((1, BLOCK_BYTES), np.uint8)
        calls: dict[str, Any] = {
            name: getattr(store, name) for name in ("lookup", "acquire", "reserve", "touch", "remove")
        }
        calls["get"] = lambda keys: store.get(keys, block)
        calls["put"] = lambda keys: store.put(keys, block)
        with each_row() as row, seen_calls() as seen:
            for name, call in calls.items():
                for keys in WRONG_KEYS if name == "lookup" else (b"\0" * 33, [b"\0" * 31]):
                    with row((name, keys)):
                        with pytest.raises(InvalidArgumentError) as error:
                            call(keys)
                        assert error.value.field == "keys"
            for field, both in (("out", calls["get"]), ("values", calls["put"])):
                with row(field):
                    with pytest.raises(InvalidArgumentError) as error:
                        both(keys_of(1, 2))
                    assert error.value.field == field
        assert seen == []
        assert store.lookup(tuple(KEYS)).num_leading == store.lookup(b"".join(KEYS)).num_leading == 0


WRONG_ARRAYS: list[Any] = [
    np.zeros((4, BLOCK), np.int8),
    np.zeros((3, BLOCK), np.uint8),
    np.zeros((4, BLOCK - 1), np.uint8),
    np.zeros(4 * BLOCK, np.uint8),
    np.zeros((4, 2 * BLOCK), np.uint8)[:, ::2],
    np.zeros((BLOCK, 4), np.uint8).T,
    bytes(4 * BLOCK),
    None,
    [[0] * BLOCK] * 4,
    torch.zeros(BLOCK, 4, dtype=torch.uint8).t(),
    torch.zeros(4, BLOCK, dtype=torch.int8),
    torch.zeros(3, BLOCK, dtype=torch.uint8),
    torch.zeros(4, BLOCK, dtype=torch.uint8, device="meta"),
]
WRONG_SCATTERS = [
    Scatter(BASE, [[0, 48]] * 3, [48, 48]),
    Scatter(BASE, [[0]] * 4, [48, 48]),
    Scatter(BASE, [[0, 0.5]] * 4, [48, 48]),
    Scatter(BASE, [[0, -1]] * 4, [48, 48]),
    Scatter(BASE, [[0, 4 * BLOCK - 47]] * 4, [48, 48]),
    Scatter(BASE, [[0, 2**63]] * 4, [48, 48]),
    Scatter(BASE, [[0, 48]] * 4, [48, 47]),
    Scatter(BASE, [[0, 48]] * 4, [96, 0]),
    Scatter(BASE, [[0, 48]] * 4, [97, -1]),
    Scatter(BASE, [[0, 48]] * 4, cast(Any, [48.0, 48])),
    Scatter(BASE, [[]] * 4, []),
    Scatter(BASE, [[0]] * 4, cast(Any, None)),
    Scatter([BASE], [[0, 48]] * 4, [48, 48]),
    Scatter([BASE, BASE[0, :40]], [[0, 0]] * 4, [48, 48]),
    Scatter(BASE[:, ::2], [[0, 48]] * 4, [48, 48]),
    Scatter(cast(Any, None), [[0, 48]] * 4, [48, 48]),
    Scatter([], [[0, 48]] * 4, [48, 48]),
]


def test_wrong_arrays_and_scatters(store: Store) -> None:
    keys = keys_of(*range(4))
    with each_row() as row, seen_calls() as seen:
        for number, blocks in enumerate([*WRONG_ARRAYS, *WRONG_SCATTERS]):
            for field, call in (("values", store.put), ("out", store.get)):
                with row((number, blocks, field)):
                    with pytest.raises(InvalidArgumentError) as error:
                        call(keys, blocks)
                    assert error.value.field == field
    assert seen == []


def test_results_are_not_written_to_read_only_arrays(store: Store) -> None:
    array = np.zeros((4, BLOCK), np.uint8)
    array.flags.writeable = False
    keys = keys_of(*range(20, 24))
    assert set(store.put(keys, array).tolist()) == {PutStatus.DONE}
    for blocks in (array, Scatter(array, [[0]] * 4, [BLOCK])):
        with pytest.raises(InvalidArgumentError, match="read-only"):
            store.get(keys, blocks)


def test_torch_tensors_are_taken_as_arrays_are(store: Store) -> None:
    tensor = torch.arange(4 * BLOCK).to(torch.uint8).reshape(4, BLOCK)
    keys = keys_of(*range(30, 34))
    assert set(store.put(keys, tensor).tolist()) == {PutStatus.DONE}
    out = torch.zeros(4, BLOCK, dtype=torch.uint8)
    assert store.get(keys, out).all()
    assert torch.equal(out, tensor)
    layers = [torch.zeros(4, 16, dtype=torch.bfloat16) for _ in range(3)]
    assert store.get(keys[1:2], Scatter(layers, [[0, 32, 64]], [32] * 3)).all()
    for number, layer in enumerate(layers):
        raw = layer.view(torch.uint8).reshape(-1)
        assert torch.equal(raw[32 * number : 32 * number + 32], tensor[1, 32 * number : 32 * number + 32])
        assert int(raw.count_nonzero()) == int(raw[32 * number : 32 * number + 32].count_nonzero())


def test_a_piece_may_end_with_its_array_and_no_blocks_lie_in_an_empty_one(store: Store) -> None:
    values = np.arange(4 * BLOCK, dtype=np.uint16).astype(np.uint8)
    assert store.put(keys_of(40), Scatter(values, [[0, 4 * BLOCK - 48]], [48, 48])).tolist() == [PutStatus.DONE]
    out = np.zeros((1, BLOCK), np.uint8)
    assert store.get(keys_of(40), out).all()
    np.testing.assert_array_equal(out[0], np.concatenate([values[:48], values[-48:]]))
    assert store.get([], Scatter(np.zeros(0, np.uint8), np.zeros((0, 1), int), [BLOCK])).shape == (0,)


def test_an_empty_list_is_as_good_as_an_empty_array(store_daemon: OpenStore) -> None:
    with KVClient(store_daemon("write").address) as client, client.store(new_namespace()) as store:
        assert store.reserve([]).commit([], checksums=[]) == 0
        with store.reserve(keys_of(1)) as reservation, pytest.raises(InvalidArgumentError, match="must be bool"):
            reservation.commit([1.5])


def test_answers_of_a_wrong_size_are_internal_errors(store_daemon: OpenStore) -> None:
    """A bitmap has a bit per key, and a put has a status per key. Blocks lie in the store."""
    changes: dict[str, tuple[str, str, Any]] = {
        "no bits": ("store_lookup", "found", b""),
        "too many bits": ("store_lookup", "found", b"\1\1"),
        "too few bits of a get": ("store_batch_get", "found", b""),
        "too few statuses": ("store_batch_put", "statuses", b"\1\1"),
        "too few bytes": ("store_batch_get", "data", b"\0"),
    }
    mapped = {
        "a block outside": ("store_acquire", "offsets", (1 << 40).to_bytes(8, "little")),
        "too many blocks": ("store_acquire", "offsets", bytes(16)),
    }
    for share_store, transport, table in (("off", "inline", changes), ("write", "mapped", mapped)):
        with (
            KVClient(store_daemon(share_store).address) as client,
            client.store(new_namespace(), transport=transport) as store,
            each_row() as row,
        ):
            store.put(keys_of(1), blocks_of(1))
            for name, (call, field, value) in table.items():

                def change(sent: str, response: Any, call: str = call, field: str = field, value: Any = value) -> None:
                    if sent == call:
                        setattr(response, field, value)

                with row(name), changed_calls(change, responses=True), pytest.raises(InternalError, match="the daemon"):
                    ask(store, call)


def ask(store: Store, call: str) -> None:
    """Make the call of a store that sends this one."""
    if call == "store_lookup":
        store.lookup(keys_of(1, 2, 3))
    elif call == "store_batch_put":
        store.put(keys_of(4, 5, 6), blocks_of(4, 5, 6))
    else:
        store.get(keys_of(1), np.zeros((1, BLOCK_BYTES), np.uint8))


def test_a_region_of_too_many_bytes(store: Store) -> None:
    for num_bytes in (2**63, 2**70, 0):
        with pytest.raises(InvalidArgumentError) as refused:
            store.create_region(num_bytes)
        assert refused.value.field == "num_bytes", num_bytes


def test_a_client_that_is_not_entered() -> None:
    async def scenario() -> None:
        async with AsyncKVClient(NOBODY).store(new_namespace()):
            raise AssertionError("it opens")

    with pytest.raises(FailedPreconditionError, match="async with"):
        asyncio.run(scenario())


def test_a_user_without_regions(store_daemon: OpenStore) -> None:
    """The daemon gives other clients regions, but not this user's."""

    def refused() -> dict[str, BaseException]:
        return {"create_region": RegionsNotAllowedError("not for user 5")}

    with KVClient(store_daemon("off").address) as client:
        with client.store(new_namespace()) as store:
            assert store.transport == "region"
        with failing_calls(refused()), pytest.raises(RegionsNotAllowedError):
            client.store(new_namespace(), transport="region")
        with failing_calls(refused()), client.store(new_namespace()) as store:
            assert store.transport == "inline"
            assert store.put(keys_of(1), np.zeros((1, BLOCK_BYTES), np.uint8)).tolist() == [1]
