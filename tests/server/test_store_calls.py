"""The calls of the block store over a real daemon: what they do, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
from each_row import each_row
from raw_store import BLOCK_BYTES, RawStore, block, blocks, identity, keys
from raw_wire import request_of
from small_pool import SMALL_POOL
from waiting import until

from kvservice.client import KVClient, StoreBlocksRemoved, StoreBlocksStored, StoreCleared, StoreNamespace
from kvservice.launch import Daemon
from kvservice.v1 import events_pb2, pool_pb2, session_pb2, store_pb2

DONE, PRESENT = bytes([store_pb2.PUT_STATUS_DONE]), bytes([store_pb2.PUT_STATUS_PRESENT])
WRITING = bytes([store_pb2.PUT_STATUS_BEING_WRITTEN])


@pytest.fixture
def store(raw_session: Any) -> RawStore:
    """An empty namespace, whose calls are unary and over the stream, in turns."""
    opened = RawStore(raw_session, transport="both")
    opened.clear()
    return opened


@pytest.fixture
def unary(raw_session: Any) -> RawStore:
    opened = RawStore(raw_session)
    opened.clear()
    return opened


def refused(store: RawStore, name: str, request: Any) -> tuple[str, str, str]:
    answer = store.call(name, request)
    assert type(answer).__name__ == "Refusal", answer
    return answer.code, answer.reason, answer.field


def test_blocks_come_back_as_they_were_stored(store: RawStore) -> None:
    assert store.put(1, 2) == DONE * 2
    assert store.put(2, 3) == PRESENT + DONE
    assert store.lookup(1, 2, 3, 4) == (3, b"\x07")
    assert store.get(4, 3, 1) == (b"\x06", blocks(3, 1))
    assert store.get(4, 5) == (b"\0", b"")
    assert store.get(3, 1, verify=True) == (b"\x03", blocks(3, 1))
    assert store.get() == (b"", b"")


def test_what_a_namespace_says_of_its_memory(store: RawStore) -> None:
    opened = store.opened
    assert opened.number > 0
    assert not opened.has_tiers
    assert (opened.slab_bytes, opened.quota_bytes) == ((4 << 20) + 4096, 16 << 20)
    assert opened.block_stride == BLOCK_BYTES
    used = opened.first_block + opened.blocks_per_slab * opened.block_stride
    assert opened.slab_bytes - BLOCK_BYTES < used <= opened.slab_bytes
    store.put(1, 2)
    request = store_pb2.OpenNamespaceRequest(namespace=identity())
    again = store.ok("open_namespace", request)
    assert (again.namespace_id, again.num_blocks) == (store.id, 2)


def test_the_daemon_says_what_store_it_has(daemon: Daemon, wire: Any) -> None:
    info = wire.unary("get_info", pool_pb2.GetInfoRequest())
    assert (info.store_bytes, info.share_store) == (16 << 20, "write")
    with KVClient(daemon.address) as client:
        assert (client.info.store_bytes, client.info.share_store) == (16 << 20, "write")


def test_an_opening_that_names_a_quota_sets_it(unary: RawStore) -> None:
    def opened(quota_bytes: int) -> int:
        request = store_pb2.OpenNamespaceRequest(namespace=identity(), quota_bytes=quota_bytes)
        quota: int = unary.ok("open_namespace", request).quota_bytes
        return quota

    assert [opened(3 * BLOCK_BYTES), opened(0), opened(1 << 50)] == [3 * BLOCK_BYTES, 3 * BLOCK_BYTES, 16 << 20]
    opened(3 * BLOCK_BYTES)
    for number in range(5):
        unary.put(number)
    assert unary.lookup(*range(5)) == (0, b"\x1c")
    request = store_pb2.OpenNamespaceRequest(namespace=identity("another"), quota_bytes=BLOCK_BYTES - 1)
    assert refused(unary, "open_namespace", request) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT", "quota_bytes")
    assert opened(16 << 20) == 16 << 20


def test_uses_that_are_reported_have_a_limit(store: RawStore) -> None:
    """They are added to counters."""
    for field in ("num_hits", "num_misses", "num_read", "num_not_whole"):
        request = store_pb2.TouchRequest(namespace_id=store.opened.namespace_id)
        setattr(request, field, 1 << 32)
        assert store.ok("touch", request).num_blocks == 0
        for number in ((1 << 32) + 1, (1 << 64) - 1):
            setattr(request, field, number)
            code, _, named = refused(store, "touch", request)
            assert (code, named) == ("INVALID_ARGUMENT", field)
    for name in ("loads_in_flight", "blocks_skipped"):
        report = store_pb2.EngineReport(**{name: (1 << 53) + 1})
        code, _, named = refused(store, "touch", store_pb2.TouchRequest(namespace_id=store.id, engine=report))
        assert (code, named) == ("INVALID_ARGUMENT", f"engine.{name}")
    request = store_pb2.TouchRequest(namespace_id=store.opened.namespace_id, missing=keys(*range(256)))
    assert store.ok("touch", request).num_blocks == 0
    for missing in (keys(*range(257)), bytes(31)):
        request = store_pb2.TouchRequest(namespace_id=store.opened.namespace_id, missing=missing)
        code, _, named = refused(store, "touch", request)
        assert (code, named) == ("INVALID_ARGUMENT", "missing")


def test_touch_remove_and_clear(store: RawStore) -> None:
    store.put(1, 2, 3)
    name = {"namespace_id": store.id}
    assert store.ok("touch", store_pb2.TouchRequest(**name, keys=keys(1, 9))).num_blocks == 1
    assert store.ok("remove", store_pb2.RemoveRequest(**name, keys=keys(1, 9))).num_blocks == 1
    assert store.lookup(1, 2, 3) == (0, b"\x06")
    assert store.clear() == 2
    assert store.clear() == 0


def test_leases(store: RawStore) -> None:
    store.put(1, 2, 3)
    lease = store.acquire(1, 9, 2, ttl_s=30.0)
    assert (lease.found, len(lease.offsets), len(lease.versions)) == (b"\x05", 16, 16)
    assert store.acquire(1, 9, 2, leading_only=True).found == b"\x01"
    store.ok("renew", store_pb2.RenewRequest(lease_id=lease.lease_id, ttl_s=10.0))
    assert store.clear() == 3
    # The bytes of a leased block stay.
    assert store.acquire(1).lease_id == 0
    for _ in range(2):
        store.ok("release", store_pb2.ReleaseRequest(lease_ids=[lease.lease_id, 0, 1 << 63]))
    assert refused(store, "renew", store_pb2.RenewRequest(lease_id=lease.lease_id)) == (
        "NOT_FOUND",
        "UNKNOWN_LEASE",
        "lease_id",
    )


def test_a_lease_keeps_blocks_from_eviction(unary: RawStore) -> None:
    unary.put(1)
    lease = unary.acquire(1)
    whole = unary.opened.quota_bytes // BLOCK_BYTES
    numbers = range(100, 100 + whole)
    for first in numbers[::256]:
        some = range(first, first + 256)
        request = store_pb2.BatchPutRequest(namespace_id=unary.id, keys=keys(*some), data=block(0) * len(some))
        unary.ok("batch_put", request)
    assert unary.get(1) == (b"\x01", block(1))
    assert unary.lookup(355)[0] == 0, "it was the least recently used"
    unary.ok("release", store_pb2.ReleaseRequest(lease_ids=[lease.lease_id]))
    unary.clear()


KINDS = {
    "lookup": store_pb2.LookupRequest,
    "acquire": store_pb2.AcquireRequest,
    "reserve": store_pb2.ReserveRequest,
    "batch_get": store_pb2.BatchGetRequest,
    "batch_put": store_pb2.BatchPutRequest,
    "touch": store_pb2.TouchRequest,
    "remove": store_pb2.RemoveRequest,
}


def test_keys_and_namespaces_that_are_refused(unary: RawStore) -> None:
    with each_row() as row:
        for name, made in KINDS.items():
            with row(name):
                kind: Any = made
                for number in (0, unary.id + 1):
                    expected = ("NOT_FOUND", "UNKNOWN_NAMESPACE", "namespace_id")
                    assert refused(unary, name, kind(namespace_id=number, keys=keys(1))) == expected
                expected = ("INVALID_ARGUMENT", "INVALID_ARGUMENT", "keys")
                assert refused(unary, name, kind(namespace_id=unary.id, keys=bytes(33))) == expected
                answer = unary.call(name, kind(namespace_id=unary.id, keys=bytes(32 * 32768 + 32)))
                assert (answer.reason, answer.field) == ("QUOTA_EXCEEDED", "keys")
                assert answer.metadata == {"limit": "max_request_blocks", "value": "32768"}


def test_the_most_keys_of_a_request(unary: RawStore) -> None:
    answer = unary.ok("lookup", store_pb2.LookupRequest(namespace_id=unary.id, keys=bytes(32 * 32768)))
    assert (answer.num_leading, answer.found) == (0, bytes(4096))


def test_namespaces_that_are_not_opened(unary: RawStore) -> None:
    """Clients cannot open the one of the daemon's own pool either."""
    texts = ("model", "weights", "dtype", "layout", "key_algorithm")
    rows: list[tuple[str, Any]] = [(name, text) for name in texts for text in ("x" * 257, "a\nb")]
    rows += [("block_bytes", number) for number in (0, (4 << 20) + 1, 1 << 63)]
    rows += [("key_algorithm", "kvservice pool")]
    with each_row() as row:
        for name, value in rows:
            with row((name, value)):
                request = store_pb2.OpenNamespaceRequest(namespace=identity(**{name: value}))
                expected = ("INVALID_ARGUMENT", "INVALID_ARGUMENT", f"namespace.{name}")
                assert refused(unary, "open_namespace", request) == expected
    nothing = refused(unary, "open_namespace", store_pb2.OpenNamespaceRequest())
    assert nothing == ("INVALID_ARGUMENT", "INVALID_ARGUMENT", "namespace.block_bytes")
    for name in texts:
        unary.ok("open_namespace", store_pb2.OpenNamespaceRequest(namespace=identity(**{name: "x" * 256})))


