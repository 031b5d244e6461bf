"""Quotas of tenants: who is over one is refused with its numbers, and others are not."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest
from daemon_lives import Life, end_stream, finish
from grpc_status import rpc_status
from kept_files import HeldFiles
from raw_store import identity, keys
from raw_wire import refusal
from scraping import scrape, value
from secure_daemon import secured, with_token
from sleeping import detach, resume, settle
from tenant_rig import FILE, TOKENS, cached, calling, in_loop, tenant_options, written

from kvservice.client import KVClient
from kvservice.errors import InvalidArgumentError, OutOfBlocksError, PermissionDeniedError, QuotaExceededError
from kvservice.server.tenants import EVERYONE, Tenants
from kvservice.v1 import blocks_pb2, events_pb2, pool_pb2, regions_pb2, scheduler_pb2, session_pb2, store_pb2


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return tenant_options(tmp_path)


def with_quotas(options: dict[str, Any], clock: Any, **quotas: Any) -> Life:
    """Start a daemon in which `red`, the tenant of alice, has quotas."""
    lines = "".join(f"\n{key} = {value}" for key, value in quotas.items())
    Path(options["tenants"]).write_text(FILE.replace('["alice"]', f'["alice"]{lines}'))
    return Life(clock=clock, **options)


def over(error: QuotaExceededError) -> tuple[str, ...]:
    return tuple(error.metadata[key] for key in ("tenant", "limit", "value", "used", "required"))


def test_sessions_over_quota(options: dict[str, Any], clock: Any) -> None:
    life = with_quotas(options, clock, max_sessions=2, max_detached_sessions=1)
    with calling("alice"):
        one, other = life.open(), life.open(detachable=True)
        with pytest.raises(QuotaExceededError) as caught:
            life.open()
        assert over(caught.value) == ("red", "max_sessions", "2", "2", "1")
        finish(life.sessions.close_in_slices(one))
        with pytest.raises(QuotaExceededError) as caught:
            life.open(detachable=True)
        assert over(caught.value) == ("red", "max_detached_sessions", "1", "1", "1")
        again = life.open()
        with pytest.raises(QuotaExceededError):
            asyncio.run(life.call(again, "detach", session_pb2.DetachRequest(ttl_s=60)))
        asyncio.run(life.call(other, "detach", session_pb2.DetachRequest(ttl_s=60)))
    with calling("bob"):
        for _ in range(3):
            life.open(detachable=True)
    life.kill()


def test_streams_over_quota(options: dict[str, Any], clock: Any) -> None:
    """Streams of sessions and of events. A stream that takes a session over replaces another one."""
    life = with_quotas(options, clock, max_streams=2)
    with calling("alice"):
        one, other, third = (life.open(attached=False) for _ in range(3))
        for session in (one, other):
            life.attach(session.token)
        for refused in (lambda: life.attach(third.token), lambda: life.sessions.event_stream().__enter__()):
            with pytest.raises(QuotaExceededError) as caught:
                refused()
            assert over(caught.value) == ("red", "max_streams", "2", "2", "1")
        life.attach(one.token, holder=7)
        life.sessions.detach(other, end_stream)
        with life.sessions.event_stream(), pytest.raises(QuotaExceededError):
            life.attach(third.token)
        life.attach(third.token)
    with calling("bob"):
        for _ in range(3):
            life.open()
    assert life.sessions.tenant_uses()["red"][2].used == 2
    life.kill()


async def region(life: Life, session: Any, name: str) -> Any:
    request = regions_pb2.CreateRegionRequest(name=name, byte_size=4096)
    return await life.call(session, "create_region", request)


@in_loop
async def test_regions_over_quota(options: dict[str, Any], clock: Any) -> None:
    life = with_quotas(options, clock, max_regions=2)
    with calling("alice"):
        one, other = life.open(), life.open()
        await region(life, one, "a")
        await region(life, other, "a")
        for session in (one, other):
            with pytest.raises(QuotaExceededError) as caught:
                await region(life, session, "b")
            assert over(caught.value) == ("red", "max_regions", "2", "2", "1")
        gone = regions_pb2.UnregisterRegionRequest(name="a")
        await life.call(one, "unregister_region", gone)
        await region(life, other, "b")
    with calling("bob"):
        bob = life.open()
        for name in "abc":
            await region(life, bob, name)
    life.kill()


def allocation(tokens: list[int], *ids: int) -> blocks_pb2.AllocateRequest:
    found = [blocks_pb2.SequenceAllocation(sequence_id=one, token_ids=tokens) for one in ids]
    return blocks_pb2.AllocateRequest(sequences=found)


async def can_allocate(life: Life, session: Any, tokens: list[int]) -> int:
    one = blocks_pb2.SequenceAllocation(sequence_id=99, token_ids=tokens)
    answer = await life.call(session, "can_allocate", blocks_pb2.CanAllocateRequest(sequences=[one]))
    return int(answer.status)


@in_loop
async def test_blocks_over_quota(options: dict[str, Any], clock: Any) -> None:
    """A tenant has at most its blocks, over all of its sessions; shared ones count once, and cached ones do not."""
    held = HeldFiles()
    Path(options["tenants"]).write_text(FILE.replace('["alice"]', '["alice"]\nmax_blocks = 5'))
    life = Life(held, clock, watermark=0.25, **options)
    later, never = blocks_pb2.ALLOC_STATUS_LATER, blocks_pb2.ALLOC_STATUS_NEVER
    with calling("alice"):
        one, other = life.open(detachable=True), life.open()
        await life.compute(one, 1, TOKENS)
        fork = blocks_pb2.ForkRequest(parent_ids=[1, 1], child_ids=[2, 3])
        await life.call(one, "fork", fork)
        assert await can_allocate(life, other, TOKENS[::-1]) == later
        assert await can_allocate(life, other, [7] * 24) == never
        with pytest.raises(QuotaExceededError) as caught:
            await life.call(other, "allocate", allocation(TOKENS[::-1], 1))
        assert over(caught.value) == ("red", "max_blocks", "5", "3", "3")
        await life.call(other, "allocate", allocation([7] * 8, 1))
        append = blocks_pb2.AppendRequest(sequence_ids=[1], token_ids=[8])
        can_append = blocks_pb2.CanAppendRequest(sequence_ids=[1])
        for session in (one, other):
            assert not (await life.call(session, "can_append", can_append)).ok
            with pytest.raises(QuotaExceededError) as caught:
                await life.call(session, "append", append)
            assert over(caught.value) == ("red", "max_blocks", "5", "5", "1")
    with calling("bob"):
        bob = life.open()
        await life.call(bob, "allocate", allocation([9] * 80, 1))
    with calling("alice"):
        await life.call(one, "free", blocks_pb2.FreeRequest(sequence_ids=[1, 2, 3]))
        assert await cached(life, other) == 12
        await life.call(other, "append", append)
        await life.call(one, "allocate", allocation([5] * 8, 1))
    life.manager.check_integrity()
    life.end()
    again = Life(held, clock, watermark=0.25, **options)
    with calling("alice"):
        session = again.attach(one.token, reconnects=True)
        with pytest.raises(QuotaExceededError) as caught:
            await again.call(session, "allocate", allocation([6] * 4, 2))
        assert over(caught.value) == ("red", "max_blocks", "5", "5", "1"), "sequences of the process before count"
    again.kill()


@in_loop
async def test_guaranteed_blocks(options: dict[str, Any], clock: Any) -> None:
    """Others have them as cached blocks only, which are evicted for the tenant, and before those of who has less."""
    held = HeldFiles()
    Path(options["tenants"]).write_text(FILE.replace('["alice"]', '["alice"]\nguaranteed_blocks = 8'))
    life = Life(held, clock, watermark=0.0, **options)
    total = life.config.num_blocks
    assert total is not None
    later, never = blocks_pb2.ALLOC_STATUS_LATER, blocks_pb2.ALLOC_STATUS_NEVER
    with calling("alice"):
        alice = life.open(detachable=True)
        await life.compute(alice, 1, TOKENS)
    with calling("bob"):
        bob = life.open()
        assert await can_allocate(life, bob, [9] * 4 * (total - 7)) == never
        await life.compute(bob, 1, list(range(100, 100 + 4 * (total - 8))))
        assert await can_allocate(life, bob, TOKENS[:4]) == later
        with pytest.raises(OutOfBlocksError, match="5 more are guaranteed to other tenants"):
            await life.call(bob, "allocate", allocation(TOKENS[:4], 2))
        await life.call(bob, "open_scheduler", scheduler_pb2.OpenSchedulerRequest())
        large = scheduler_pb2.ScheduledRequest(request_id=1, token_ids=[1] * 4 * (total - 8), max_tokens=4, width=1)
        with pytest.raises(OutOfBlocksError, match="are guaranteed to other tenants") as caught:
            await life.call(bob, "add_requests", scheduler_pb2.AddRequestsRequest(requests=[large]))
        assert caught.value.metadata["never"] == "true"
        await life.call(bob, "free", blocks_pb2.FreeRequest(sequence_ids=[1]))
    (held_blocks,) = [uses[5] for name, uses in life.sessions.tenant_uses().items() if name == "red"]
    assert (held_blocks.used, held_blocks.limit) == (3, 8)
    life.manager.check_integrity()
    life.end()
    second = Life(held, clock, watermark=0.0, **options)
    with calling("bob"):
        bob = second.open()
        await second.call(bob, "allocate", allocation([9] * 4 * (total - 8), 1))
        with pytest.raises(OutOfBlocksError, match="5 more are guaranteed"):
            await second.call(bob, "allocate", allocation(TOKENS[:4], 2))
    with calling("alice"):
        alice = second.attach(alice.token, reconnects=True)
        await second.call(alice, "allocate", allocation([7] * 20, 2))
    second.manager.check_integrity()
    second.kill()


def test_no_more_blocks_are_guaranteed_than_there_are(options: dict[str, Any]) -> None:
    file = Path(options["tenants"])
    file.write_text("[tenant.a]\nguaranteed_blocks = 30\n[tenant.b]\nguaranteed_blocks = 35")
    with pytest.raises(InvalidArgumentError, match=r"tenant.b.guaranteed_blocks: .* 65 blocks .* the pool has 64"):
        Life(**options, num_blocks=64)
    life = Life(**options, num_blocks=65)
    life.kill()


def test_no_quota_of_the_store_is_less_than_a_slab(options: dict[str, Any]) -> None:
    file = Path(options["tenants"])
    file.write_text(f"[tenant.a]\nmax_store_bytes = {(4 << 20) - 1}")
    with pytest.raises(InvalidArgumentError, match=r"tenant.a.max_store_bytes: must be 0, or at least 4194304"):
        Life(**options)
    Life(**options | {"store_gib": 0}).kill()
    file.write_text(f"[tenant.a]\nmax_store_bytes = {4 << 20}\n[tenant.b]\nmax_store_bytes = 0")
    Life(**options).kill()


@in_loop
async def test_store_bytes_over_quota(options: dict[str, Any], clock: Any) -> None:
    """Over every way into the store: through the daemon, and for a client that writes the memory itself. The quota is
    one slab, two blocks."""
    size = 2 << 20
    life = with_quotas(options, clock, max_store_bytes=2 * size)
    for name in ("alice", "bob"):
        with calling(name):
            session = life.open()
            opened = await life.call(
                session, "store_open_namespace", store_pb2.OpenNamespaceRequest(namespace=identity(block_bytes=size))
            )
            own = opened.namespace_id
            for number in (1, 2, 3):
                put = store_pb2.BatchPutRequest(namespace_id=own, keys=keys(number), data=bytes(size))
                await life.call(session, "store_batch_put", put)
            found = store_pb2.LookupRequest(namespace_id=own, keys=keys(1, 2, 3))
            has = (await life.call(session, "store_lookup", found)).found
            assert has == {"alice": b"\x06", "bob": b"\x07"}[name]
            session.store.add_writer(1)
            reserve = store_pb2.ReserveRequest(namespace_id=own, keys=keys(*range(10, 13)))
            if name == "alice":
                for method in ("store_reserve", "store_batch_put"):
                    request = store_pb2.BatchPutRequest(namespace_id=own, keys=reserve.keys, data=bytes(3 * size))
                    with pytest.raises(QuotaExceededError) as caught:
                        await life.call(session, method, reserve if method == "store_reserve" else request)
                    assert over(caught.value) == ("red", "max_store_bytes", f"{2 * size}", f"{2 * size}", f"{4 * size}")
                (uses,) = [uses for tenant, uses in life.sessions.tenant_uses().items() if tenant == "red"]
                assert (2 * size, 2 * size, 2) in uses
            else:
                assert (await life.call(session, "store_reserve", reserve)).reservation_id
    life.kill()


@in_loop
async def test_sequences_over_quota(options: dict[str, Any], clock: Any) -> None:
    life = with_quotas(options, clock, max_sequences=3)
    with calling("alice"):
        one, other = life.open(), life.open()
        await life.call(one, "allocate", allocation(TOKENS, 1, 2))
        assert await can_allocate(life, other, TOKENS) == blocks_pb2.ALLOC_STATUS_OK
        await life.call(other, "allocate", allocation(TOKENS, 1))
        assert await can_allocate(life, other, TOKENS) == blocks_pb2.ALLOC_STATUS_LATER
        calls: list[tuple[str, Any]] = [
            ("allocate", allocation(TOKENS, 5)),
            ("fork", blocks_pb2.ForkRequest(parent_ids=[1], child_ids=[6])),
        ]
        for method, request in calls:
            with pytest.raises(QuotaExceededError) as caught:
                await life.call(one, method, request)
            assert over(caught.value) == ("red", "max_sequences", "3", "3", "1")
    with calling("bob"):
        await life.call(life.open(), "allocate", allocation(TOKENS, *range(10)))
    life.manager.check_integrity()
    life.kill()


@pytest.mark.parametrize("quotas", [{"max_blocks": 5}, {"max_sequences": 2}])
def test_scheduled_requests_wait_for_the_quota(options: dict[str, Any], clock: Any, quotas: dict[str, int]) -> None:
    """Each needs two blocks."""

    async def scenario() -> None:
        life = with_quotas(options, clock, **quotas)
        found = {}
        for name in ("alice", "bob"):
            with calling(name):
                session = life.open()
                await life.call(session, "open_scheduler", scheduler_pb2.OpenSchedulerRequest())
                requests = [
                    scheduler_pb2.ScheduledRequest(request_id=i, token_ids=[i] * 7, max_tokens=1, width=1)
                    for i in (1, 2, 3)
                ]
                await life.call(session, "add_requests", scheduler_pb2.AddRequestsRequest(requests=requests))
                batch = await life.call(session, "schedule", scheduler_pb2.ScheduleRequest())
                found[name] = len(batch.step.query_lens)
        assert found == {"alice": 2, "bob": 3}
        with calling("alice"):
            session = life.open()
            await life.call(session, "open_scheduler", scheduler_pb2.OpenSchedulerRequest())
            large = scheduler_pb2.ScheduledRequest(request_id=1, token_ids=[1] * 18, max_tokens=4, width=3)
            with pytest.raises(QuotaExceededError) as caught:
                await life.call(session, "add_requests", scheduler_pb2.AddRequestsRequest(requests=[large]))
            assert (caught.value.metadata["limit"],) == tuple(quotas)
        life.manager.check_integrity()
        life.kill()

    asyncio.run(scenario())


def test_calls_a_second(tmp_path: Path, clock: Any) -> None:
    tenants = Tenants(written(tmp_path, FILE.replace('["alice"]', '["alice"]\ncalls_per_s = 8.0')), clock.time)

    def accepted(name: str, count: int) -> int:
        done = 0
        with calling(name), contextlib.suppress(QuotaExceededError):
            for _ in range(count):
                tenants.admit(EVERYONE, None)
                done += 1
        return done

    assert (accepted("alice", 9), accepted("bob", 9)) == (8, 9)
    clock.advance(0.0625)
    with calling("alice"), pytest.raises(QuotaExceededError) as caught:
        tenants.admit(EVERYONE, None)
    assert caught.value.metadata == {"tenant": "red", "limit": "calls_per_s", "value": "8", "retry_ms": "63"}
    clock.advance(0.0625)
    assert accepted("alice", 5) == 1
    clock.advance(60)
    assert accepted("alice", 9) == 8


def test_streams_that_attach_count_apart_from_calls(tmp_path: Path, clock: Any) -> None:
    """As many as the tenant has sessions may come at once, also right after these sessions were opened."""
    tenants = Tenants(written(tmp_path, FILE.replace('["alice"]', '["alice"]\ncalls_per_s = 8.0')), clock.time)
    num_sessions = 2

    def accepted(name: str, count: int) -> int:
        done = 0
        with calling(name), contextlib.suppress(QuotaExceededError):
            for _ in range(count):
                tenants.admit_attach({"red": num_sessions}.__getitem__)
                done += 1
        return done

    assert accepted("alice", 20) == 8
    with calling("alice"):
        for _ in range(8):
            tenants.admit(EVERYONE, None)
    with calling("alice"), pytest.raises(QuotaExceededError) as caught:
        tenants.admit_attach({"red": num_sessions}.__getitem__)
    assert caught.value.metadata == {"tenant": "red", "limit": "calls_per_s", "value": "8", "retry_ms": "125"}
    assert accepted("bob", 20) == 20, "it has no quota"
    with calling("grafana"), pytest.raises(PermissionDeniedError):
        tenants.admit_attach({"red": num_sessions}.__getitem__)
    clock.advance(1)
    num_sessions = 100
    assert accepted("alice", 200) == 100
    clock.advance(2)
    assert accepted("alice", 200) == 16


def test_attaches_and_event_streams_over_the_quota_of_calls(tmp_path: Path, raw: Any) -> None:
    text = FILE.replace('["alice"]', '["alice"]\nshares_with = ["blue"]\ncalls_per_s = 8')
    file = written(tmp_path, text.replace('admins = ["ops"]', 'shares_with = ["red"]'))
    with (
        secured(tmp_path, tls=False, tenants=file) as running,
        grpc.insecure_channel(running.address) as plain,
        KVClient(running.address, token=running.tokens["bob"]) as bob,
        bob.session() as session,
    ):
        keys, values = np.ones((2, 2, len(TOKENS), 2, 32), np.float32)
        session.open_step([session.allocate(TOKENS)]).write(keys, values)  # an event for subscribers
        wire = raw.Wire(with_token(plain, running.tokens["alice"]))
        token = wire.unary("open", session_pb2.OpenRequest()).session_token

        def attach() -> str:
            stream = wire.stream()
            reply = stream.attach(token)
            stream.cancel()
            return str(refusal(reply.error).reason)

        def subscribe() -> str:
            events = wire.methods["subscribe"](events_pb2.SubscribeRequest(start_number=1), timeout=20)
            try:
                next(events)
            except grpc.RpcError as error:
                return str(refusal(rpc_status.from_call(cast(Any, error))).reason)
            events.cancel()
            return ""

        for make in (attach, subscribe):
            assert make() == ""
            assert any(make() == "QUOTA_EXCEEDED" for _ in range(1000)), make  # in less than two minutes
        refused = scrape(running.http_port)
        assert value(refused, "kvservice_tenant_refused_calls_total", tenant="red", limit="calls_per_s") == 2


def test_sessions_of_a_process_before_come_back_at_once(options: dict[str, Any], clock: Any) -> None:
    """Their clients all come when the daemon has restarted, in which a second's calls would not be enough."""
    held = HeldFiles()
    Path(options["tenants"]).write_text(FILE.replace('["alice"]', '["alice"]\ncalls_per_s = 8'))
    first = Life(held, clock, **options)
    with calling("alice"):
        tokens = [first.open().token for _ in range(30)]
    first.end()
    second = Life(held, clock, **options)
    with calling("alice"):
        for token in tokens:
            second.dispatcher.admit_attach()
            second.attach(token, reconnects=True)
    second.kill()


