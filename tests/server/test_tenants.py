"""Tenants: they come from the caller's identity, and none of them reaches what is another's."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from click.testing import CliRunner
from daemon_lives import Life
from kept_files import HeldFiles
from raw_store import block, identity, keys
from scraping import scrape, value
from secure_daemon import secured, with_token
from small_pool import SMALL_POOL
from tenant_rig import FILE, NAMES, TOKENS, cached, calling, in_loop, tenant_options, written
from waiting import until

from kvservice.auth import ClientCredentials, add_token
from kvservice.cli import main
from kvservice.client import KVClient, StoreNamespace
from kvservice.config import ServeConfig
from kvservice.errors import (
    InvalidArgumentError,
    KVServiceError,
    PermissionDeniedError,
    PoolNotSharedError,
    StoreNotSharedError,
    UnknownSequenceError,
    UnknownSessionError,
)
from kvservice.health import ask, door_of
from kvservice.server.tenants import SALT_PREFIX, Door, TenantRules, Tenants
from kvservice.v1 import (
    blocks_pb2,
    events_pb2,
    host_pb2,
    inspect_pb2,
    pool_pb2,
    scheduler_pb2,
    session_pb2,
    store_pb2,
)

TIMEOUT_S = 20.0


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return tenant_options(tmp_path)


@pytest.fixture
def life(options: dict[str, Any], clock: Any) -> Iterator[Life]:
    alive = Life(clock=clock, **options)
    yield alive
    alive.kill()


# ---- the file


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("a = 1", "a", "unknown key"),
        ("tenant = 1", "tenant", "must be tables"),
        ('[tenant."a b"]', "tenant.'a b'", "a name has"),
        ("[tenant.a]\nengine = []", "tenant.a.engine", "unknown key"),
        ("[tenant.a]\nengines = 'alice'", "tenant.a.engines", "valid list"),
        ("[tenant.a]\nengines = [1]", "tenant.a.engines.0", "valid string"),
        ("[tenant.a]\nengines = ['']", "tenant.a.engines.0", "at least 1 character"),
        ("[tenant.a]\nmap_pool = 1", "tenant.a.map_pool", "valid boolean"),
        ("[tenant.a]\nunix_socket = 'root'", "tenant.a.unix_socket", "'engine', 'observer' or 'admin'"),
        ("[tenant.a]\nuid = 1000", "tenant.a.uid", "gRPC does not tell the user"),
        ("[tenant.a]\nengines = ['x', 'x']", "tenant.a.engines", "'x' is named twice"),
        ("[tenant.a]\nengines = ['x']\n[tenant.b]\nadmins = ['x']", "tenant.b.admins", "'x' is named twice"),
        (
            "[tenant.a]\nunix_socket = 'engine'\n[tenant.b]\nunix_socket = 'admin'",
            "tenant.b.unix_socket",
            "is a's already",
        ),
        ("[tenant.a]\nshares_with = ['b']", "tenant.a.shares_with", "'b' is no tenant"),
        ("[tenant.a]\nshares_with = ['a']", "tenant.a.shares_with", "twice, or its own"),
        ("[tenant.a]\nshares_with = ['b']\n[tenant.b]", "tenant.a.shares_with", "'b' must name the same tenants"),
        (
            "[tenant.a]\nshares_with = ['b']\nmax_store_bytes = 1\n[tenant.b]\nshares_with = ['a']",
            "tenant.a.max_store_bytes",
            "must be b's",
        ),
        ("[tenant.a]\nmax_sessions = -1", "tenant.a.max_sessions", "greater than or equal to 0"),
        ("[tenant.a]\nmax_sessions = true", "tenant.a.max_sessions", "valid integer"),
        ("[tenant.a]\nmax_sessions = 1.5", "tenant.a.max_sessions", "valid integer"),
        ("[tenant.a]\ncalls_per_s = 7.9", "tenant.a.calls_per_s", "greater than or equal to 8"),
        ("[tenant.a]\ncalls_per_s = nan", "tenant.a.calls_per_s", "finite"),
        (
            "[tenant.a]\nmax_blocks = 9\nguaranteed_blocks = 10",
            "tenant.a.guaranteed_blocks",
            "more than max_blocks = 9",
        ),
        ("[tenant.a", "", "Expected ']'"),
        ("", "tenant", "has no tenant"),
        (f"[tenant.a]\nmax_sessions = {'9' * 5000}", "", "Exceeds the limit"),
        (f"[tenant.a]\nengines = {'[' * 5000}{']' * 5000}", "", "maximum recursion depth"),
    ],
    ids=lambda value: value[:40],
)
def test_a_wrong_file_is_refused_with_the_key(tmp_path: Path, text: str, field: str, message: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(InvalidArgumentError) as caught:
        TenantRules.read(file)
    said = str(caught.value)
    assert said.startswith(f"tenants: {file}: {field}")
    assert message in said


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.chmod(0o620)
    with pytest.raises(InvalidArgumentError, match="others than root"):
        TenantRules.read(file)
    with pytest.raises(InvalidArgumentError, match="No such file"):
        TenantRules.read(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(InvalidArgumentError, match="is not a regular file"):
        TenantRules.read(tmp_path / "pipe")  # nobody writes to it


def test_names_need_a_daemon_that_asks_for_them(tmp_path: Path) -> None:
    config = ServeConfig(**SMALL_POOL, tenants=str(written(tmp_path)))
    with pytest.raises(InvalidArgumentError, match="set auth_tokens or tls_client_ca"):
        Tenants.of(config)
    assert Tenants.of(ServeConfig()) is None


# ---- what is kept apart


def test_a_session_has_the_tenant_of_its_caller(life: Life) -> None:
    for named in ("", "red"):
        with calling("alice"):
            assert life.open(tenant=named).tenant == "red"
    with calling("alice"), pytest.raises(PermissionDeniedError) as caught:
        life.open(tenant="blue")
    assert (caught.value.field, caught.value.metadata) == ("tenant", {"tenant": "red"})
    assert len(life.sessions) == 2
    with calling(door=Door.UNIX):
        assert life.open().tenant == "local"
    with calling(door=Door.OWN):
        assert life.open().tenant == ""
    for name in ("carol", ""):  # a token of no tenant, and TCP without any
        with calling(name), pytest.raises(PermissionDeniedError, match="belongs to no tenant"):
            life.open()


@in_loop
async def test_the_prefix_cache_of_a_tenant_is_its_own(life: Life) -> None:
    """Another tenant who knows the tokens finds and gets nothing, by any call. The owner finds all."""
    with calling("alice"):
        alice = life.open()
        await life.compute(alice, 1, TOKENS)
        again = life.open()
        assert await cached(life, again) == 12
        assert (await life.allocate(again, 1, TOKENS)).num_cached_tokens == [8]
    others = {"bob": calling("bob"), "unix": calling(door=Door.UNIX), "operator": calling(door=Door.OWN)}
    for context in others.values():
        with context:
            other = life.open()
            assert await cached(life, other) == 0
            assert (await life.allocate(other, 1, TOKENS)).num_cached_tokens == [0]
    with calling("bob"):
        bob = life.open()
        with pytest.raises(KVServiceError) as caught:
            await life.call(bob, "pin", blocks_pb2.PinRequest(token_ids=TOKENS, ttl_s=1))
        assert caught.value.reason == "NOT_COMPUTED"
        with pytest.raises(UnknownSequenceError):
            await life.call(bob, "free", blocks_pb2.FreeRequest(sequence_ids=[1]))
        await life.compute(bob, 1, TOKENS, seed=1)
        assert await cached(life, bob) == 12
    with calling("alice"):
        assert (await life.read(again, 1, 8) == await life.read(alice, 1, 8)).all()
    life.manager.check_integrity()


@in_loop
async def test_a_client_cannot_name_the_key_of_another_tenant(life: Life) -> None:
    with calling("alice"):
        alice = life.open()
        await life.compute(alice, 1, TOKENS)
        assert alice.tenancy.salt
        assert await cached(life, alice, (0, b"an adapter")) == 0
        ((_, salt),) = alice.tenancy.salt
    with calling("bob"):
        bob = life.open()
        named = [blocks_pb2.ExtraKey(position=0, key=b"mine"), blocks_pb2.ExtraKey(position=0, key=salt)]
        with pytest.raises(InvalidArgumentError) as caught:
            await cached(life, bob, (0, b"mine"), (0, salt))
        assert caught.value.field == "extra_keys[1]"
        one = blocks_pb2.SequenceAllocation(sequence_id=1, token_ids=TOKENS, extra_keys=named)
        await life.call(bob, "open_scheduler", scheduler_pb2.OpenSchedulerRequest())
        scheduled = scheduler_pb2.ScheduledRequest(
            request_id=1, token_ids=TOKENS, max_tokens=1, width=1, extra_keys=named
        )
        calls: dict[str, tuple[Any, str]] = {
            "allocate": (blocks_pb2.AllocateRequest(sequences=[one]), "sequences[0]."),
            "can_allocate": (blocks_pb2.CanAllocateRequest(sequences=[one]), "sequences[0]."),
            "add_requests": (scheduler_pb2.AddRequestsRequest(requests=[scheduled]), "requests[0]."),
            "pin": (blocks_pb2.PinRequest(token_ids=TOKENS, extra_keys=named, ttl_s=1), ""),
        }
        for method, (request, inside) in calls.items():
            with pytest.raises(InvalidArgumentError, match="the daemon's own") as caught:
                await life.call(bob, method, request)
            assert caught.value.field == f"{inside}extra_keys[1]"
    assert salt.startswith(SALT_PREFIX)


@in_loop
async def test_requests_of_a_scheduler_share_within_the_tenant(life: Life) -> None:
    with calling("alice"):
        await life.compute(life.open(), 1, TOKENS)
    found = {}
    for name in ("alice", "bob"):
        with calling(name):
            session = life.open()
            await life.call(session, "open_scheduler", scheduler_pb2.OpenSchedulerRequest())
            request = scheduler_pb2.ScheduledRequest(request_id=1, token_ids=TOKENS, max_tokens=1, width=1)
            await life.call(session, "add_requests", scheduler_pb2.AddRequestsRequest(requests=[request]))
            batch = await life.call(session, "schedule", scheduler_pb2.ScheduleRequest())
            found[name] = list(batch.step.query_lens)
    assert found == {"alice": [4], "bob": [12]}


async def opened_store(life: Life, session: Any) -> int:
    request = store_pb2.OpenNamespaceRequest(namespace=identity())
    return int((await life.call(session, "store_open_namespace", request)).namespace_id)


@in_loop
async def test_the_store_of_a_tenant_is_its_own(life: Life) -> None:
    sessions, ids = {}, {}
    for name in ("alice", "bob", "ops"):
        with calling(name):
            sessions[name] = life.open()
            ids[name] = await opened_store(life, sessions[name])

    async def call(name: str, method: str, request: Any) -> Any:
        request.namespace_id = ids[name]
        with calling(name):
            return await life.call(sessions[name], method, request)

    await call("alice", "store_batch_put", store_pb2.BatchPutRequest(keys=keys(1), data=block(1)))
    assert (await call("bob", "store_lookup", store_pb2.LookupRequest(keys=keys(1)))).found == b"\0"
    assert (await call("bob", "store_acquire", store_pb2.AcquireRequest(keys=keys(1)))).lease_id == 0
    assert (await call("bob", "store_remove", store_pb2.RemoveRequest(keys=keys(1)))).num_blocks == 0
    with pytest.raises(PermissionDeniedError, match="with the role admin"):
        await call("bob", "store_clear", store_pb2.ClearRequest())
    assert (await call("ops", "store_clear", store_pb2.ClearRequest())).num_blocks == 0, "its own tenant's"
    for name, request in (
        ("map_pool", host_pb2.MapPoolRequest()),
        ("store_map_store", store_pb2.MapStoreRequest()),
    ):
        with calling("bob"), pytest.raises((PoolNotSharedError, StoreNotSharedError), match="not for tenant blue"):
            await life.call(sessions["bob"], name, request)
    assert (await call("alice", "store_lookup", store_pb2.LookupRequest(keys=keys(1)))).found == b"\1"


@in_loop
async def test_tenants_share_if_both_say_so(tmp_path: Path, options: dict[str, Any]) -> None:
    shares = FILE.replace('["alice"]', '["alice"]\nshares_with = ["blue"]\nmap_pool = true\nmap_store = true')
    written(tmp_path, shares.replace('admins = ["ops"]', 'admins = ["ops"]\nshares_with = ["red"]'))
    life = Life(**options)
    with calling("alice"):
        alice = life.open()
        await life.compute(alice, 1, TOKENS)
        own = await opened_store(life, alice)
        put = store_pb2.BatchPutRequest(namespace_id=own, keys=keys(1), data=block(1))
        await life.call(alice, "store_batch_put", put)
    with calling("bob"):
        bob = life.open()
        assert await cached(life, bob) == 12
        found = store_pb2.LookupRequest(namespace_id=await opened_store(life, bob), keys=keys(1))
        assert (await life.call(bob, "store_lookup", found)).found == b"\1"
    with calling(door=Door.UNIX):
        assert await cached(life, life.open()) == 0
    assert (alice.tenancy.map_pool, alice.tenancy.map_store, bob.tenancy.map_pool) == (True, True, False)
    life.kill()


@in_loop
async def test_events_of_a_tenant_are_for_those_who_share(life: Life) -> None:
    """Blocks that several tenants lose at once are reported to each apart. Without a domain all is reported."""
    own: dict[str, list[bytes]] = {}
    for name in ("alice", "bob"):
        with calling(name):
            session = life.open()
            await life.compute(session, 1, TOKENS)
            put = store_pb2.BatchPutRequest(namespace_id=await opened_store(life, session), keys=keys(1), data=block(1))
            await life.call(session, "store_batch_put", put)
            own[name] = [life.manager.block_hash(one) for one in life.manager.device.index.blocks.values()][-3:]
            await life.call(session, "free", blocks_pb2.FreeRequest(sequence_ids=[1]))
    with calling(door=Door.OWN):
        await life.allocate(life.open(), 1, [9] * 4 * 64)

    async def seen(domain: str | None) -> list[tuple[str, list[bytes]]]:
        found: list[tuple[str, list[bytes]]] = []
        async with contextlib.aclosing(life.events.subscribe(subscribe, lambda: domain)) as batches:
            while len(found) < (3 if domain else 5):
                (event,) = events_pb2.KVEventBatch.FromString(await anext(batches)).events
                kind = str(event.WhichOneof("event"))
                hashes = getattr(getattr(event, kind), "block_hashes", [])
                found.append((kind, list(hashes)))
        return found

    subscribe = events_pb2.SubscribeRequest(start_number=1)
    for name, domain in (("alice", "red"), ("bob", "blue")):
        stored, store, removed = await seen(domain)
        assert (stored, store[0]) == (("block_stored", own[name]), "store_blocks_stored")
        assert (removed[0], set(removed[1])) == ("block_removed", set(own[name]))
    kinds, hashes = zip(*await seen(None), strict=True)
    assert kinds[-1] == "block_removed"
    assert set(hashes[-1]) == {*own["alice"], *own["bob"]}


def test_a_session_is_its_tenants(life: Life) -> None:
    """Callers without a name are told apart by their door."""
    with calling(door=Door.UNIX):
        local = life.open()
    with calling(door=Door.OWN):
        own = life.open()
        with pytest.raises(UnknownSessionError):
            life.attach(local.token)
    with calling(), pytest.raises(UnknownSessionError):
        life.attach(local.token)
    with calling(door=Door.UNIX):
        with pytest.raises(UnknownSessionError):
            life.attach(own.token)
        assert life.attach(local.token) is local


@in_loop
async def test_roles(life: Life) -> None:
    everyone = {"get_stats": pool_pb2.GetStatsRequest(), "ping": pool_pb2.PingRequest()}
    with calling("grafana"):
        for name, request in everyone.items():
            await life.call(None, name, request)
        with pytest.raises(PermissionDeniedError, match="with the role engine"):
            await life.call(None, "open", session_pb2.OpenRequest())
    sessions = {}
    for name in ("alice", "dual", "ops"):
        with calling(name):
            await life.call(None, "open", session_pb2.OpenRequest())
            sessions[name] = life.open()
            for method, request in everyone.items():
                await life.call(None, method, request)
    for name in ("alice", "dual"):
        with calling(name), pytest.raises(PermissionDeniedError, match="with the role admin"):
            await life.call(sessions[name], "reset_prefix_cache", blocks_pb2.ResetPrefixCacheRequest())
    with calling("alice"), pytest.raises(PermissionDeniedError, match="with the role admin or observer"):
        await life.call(None, "get_snapshot", inspect_pb2.GetSnapshotRequest())
    with calling("ops"):
        await life.call(sessions["ops"], "reset_prefix_cache", blocks_pb2.ResetPrefixCacheRequest())
        with pytest.raises(PermissionDeniedError, match="another tenant's now"):
            await life.call(sessions["alice"], "get_stats", pool_pb2.GetStatsRequest())


@in_loop
async def test_sessions_are_their_tenants_after_a_restart(tmp_path: Path, options: dict[str, Any]) -> None:
    held = HeldFiles()
    first = Life(held, **options)
    with calling("alice"):
        alice = first.open(detachable=True)
        await first.compute(alice, 1, TOKENS)
    first.end()
    written(tmp_path, FILE.replace('["alice"]', '["carol"]').replace('["ops"]', '["ops", "alice"]'))
    second = Life(held, **options)
    with calling("alice"), pytest.raises(UnknownSessionError):
        second.attach(alice.token)
    with calling("bob"):
        assert await cached(second, second.open()) == 0
    second.end()
    written(tmp_path)
    third = Life(held, **options)
    with calling("alice"):
        session = third.attach(alice.token, reconnects=True)
        assert await cached(third, session) == 12
    third.end()
    without = Life(held)
    assert "tenants" in without.core.report.reason, "what clients store by names of their own begins empty"
    without.kill()


SHARING = FILE.replace('["alice"]', '["alice"]\nshares_with = ["blue"]').replace(
    'admins = ["ops"]', 'admins = ["ops"]\nshares_with = ["red"]'
)


def test_a_daemon_with_tenants(tmp_path: Path, raw: Any) -> None:
    """One daemon's life: callers by token, at the unix socket and at the operator's door, and new contents of the
    file."""
    tokens = {name: add_token(tmp_path / "tokens", name) for name in NAMES if name not in ("alice", "bob")}
    file = written(tmp_path, FILE.replace('["ops"]', '["ops"]\nmax_sessions = 2'))
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(secured(tmp_path, tls=False, tenants=file))
        tokens |= running.tokens
        plain = stack.enter_context(grpc.insecure_channel(running.address))
        wires = {name: raw.Wire(with_token(plain, token)) for name, token in tokens.items()}
        wires[""] = raw.Wire(stack.enter_context(grpc.insecure_channel(running.daemon.address)))
        wires["own"] = raw.Wire(stack.enter_context(grpc.insecure_channel(door_of(running.daemon.address))))
        log = running.daemon.log

        refused = wires["alice"].unary("open", session_pb2.OpenRequest(tenant="blue"))
        assert (refused.code, refused.reason, refused.field) == ("PERMISSION_DENIED", "PERMISSION_DENIED", "tenant")
        assert wires["carol"].unary("ping", pool_pb2.PingRequest()).code == "PERMISSION_DENIED"
        with pytest.raises(grpc.RpcError) as caught:
            wires["carol"].stream().send("ping", pool_pb2.PingRequest())
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        alice, bob = (stack.enter_context(KVClient(running.address, token=tokens[name])) for name in ("alice", "bob"))
        mine, theirs = alice.session("engine"), bob.session("engine")
        sequence = mine.allocate(TOKENS)
        keys, values = np.ones((2, 2, len(TOKENS), 2, 32), np.float32)
        mine.open_step([sequence]).write(keys, values)
        assert (mine.match_prefix(TOKENS), theirs.match_prefix(TOKENS)) == (12, 0)
        foreign = wires["bob"].unary("close", session_pb2.CloseRequest(session_token=mine.token))
        assert (foreign.code, foreign.reason) == ("NOT_FOUND", "UNKNOWN_SESSION")

        namespace = StoreNamespace("m", 4096)
        with KVClient(running.daemon.address) as local, local.store(namespace) as store, bob.store(namespace) as blue:
            block_bytes, found = np.ones((1, 4096), np.uint8), np.zeros((1, 4096), np.uint8)
            store.put([bytes(32)], block_bytes)
            assert store.get([bytes(32)], found).all(), "although it may not map the store"
            assert (found == block_bytes).all()
            assert blue.lookup([bytes(32)]).num_leading == 0

        subscribe = events_pb2.SubscribeRequest(start_number=1)
        with pytest.raises(grpc.RpcError) as caught:
            next(wires["carol"].methods["subscribe"](subscribe, timeout=TIMEOUT_S))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        for name in ("own", "ops"):
            shown = wires[name].unary("get_snapshot", inspect_pb2.GetSnapshotRequest(max_sessions=10))
            assert {one.tenant for one in shown.sessions} == {"red", "blue"}
        for search in ("", "1", "red"):
            request = inspect_pb2.GetSnapshotRequest(search=search)
            assert not [*wires["grafana"].unary("get_snapshot", request).sequences], "red has one, blue has none"
        (other,) = wires["grafana"].unary("get_snapshot", inspect_pb2.GetSnapshotRequest()).sessions
        assert (other.session_id, other.tenant) == (theirs.session_id, "blue")
        assert wires["alice"].unary("get_snapshot", inspect_pb2.GetSnapshotRequest()).code == "PERMISSION_DENIED"
        raw.RawSession(wires["bob"])
        refusals = [wires["bob"].unary("open", session_pb2.OpenRequest()) for _ in range(2)]
        assert {one.reason for one in refusals} == {"QUOTA_EXCEEDED"}
        shown = CliRunner().invoke(main, ["tenants", "--address", running.daemon.address, "--json"])
        quotas = {one["name"]: {of["limit"]: of for of in one["quotas"]} for one in json.loads(shown.output)["tenants"]}
        assert quotas["blue"]["sessions"] == {"limit": "sessions", "used": 2.0, "value": 2.0, "refused": 2}
        assert quotas["red"]["sequences"] == {"limit": "sequences", "used": 1.0, "value": None, "refused": 0}
        assert quotas["red"]["blocks"]["used"] == 3.0
        assert [*quotas] == ["red", "blue", "local"]
        (tmp_path / "token").write_text(tokens["grafana"])
        own = ["--address", running.address, "--token-file", str(tmp_path / "token")]
        table = CliRunner().invoke(main, ["tenants", *own]).output
        assert re.search(r"blue +sessions +2 +2 +2 *\n", table), table
        assert "red" not in table, "an observer sees its own tenant"
        for token, said in ((tokens["alice"], "is for callers with the role admin or observer"), ("none", "token")):
            (tmp_path / "token").write_text(token)
            for command in (["tenants"], ["top", "--once"]):
                done = CliRunner().invoke(main, [*command, *own])
                assert done.exit_code == 1
                assert re.match(rf"Error: {running.address} refuses: .*{said}", done.output), done.output
        samples = scrape(running.http_port)
        assert value(samples, "kvservice_tenant_quota", tenant="blue", limit="sessions") == 2
        assert value(samples, "kvservice_tenant_quota_used", tenant="red", limit="blocks") == 3
        assert value(samples, "kvservice_tenant_refused_calls_total", tenant="blue", limit="sessions") == 2

        names = ("ops", "alice", "grafana")
        events, red, blue = (wires[name].methods["subscribe"](subscribe, timeout=60) for name in names)
        assert next(events).number == next(red).number == 1, "an engine and an admin"
        theirs.open_step([theirs.allocate(TOKENS)]).write(keys, values)
        assert next(blue).number > 1, "the first events that an observer sees are its own tenant's"

        file.write_text("[tenant.red]\nengine = []")
        until(lambda: "tenant.red.engine: unknown key" in log.read_text())
        asked = ask(running.daemon.address, TIMEOUT_S, ClientCredentials())
        assert not asked.reason
        assert "tenant.red.engine: unknown key" in asked.note
        assert mine.match_prefix(TOKENS) == 12, "the tenants are as before"

        local = raw.RawSession(wires[""])
        file.write_text(SHARING.replace('unix_socket = "engine"', "").replace('admins = ["ops"]', "admins = []"))
        with pytest.raises(grpc.RpcError) as caught:
            next(local.stream.replies)
        assert caught.value.code() is grpc.StatusCode.ABORTED
        until(lambda: "ended: its tenant shares with others than before" in log.read_text())
        with alice.session() as one, bob.session() as other:
            assert one.match_prefix(TOKENS) == other.match_prefix(TOKENS) == 0, "nothing from before is shared"
            sequence = one.allocate(TOKENS)
            one.open_step([sequence]).write(keys, values)
            assert other.match_prefix(TOKENS) == 12
        with pytest.raises(grpc.RpcError) as caught:
            for _ in events:
                pass
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "alice of tenant red connected from ipv4" in log.read_text()
        assert "carol belongs to no tenant" in log.read_text()
        assert not ask(running.daemon.address, TIMEOUT_S, ClientCredentials()).note

        with alice.store(namespace) as store:
            file.write_text('[tenant.blue]\nengines = ["bob"]\n')
            until(lambda: not store.reachable)
            file.write_text(FILE)
            until(lambda: store.reachable)
            store.put([bytes(32)], block_bytes)
            assert store.lookup([bytes(32)]).num_leading == 1
