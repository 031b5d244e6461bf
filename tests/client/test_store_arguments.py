"""Arguments of the block store's client that are refused, with the name of the argument, before anything is sent."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from store_daemons import BLOCK_BYTES, OpenStore, keys_of, new_namespace

from kvservice.client import AsyncKVClient, KVClient, Scatter, StoreNamespace
from kvservice.client.requests import MAX_WAIT_S, time_limit, wait_time
from kvservice.client.store.leases import ReservationCore
from kvservice.client.store.pieces import pieces_of
from kvservice.client.threads import finish
from kvservice.errors import FailedPreconditionError, InvalidArgumentError, RegionsNotAllowedError
from kvservice.server.store_calls import identity_of
from kvservice.v1 import store_pb2


@pytest.mark.parametrize(("field", "value"), [
    ("model", None), ("model", 5), ("weights", b"x"), ("layout", None), ("block_bytes", 0), ("block_bytes", 1.5),
    ("tp_size", 0), ("pp_size", -1), ("tp_rank", -1), ("tp_rank", 1), ("pp_rank", 7), ("tp_rank", "0"),
])  # fmt: skip
def test_a_namespace_that_is_none(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        StoreNamespace(**cast(Any, {"model": "m", "block_bytes": 64} | {field: value})).message()
    assert refused.value.field == field


def test_the_daemon_refuses_ranks_that_are_not_below_their_size() -> None:
    for field, message in (
        ("tp_rank", store_pb2.StoreNamespace(tp_rank=5, tp_size=2)),
        ("pp_rank", store_pb2.StoreNamespace(pp_rank=1)),
    ):
        with pytest.raises(InvalidArgumentError) as refused:
            identity_of(message, "")
        assert refused.value.field == f"namespace.{field}"
    alone = store_pb2.StoreNamespace(tp_size=1, pp_size=1)
    assert identity_of(store_pb2.StoreNamespace(), "") == identity_of(alone, "")


@pytest.mark.parametrize("seconds", [1e10, 1e18, 1e300, -1.0, math.nan])
def test_times_that_no_clock_has(seconds: float) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        time_limit(seconds)
    assert refused.value.field == "timeout_s"
    with pytest.raises(InvalidArgumentError) as refused:
        wait_time(seconds, "ttl_s")
    assert refused.value.field == "ttl_s"
    for make in (KVClient, AsyncKVClient):
        for option in ("timeout_s", "connect_timeout_s", "reconnect_wait_s"):
            with pytest.raises(InvalidArgumentError) as refused:
                make("unix:///nobody/is/there", **cast(Any, {option: seconds}))
            assert refused.value.field == option


def test_the_longest_times(store_daemon: OpenStore) -> None:
    with KVClient(store_daemon("off").address, timeout_s=MAX_WAIT_S) as client:
        assert client.ping(b"x", timeout_s=math.inf) == b"x"
        assert client.ping(b"x") == b"x"
        with client.store(new_namespace()) as store:
            assert store.lookup(keys_of(1), timeout_s=MAX_WAIT_S).num_leading == 0


def test_pieces_of_no_blocks_lie_in_an_empty_array() -> None:
    empty = Scatter(np.zeros(0, np.uint8), np.zeros((0, 1), int), [4096])
    assert pieces_of(empty, 0, 4096, "out", writable=True).addresses.shape == (0, 1)
    with pytest.raises(InvalidArgumentError, match="piece_bytes is NoneType"):
        pieces_of(Scatter(np.zeros(8, np.uint8), [[0]], cast(Any, None)), 1, 8, "out", writable=True)


def test_an_empty_list_is_as_good_as_an_empty_array() -> None:
    reservation = ReservationCore(cast(Any, SimpleNamespace(attempt_on=_attempt_on)), None, [], np.zeros(0, np.uint8))
    assert finish(reservation.commit([], checksums=[])) == 0
    with pytest.raises(InvalidArgumentError, match="must be bool"):
        finish(reservation.commit([1.5]))


async def _attempt_on(*_: object) -> bool:
    return True


def test_a_region_of_too_many_bytes(store_daemon: OpenStore) -> None:
    with KVClient(store_daemon("off").address) as client, client.store(new_namespace()) as store:
        for num_bytes in (2**63, 2**70, 0):
            with pytest.raises(InvalidArgumentError) as refused:
                store.create_region(num_bytes)
            assert refused.value.field == "num_bytes"


def test_a_client_that_is_not_entered() -> None:
    async def scenario() -> None:
        async with AsyncKVClient("unix:///nobody/is/there").store(new_namespace()):
            raise AssertionError("it opens")

    with pytest.raises(FailedPreconditionError, match="async with"):
        asyncio.run(scenario())


def test_a_user_without_regions(store_daemon: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon gives other clients regions, but not this user's."""

    async def refused(*_: object, **__: object) -> None:
        raise RegionsNotAllowedError("not for user 5")

    with KVClient(store_daemon("off").address) as client:
        with client.store(new_namespace()) as store:
            assert store.transport == "region"
        monkeypatch.setattr("kvservice.client.regions.RegionTable.create", refused)
        with pytest.raises(RegionsNotAllowedError):
            client.store(new_namespace(), transport="region")
        with client.store(new_namespace()) as store:
            assert store.transport == "inline"
            assert store.put(keys_of(1), np.zeros((1, BLOCK_BYTES), np.uint8)).tolist() == [1]