@in_loop
async def test_calls_over_quota_are_refused(options: dict[str, Any], clock: Any) -> None:
    life = with_quotas(options, clock, calls_per_s=8)
    with calling("alice"):
        session = life.open()
        calls = (life.call(session, "ping", pool_pb2.PingRequest()) for _ in range(1000))  # in less than two minutes
        found = [await asyncio.gather(one, return_exceptions=True) for one in calls]
        assert any(isinstance(one, QuotaExceededError) for (one,) in found)
    with calling("bob"):
        for _ in range(3):
            await life.call(None, "ping", pool_pb2.PingRequest())
    life.kill()


@in_loop
async def test_repeated_requests_get_their_reply_over_the_quota_of_calls(options: dict[str, Any], clock: Any) -> None:
    life = with_quotas(options, clock, calls_per_s=8)

    async def use_all_calls() -> None:
        with contextlib.suppress(QuotaExceededError):
            for _ in range(1000):  # in less than two minutes
                await life.call(session, "ping", pool_pb2.PingRequest())
            pytest.fail("no call was over the quota")

    with calling("alice"):
        session = life.open()
        reply = await life.allocate(session, 1, TOKENS, request_id=7)
        for _ in range(20):
            await use_all_calls()
            assert await life.allocate(session, 1, TOKENS, request_id=7) == reply
    with calling("bob"), pytest.raises(PermissionDeniedError):
        await life.allocate(session, 1, TOKENS, request_id=7)
    life.kill()