def test_every_field_tells_namespaces_apart(unary: RawStore) -> None:
    unary.put(1)
    others: list[dict[str, Any]] = [{name: "other"} for name in ("weights", "dtype", "layout", "key_algorithm")]
    others += [{"tp_size": 2}, {"tp_size": 2, "tp_rank": 1}, {"pp_size": 2}, {"pp_size": 2, "pp_rank": 1}]
    opened = []
    for changes in others:
        other = RawStore(unary.session, **changes)
        assert other.id != unary.id
        assert other.lookup(1) == (0, b"\0"), changes
        other.put(1)
        opened.append(other)
    assert RawStore(unary.session, block_bytes=BLOCK_BYTES + 1).lookup(1) == (0, b"\0")
    for other in opened:
        other.clear()


def test_tenants_never_see_each_others_blocks(raw: Any, wire: Any) -> None:
    sessions = [raw.RawSession(wire, tenant=tenant) for tenant in ("a", "b", "a")]
    first, other, same = (RawStore(session) for session in sessions)
    first.clear()
    first.put(1)
    assert same.get(1) == (b"\x01", block(1))
    assert other.lookup(1) == (0, b"\0")
    assert other.get(1) == (b"\0", b"")
    assert other.acquire(1).lease_id == 0
    other.ok("remove", store_pb2.RemoveRequest(namespace_id=other.id, keys=keys(1)))
    other.clear()
    assert first.lookup(1) == (1, b"\x01")
    for session in sessions:
        session.close()