async def to_disk(life: Life, session: Any, *ids: int) -> None:
    request = blocks_pb2.SwapOutRequest(sequence_ids=ids, tier=blocks_pb2.SWAP_TIER_DISK)
    await life.call(session, "swap_out", request)


@in_loop
async def test_sequences_on_the_disk_count(tmp_path: Path, clock: Any) -> None:
    """They come back although the tenant has as many as it may, and also those of a session that is restored."""
    options = tenant_options(tmp_path) | {"disk": str(tmp_path / "disk")}
    life = with_quotas(options, clock, max_sequences=3)
    with calling("alice"):
        session = life.open(detachable=True)
        await life.call(session, "allocate", allocation(TOKENS, 1, 2, 3))
        await to_disk(life, session, 1, 2)
        assert life.sessions.tenant_uses()["red"][3].used == 3
        with pytest.raises(QuotaExceededError) as caught:
            await life.call(session, "allocate", allocation(TOKENS, 4))
        assert over(caught.value) == ("red", "max_sequences", "3", "3", "1")
        can = await life.call(session, "can_swap_in", blocks_pb2.CanSwapInRequest(sequence_ids=[1, 2]))
        assert can.status == blocks_pb2.ALLOC_STATUS_OK
        await life.call(session, "swap_in", blocks_pb2.SwapInRequest(sequence_ids=[1]))
        assert life.sessions.tenant_uses()["red"][3].used == 3
        await detach(life, session)
        assert life.sessions.tenant_uses()["red"][3].used == 0
        other = life.open()
        await life.call(other, "allocate", allocation(TOKENS, 1))
        with pytest.raises(QuotaExceededError) as caught:
            await resume(life, session.token)
        assert over(caught.value) == ("red", "max_sequences", "3", "3", "1")
        await life.call(other, "free", blocks_pb2.FreeRequest(sequence_ids=[1]))
        again = await resume(life, session.token)
        assert ([*again.namespace.rows], [*again.namespace.on_disk]) == ([3, 1], [2])
    life.manager.check_integrity()
    life.kill()