def test_sizes_of_inline_data(unary: RawStore) -> None:
    for size in (0, BLOCK_BYTES - 1, 2 * BLOCK_BYTES):
        request = store_pb2.BatchPutRequest(namespace_id=unary.id, keys=keys(1), data=bytes(size))
        assert refused(unary, "batch_put", request) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT", "data")
    assert unary.lookup(1) == (0, b"\0")
    # The answer would be larger than a message.
    too_many = store_pb2.BatchGetRequest(namespace_id=unary.id, keys=keys(*range(512)))
    assert refused(unary, "batch_get", too_many) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT", "keys")
    most = store_pb2.BatchGetRequest(namespace_id=unary.id, keys=keys(*range(511)))
    unary.ok("batch_get", most)


def test_the_largest_inline_answer_arrives(unary: RawStore) -> None:
    for first in (0, 200, 400):
        unary.put(*range(first, min(first + 200, 511)))
    found, data = unary.get(*range(511), verify=True)
    assert found == b"\xff" * 63 + b"\x7f"
    assert data == blocks(*range(511))
    unary.clear()


def test_times_of_leases(unary: RawStore) -> None:
    for ttl_s in (-1.0, 60.5, float("nan")):
        for name, request in (
            ("acquire", store_pb2.AcquireRequest(namespace_id=unary.id, ttl_s=ttl_s)),
            ("renew", store_pb2.RenewRequest(lease_id=1, ttl_s=ttl_s)),
        ):
            answer = refused(unary, name, request)
            assert answer == ("INVALID_ARGUMENT", "INVALID_ARGUMENT", "ttl_s"), (name, ttl_s)


def test_a_repeated_request_is_answered_again_and_not_executed_again(unary: RawStore) -> None:
    unary.put(1, 2)
    name: dict[str, Any] = {"namespace_id": unary.id}
    acquire = store_pb2.AcquireRequest(**name, request_id=1, keys=keys(1))
    assert unary.ok("acquire", acquire) == unary.ok("acquire", acquire)
    remove = store_pb2.RemoveRequest(**name, request_id=2, keys=keys(1))
    assert [unary.ok("remove", remove).num_blocks for _ in range(2)] == [1, 1]
    clear = store_pb2.ClearRequest(**name, request_id=3)
    assert unary.ok("clear", clear).num_blocks == 1
    unary.put(3)
    assert unary.ok("clear", clear).num_blocks == 1
    assert unary.lookup(3) == (1, b"\x01")
    opening = store_pb2.OpenNamespaceRequest(request_id=4, namespace=identity("new"))
    assert unary.ok("open_namespace", opening) == unary.ok("open_namespace", opening)


def test_a_session_that_ends_frees_its_leases(raw: Any, wire: Any, unary: RawStore) -> None:
    unary.put(1)
    session = raw.RawSession(wire)
    lost = RawStore(session)
    lost.acquire(1)
    session.close()
    unary.clear()
    # The namespace has no blocks and no other user, so a slab is free again: everything fits.
    numbers = unary.opened.blocks_per_slab * 4
    statuses = b"".join(
        unary.ok(
            "batch_put",
            store_pb2.BatchPutRequest(
                namespace_id=unary.id, keys=keys(*range(n, min(n + 256, numbers))),
                data=bytes(BLOCK_BYTES * (min(n + 256, numbers) - n)),
            ),
        ).statuses
        for n in range(0, numbers, 256)
    )  # fmt: skip
    assert statuses == DONE * numbers
    assert unary.lookup(*range(numbers))[0] == numbers, "nothing was evicted"
    unary.clear()


def test_a_client_that_takes_over_opens_its_own(wire: Any, unary: RawStore) -> None:
    unary.put(1)
    lease = unary.acquire(1)
    taker = wire.stream()
    assert taker.attach(unary.session.token).WhichOneof("reply") == "attach"
    request = store_pb2.LookupRequest(namespace_id=unary.id, keys=keys(1))
    assert refused(unary, "lookup", request)[1] == "UNKNOWN_NAMESPACE"
    assert refused(unary, "renew", store_pb2.RenewRequest(lease_id=lease.lease_id))[1] == "UNKNOWN_LEASE"
    again = RawStore(unary.session)
    assert again.id > unary.id
    assert again.lookup(1) == (1, b"\x01")
    taker.cancel()


def test_a_stream_that_reconnects_keeps_what_the_session_has(wire: Any, unary: RawStore) -> None:
    unary.put(1)
    lease = unary.acquire(1)
    stream = wire.stream()
    assert stream.attach(unary.session.token, reconnects=True).WhichOneof("reply") == "attach"
    unary.ok("renew", store_pb2.RenewRequest(lease_id=lease.lease_id))
    stream.cancel()