@in_loop
async def test_bytes_on_the_disk_over_quota(tmp_path: Path, clock: Any) -> None:
    """The files of saved sessions and of swapped sequences count, also after a reboot. Other tenants save theirs."""
    options = tenant_options(tmp_path) | {"disk": str(tmp_path / "disk")}
    life = with_quotas(options, clock, max_disk_bytes=10 * 4096)
    with calling("alice"):
        session = life.open(detachable=True)
        for number in (1, 2, 3):
            await life.compute(session, number, [number] * 4)  # three sectors: a block, the header and the manifest
        await to_disk(life, session, 1)
        await to_disk(life, session, 2)
        await detach(life, session)
        used = life.sessions.tenant_uses()["red"][10].used
        assert (used, used) == (9 * 4096, life.core.saved.stats().used_bytes)
    life.kill()
    life = Life(clock=clock, **options)
    with calling("alice"):
        session = await resume(life, session.token)
        assert life.sessions.tenant_uses()["red"][10].used == used
        refused = (to_disk(life, session, 3), life.call(session, "detach", DURABLE))
        for one in refused:
            with pytest.raises(QuotaExceededError) as caught:
                await one
            assert over(caught.value) == ("red", "max_disk_bytes", f"{10 * 4096}", f"{int(used)}", f"{3 * 4096}")
    with calling("bob"):
        bob = life.open()
        await life.compute(bob, 1, TOKENS)
        await detach(life, bob)
    life.kill()