def test_a_daemon_without_a_store(raw: Any) -> None:
    with Daemon(**SMALL_POOL | {"store_gib": 0.0}) as daemon:
        wire = raw.Wire(daemon.address)
        session = raw.RawSession(wire)
        calls = {name for name in wire.methods if name.startswith("store_")}
        assert len(calls) == 14
        for name in calls:
            for transport in ("unary", "stream"):
                answer = session.call(name, request_of(name), transport)
                assert (answer.code, answer.reason) == ("FAILED_PRECONDITION", "STORE_OFF"), name
        session.close()
        wire.close()


def nothing_is_written(store: RawStore, request: store_pb2.BatchPutRequest) -> bool:
    return WRITING not in store.ok("batch_put", request).statuses


def test_a_put_that_is_cancelled_leaves_no_room_reserved(raw: Any, wire: Any, unary: RawStore) -> None:
    for transport in ("unary", "stream"):
        session = raw.RawSession(wire)
        lost = RawStore(session)
        numbers = range(400)
        data = block(0) * len(numbers)
        request = store_pb2.BatchPutRequest(
            session_token=session.token, namespace_id=lost.id, keys=keys(*numbers), data=data
        )
        if transport == "unary":
            wire.methods["store_batch_put"].future(request).cancel()
        else:
            session.stream.put(session_pb2.Call(call_id=1000, store_batch_put=request))
        session.close()
        again = store_pb2.BatchPutRequest(namespace_id=unary.id, keys=keys(*numbers), data=data)
        until(lambda: nothing_is_written(unary, again))  # noqa: B023  it is called here
        assert unary.lookup(*numbers)[0] == len(numbers), transport
        unary.clear()


def test_events_name_the_namespace_and_the_keys(unary: RawStore, wire: Any, client: KVClient) -> None:
    unary.put(100)
    number = 0
    batches = wire.methods["subscribe"](events_pb2.SubscribeRequest(start_number=1), timeout=60)
    for batch in batches:
        number = batch.number
        if batch.events[-1].store_blocks_stored.keys == [keys(100)]:
            break
    unary.put(1, 2)
    unary.ok("remove", store_pb2.RemoveRequest(namespace_id=unary.id, keys=keys(2, 3)))
    unary.clear()
    stored, removed, cleared = (next(batches) for _ in range(3))
    assert [stored.number, removed.number, cleared.number] == [number + 1, number + 2, number + 3]
    (event,) = stored.events
    assert event.store_blocks_stored == events_pb2.StoreBlocksStored(namespace=identity(), keys=[keys(1), keys(2)])
    (event,) = removed.events
    assert event.store_blocks_removed == events_pb2.StoreBlocksRemoved(namespace=identity(), keys=[keys(2)])
    (event,) = cleared.events
    assert event.store_cleared == events_pb2.StoreCleared(namespace=identity())
    batches.cancel()
    namespace = StoreNamespace.of(identity())
    seen = client.events(start_number=number + 1)
    assert [next(seen).events for _ in range(3)] == [
        (StoreBlocksStored(namespace, "", (keys(1), keys(2))),),
        (StoreBlocksRemoved(namespace, "", (keys(2),)),),
        (StoreCleared(namespace, ""),),
    ]
    seen.close()
    assert namespace.message() == identity()


def test_a_namespace_too_many_names_the_option_also_in_the_log(raw: Any) -> None:
    """The log says so a few times only."""
    with Daemon(**SMALL_POOL | {"max_store_namespaces": 3}) as daemon:
        wire = raw.Wire(daemon.address)
        session = raw.RawSession(wire)
        for model in "abc":
            RawStore(session, model)
        store = RawStore(session, "a")
        for _ in range(100):
            answer = store.call("open_namespace", store_pb2.OpenNamespaceRequest(namespace=identity("d")))
            assert answer.reason == "QUOTA_EXCEEDED"
            assert "see max_store_namespaces" in answer.message
        said = [line for line in daemon.log.read_text().splitlines() if "WARNING" in line]
        assert len(said) == 20
        text = "a namespace of model 'd' was refused: the store has 3 namespaces, and all are in use"
        assert all(f"{text}: see max_store_namespaces" in line for line in said)
        wire.close()