DURABLE = session_pb2.DetachRequest(ttl_s=60, durable=True)


@in_loop
async def test_detached_sessions_that_are_being_saved_or_restored_count(tmp_path: Path, clock: Any) -> None:
    options = tenant_options(tmp_path) | {"disk": str(tmp_path / "disk")}
    life = with_quotas(options, clock, max_detached_sessions=1)
    with calling("alice"):
        one, other = life.open(), life.open()
        calls = [life.call(session, "detach", DURABLE) for session in (one, other)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(answer, QuotaExceededError) for answer in found] == [False, True]
        await life.call(one, "ping", pool_pb2.PingRequest())
        life.sessions.detach(one, end_stream)
        await settle()
        await detach(life, other)
        assert not len(life.sessions)
        restored = await asyncio.gather(
            *[resume(life, session.token) for session in (one, other)], return_exceptions=True
        )
        assert sorted(isinstance(answer, QuotaExceededError) for answer in restored) == [False, True]
    life.kill()


@in_loop
async def test_namespaces_of_the_store_over_quota(options: dict[str, Any], clock: Any) -> None:
    """A tenant with too many replaces its own, as long as nobody uses them, and never another's."""
    life = with_quotas(options, clock, max_store_namespaces=2)

    async def opened(session: Any, model: str) -> None:
        request = store_pb2.OpenNamespaceRequest(namespace=identity(model))
        await life.call(session, "store_open_namespace", request)

    with calling("bob"):
        for model in "abc":
            await opened(life.open(), model)
    with calling("alice"):
        first, second = life.open(), life.open()
        await opened(first, "a")
        await opened(second, "b")
        await opened(second, "b")
        with pytest.raises(QuotaExceededError) as caught:
            await opened(second, "c")
        assert over(caught.value) == ("red", "max_store_namespaces", "2", "2", "1")
        finish(life.sessions.close_in_slices(first))
        await opened(second, "c")
    assert life.core.store is not None
    found = [(one.identity.tenant, one.identity.model) for one in life.core.store.blocks]
    assert found == [("blue", "a"), ("blue", "b"), ("blue", "c"), ("red", "b"), ("red", "c")]
    assert life.sessions.tenant_uses()["red"][9].used == 2
    life.kill()


@in_loop
async def test_pins_over_quota(options: dict[str, Any], clock: Any) -> None:
    life = with_quotas(options, clock, max_pins=2)
    pin = blocks_pb2.PinRequest(token_ids=TOKENS, ttl_s=60)
    with calling("alice"):
        one, other = life.open(), life.open()
        await life.compute(one, 1, TOKENS)
        first = await life.call(one, "pin", pin)
        await life.call(other, "pin", pin)
        with pytest.raises(QuotaExceededError) as caught:
            await life.call(one, "pin", pin)
        assert over(caught.value) == ("red", "max_pins", "2", "2", "1")
        await life.call(one, "unpin", blocks_pb2.UnpinRequest(pin_id=first.pin_id))
        await life.call(other, "pin", pin)
    with calling("bob"):
        bob = life.open()
        await life.compute(bob, 1, TOKENS)
        for _ in range(3):
            await life.call(bob, "pin", pin)
    assert life.sessions.tenant_uses()["red"][6].used == 2
    life.kill()
