"""Shared memory with a user other than the daemon's own, who can connect because of the unix socket's mode."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import fd_socket
import pytest
from daemon_lives import Life
from each_row import each_row
from kept_files import HeldFiles
from manual_clock import ManualClock
from other_user import as_user, run_as
from small_pool import SMALL_POOL

from kvservice.client import KVClient
from kvservice.errors import KVServiceError
from kvservice.launch import Daemon
from kvservice.v1 import host_pb2, regions_pb2, store_pb2

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")

UID, GROUP = 65534, 4242
CONTENT = bytes(range(256)) * 16
OPEN_TO_ALL = SMALL_POOL | {"unix_socket_mode": "0666"}

# Each of these scripts prints a JSON value.
TRANSPORT = """
import logging
logging.basicConfig(format="%(message)s", stream=(log := __import__("io").StringIO()))
with KVClient(sys.argv[1]) as client, client.session() as kv:
    step = kv.open_step([kv.allocate(range(100))])
    ones = np.ones((100, 2, 32), np.float32)
    assert np.allclose(step.extend(0, ones, ones, ones), 1.0)
    print(json.dumps([kv.transport, log.getvalue()]))
"""
# Calls that allocate memory or open an object by name, without the client library, which would not send refused calls.
RAW = """
session = raw_wire.RawSession(raw_wire.Wire(sys.argv[1]))
from kvservice.v1 import host_pb2, regions_pb2
answers = [
    session.call("open_lane", host_pb2.OpenLaneRequest()),
    session.call("create_region", regions_pb2.CreateRegionRequest(name="a", byte_size=4096)),
    session.call("map_pool", host_pb2.MapPoolRequest(writable=True)),
    session.call("register_region", regions_pb2.RegisterRegionRequest(
        name="b", key=sys.argv[2], byte_size=4096)),
]
print(json.dumps([getattr(answer, "reason", "done") for answer in answers]))
"""
# Opens each object by name: with a token that identifies the user, and with the same token again.
BY_NAME = """
from kvservice.v1 import regions_pb2
session = raw_wire.RawSession(raw_wire.Wire(sys.argv[1]))
outcomes = {}
for number, key in enumerate(sys.argv[2:]):
    token = fd_socket.introduce(fd_socket.path_of(sys.argv[1]), session.token)
    request = regions_pb2.RegisterRegionRequest(name=key, key=key, byte_size=4096, handover_token=token)
    outcomes[key] = getattr(session.call("register_region", request), "reason", "done")
    session.call("unregister_region", regions_pb2.UnregisterRegionRequest(name=key))
print(json.dumps(outcomes))
"""
# Opens an object with the client library, and runs a step whose tensors and result are in it.
OPEN_REGION = """
outcomes = {}
with KVClient(sys.argv[1]) as client, client.session() as kv:
    for key in sys.argv[2:]:
        try:
            memory = kv.open_region(key, 4096)
            query = memory.array((2, 2, 32), "float32")
            query[:] = 1
            step = kv.open_step([kv.allocate(range(2))])
            out = memory.array((2, 2, 32), "float32", offset=2048)
            step.extend(0, query, query, query, out=out)
            outcomes[key] = "done" if (out == 1).all() else "wrong"
        except KVServiceError as error:
            outcomes[key] = error.reason
print(json.dumps(outcomes))
"""
# Maps the store, and tries to open the descriptors of its memory again for writing.
STORE = """
from kvservice.client import StoreNamespace
found = []
with KVClient(sys.argv[1]) as client, client.store(StoreNamespace("model", 4096)) as store:
    statuses = store.put([b"k" * 32], np.full((1, 4096), 7, np.uint8))
    out = np.zeros((1, 4096), np.uint8)
    assert store.get([b"k" * 32], out).all() and (out == 7).all()
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.exists(path) and "kvservice-store" in os.readlink(path):
            try:
                os.close(os.open(path, os.O_RDWR))
                found.append("opened")
            except PermissionError:
                found.append("refused")
    print(json.dumps([store.memory.writable, sorted(set(found))]))
"""
SILENT = """
path = fd_socket.path_of(sys.argv[1])
connections = [socket.socket(socket.AF_UNIX) for _ in range(200)]
for connection in connections:
    connection.connect(path)
print("connected", flush=True)
sys.stdin.read()
"""


# Asks for the daemon's health: the operator's door is closed to this user.
HEALTH = """
from kvservice.health import check, door_of
print(json.dumps([door_of(sys.argv[1]) == sys.argv[1], check(sys.argv[1], timeout_s=60)]))
"""


@pytest.fixture(scope="module")
def auto() -> Iterator[Daemon]:
    with open_to_all() as running:
        yield running


@pytest.fixture(scope="module")
def trusting() -> Iterator[Daemon]:
    with open_to_all(allow_client_shm="on", trusted_uids=str(UID)) as running:
        yield running


@contextlib.contextmanager
def open_to_all(**options: Any) -> Iterator[Daemon]:
    with Daemon(**OPEN_TO_ALL | options) as running:
        os.chmod(Path(running.address.removeprefix("unix://")).parent, 0o755)
        yield running


@contextlib.contextmanager
def shm_object(mode: int, uid: int = 0, gid: int = 0) -> Iterator[Path]:
    path = Path("/dev/shm", f"kvservice-test-{os.getpid()}-{mode:o}-{uid}-{gid}")
    path.write_bytes(CONTENT)
    os.chown(path, uid, gid)
    os.chmod(path, mode)
    try:
        yield path
    finally:
        path.unlink()


def test_a_stranger_gets_no_memory_and_a_log_line_that_says_so(auto: Daemon) -> None:
    with shm_object(0o666) as path:
        using, asking = map(json.loads, run_as(UID, TRANSPORT + RAW, auto.address, path.name).splitlines())
    transport, logged = using
    assert transport == "inline"
    assert "uses the transport inline, slower than what the daemon offers (lane: " in logged
    assert f"the daemon hands nothing over to user {UID} (allow_client_shm, trusted_uids)" in logged
    # A stranger who asks all the same costs no memory.
    assert asking == ["REGIONS_NOT_ALLOWED", "REGIONS_NOT_ALLOWED", "POOL_NOT_SHARED", "REGIONS_NOT_ALLOWED"]
    maps = Path(f"/proc/{auto.process.pid}/maps").read_text()
    assert "kvservice-lane" not in maps
    assert "kvservice-region" not in maps


def test_another_user_asks_for_health_at_the_usual_socket(auto: Daemon) -> None:
    assert json.loads(run_as(UID, HEALTH, auto.address)) == [True, True]


def test_the_daemons_user_has_a_lane_beside_it(auto: Daemon) -> None:
    with KVClient(auto.address) as client, client.session() as kv, shm_object(0o600) as path:
        assert kv.transport == "lane"
        assert bytes(kv.open_region(path.name, 4096).array(4096, "uint8")) == CONTENT


def test_without_a_token_nothing_is_opened_by_its_name(auto: Daemon, raw: Any) -> None:
    """The client runs as the daemon's own user, but gRPC does not report it, and other users can connect."""
    with contextlib.closing(raw.Wire(auto.address)) as wire, shm_object(0o600) as path:
        with contextlib.closing(raw.RawSession(wire)) as session:
            assert fd_socket.introduce(fd_socket.path_of(auto.address), session.token)
            answer = session.call("register_region", opening("r", path))
        assert answer.reason == "REGIONS_NOT_ALLOWED"
        assert "handover_token" in answer.message


def opening(name: str, path: Path, token: bytes = b"") -> Any:
    return regions_pb2.RegisterRegionRequest(name=name, key=path.name, byte_size=4096, handover_token=token)


# Mode, owner and group of an object, and whether the other user may open it. That user is in one supplementary group.
OBJECTS = [
    (0o600, 0, 0, False),
    (0o644, 0, 0, False),
    (0o622, 0, 0, False),
    (0o600, UID, 0, True),
    (0o400, UID, 0, False),
    (0o660, 0, GROUP, True),
    (0o660, 0, GROUP + 1, False),
    (0o606, 0, GROUP, False),
    (0o666, 0, 0, True),
]


def test_who_is_trusted_has_a_lane_and_opens_the_objects_that_its_user_could(trusting: Daemon) -> None:
    with contextlib.ExitStack() as stack:
        objects = {stack.enter_context(shm_object(*of)): may for *of, may in OBJECTS}
        names = [path.name for path in objects]
        said = run_as(UID, TRANSPORT + BY_NAME + OPEN_REGION, trusting.address, *names, groups=(GROUP,))
        transport, *outcomes = map(json.loads, said.splitlines())
        assert transport == ["lane", ""]
        expected = {path.name: "done" if may else "REGION_NOT_OPENED" for path, may in objects.items()}
        assert outcomes == [expected, expected], "by name, and with the client library"
        for path, may in objects.items():
            assert may or path.read_bytes() == CONTENT


def test_an_access_control_list_lets_no_one_in(trusting: Daemon) -> None:
    """With an access control list, the group bits of the mode are the mask of the list, not the group's permissions."""
    with shm_object(0o600) as path:
        try:
            # version 2; owner rw, user 4343 rw, group of the object none, mask rw, others none
            entries = [(1, 6, -1), (2, 6, 4343), (4, 0, -1), (16, 6, -1), (32, 0, -1)]
            packed = b"".join(
                tag.to_bytes(2, "little") + perm.to_bytes(2, "little") + (ident & 0xFFFFFFFF).to_bytes(4, "little")
                for tag, perm, ident in entries
            )
            os.setxattr(path, "system.posix_acl_access", (2).to_bytes(4, "little") + packed)
        except OSError as error:
            pytest.skip(f"no access control lists here: {error}")
        os.chown(path, 0, GROUP)
        assert path.stat().st_mode & 0o777 == 0o660
        outcomes = json.loads(run_as(UID, BY_NAME, trusting.address, path.name, groups=(GROUP,)))
        assert outcomes == {path.name: "REGION_NOT_OPENED"}


def test_a_token_is_of_one_session_and_good_once(trusting: Daemon, raw: Any) -> None:
    with (
        contextlib.closing(raw.Wire(trusting.address)) as wire,
        contextlib.closing(raw.RawSession(wire)) as one,
        contextlib.closing(raw.RawSession(wire)) as other,
        shm_object(0o600) as path,
    ):
        token, _ = (fd_socket.introduce(fd_socket.path_of(trusting.address), each.token) for each in (one, other))
        refused = other.call("register_region", opening("r", path, token))
        assert (refused.reason, refused.field) == ("INVALID_ARGUMENT", "handover_token")
        one.ok("register_region", opening("r", path, token))
        refused = one.call("register_region", opening("s", path, token))
        assert (refused.reason, refused.field) == ("INVALID_ARGUMENT", "handover_token")


def test_idle_connections_of_one_user_keep_no_other_out(trusting: Daemon) -> None:
    with as_user(UID, SILENT, trusting.address) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "connected\n"
        with KVClient(trusting.address) as client, client.session() as kv:
            assert kv.transport == "lane"
        process.communicate()


def test_by_default_the_store_is_written_by_the_daemons_own_user_and_read_by_those_it_trusts() -> None:
    with open_to_all(share_store="auto", store_gib=1 / 64, trusted_uids=str(UID)) as daemon:
        assert json.loads(run_as(UID, STORE, daemon.address)) == [False, ["refused"]]
        assert json.loads(run_as(os.geteuid(), STORE, daemon.address)) == [True, ["opened"]]


# ---- the user of a session, as identified by its introduction


OWN, TRUSTED, STRANGER = (
    cast(Any, SimpleNamespace(uid=uid, gids=frozenset(), may_read_and_write=lambda _: True))
    for uid in (os.geteuid(), 1, 2)
)
MAX_INTRODUCTIONS, TOKEN_S = 8, 10.0


@contextlib.contextmanager
def life(clock: ManualClock, **options: Any) -> Iterator[Life]:
    """A daemon to which other users can connect, one of whom is trusted."""
    held = HeldFiles()
    opened = Life(held, clock, **{"unix_socket_mode": "0666", "trusted_uids": "1"} | options)
    yield opened
    opened.kill()
    held.close()


async def refusal(life: Life, session: Any, method: str, request: Any) -> str:
    """Return the reason why a call is refused, or an empty string."""
    try:
        await life.call(session, method, request)
    except KVServiceError as error:
        return error.reason
    return ""


def test_who_may_have_regions_and_the_pool(clock: ManualClock) -> None:
    regions = {"off": [], "auto": [OWN], "on": [OWN, TRUSTED]}
    create = regions_pb2.CreateRegionRequest(name="r", byte_size=4096)

    async def scenario() -> None:
        with each_row() as row:
            for option, may in regions.items():
                for shared in ("off", "read"):
                    with life(clock, allow_client_shm=option, share_pool=shared) as daemon:
                        for peer in (None, OWN, TRUSTED, STRANGER):
                            with row((option, shared, peer)):
                                session = daemon.open()
                                assert await refusal(daemon, session, "create_region", create) == "REGIONS_NOT_ALLOWED"
                                if peer is not None:
                                    session.shared.user.introduce(peer)
                                expected = "" if peer in may else "REGIONS_NOT_ALLOWED"
                                assert await refusal(daemon, session, "create_region", create) == expected
                                may_map = shared == "read" and peer in (OWN, TRUSTED)
                                refused = await refusal(daemon, session, "map_pool", host_pb2.MapPoolRequest())
                                assert refused == ("" if may_map else "POOL_NOT_SHARED")

    asyncio.run(scenario())


def test_who_may_map_the_store(clock: ManualClock) -> None:
    may: dict[str, tuple[list[Any], list[Any]]] = {
        "off": ([], []),
        "read": ([OWN, TRUSTED], []),
        "auto": ([OWN, TRUSTED], [OWN]),
        "write": ([OWN, TRUSTED], [OWN, TRUSTED]),
    }

    async def scenario() -> None:
        with each_row() as row:
            for option, allowed in may.items():
                with life(clock, share_store=option, store_gib=1 / 64) as daemon:
                    for peer in (OWN, TRUSTED, STRANGER):
                        for writable in (False, True):
                            with row((option, peer, writable)):
                                session = daemon.open()
                                session.shared.user.introduce(peer)
                                namespace = store_pb2.StoreNamespace(model="m", layout="l", block_bytes=4096)
                                opened = store_pb2.OpenNamespaceRequest(namespace=namespace)
                                assert await refusal(daemon, session, "store_open_namespace", opened) == ""
                                request = store_pb2.MapStoreRequest(writable=writable)
                                refused = await refusal(daemon, session, "store_map_store", request)
                                assert refused == ("" if peer in allowed[writable] else "STORE_NOT_SHARED")

    asyncio.run(scenario())


def test_where_nobody_else_can_connect_it_is_the_daemons_user(clock: ManualClock) -> None:
    async def scenario() -> None:
        with life(clock, unix_socket_mode="0600") as daemon, shm_object(0o600) as path:
            session = daemon.open()
            create = regions_pb2.CreateRegionRequest(name="r", byte_size=4096)
            assert await refusal(daemon, session, "create_region", create) == ""
            assert await refusal(daemon, session, "register_region", opening("s", path)) == ""

    asyncio.run(scenario())


def test_another_client_of_the_session_is_not_known(clock: ManualClock) -> None:
    async def scenario() -> None:
        with life(clock, allow_client_shm="on") as daemon, shm_object(0o666) as path:
            session = daemon.open(detachable=True)
            token = session.shared.user.introduce(TRUSTED)
            daemon.attach(session.token, holder=2)
            create = regions_pb2.CreateRegionRequest(name="r", byte_size=4096)
            assert await refusal(daemon, session, "create_region", create) == "REGIONS_NOT_ALLOWED"
            session.shared.user.introduce(TRUSTED)
            opened = await refusal(daemon, session, "register_region", opening("s", path, token))
            assert opened == "INVALID_ARGUMENT"

    asyncio.run(scenario())


def test_a_token_is_good_for_so_long_and_so_many_are(clock: ManualClock) -> None:
    async def scenario() -> None:
        with life(clock, allow_client_shm="on") as daemon, shm_object(0o666) as path:
            session = daemon.open()

            async def opened(token: bytes) -> str:
                request = opening(f"r{clock.now}", path, token)
                return await refusal(daemon, session, "register_region", request)

            tokens = [session.shared.user.introduce(TRUSTED) for _ in range(MAX_INTRODUCTIONS + 1)]
            assert await opened(tokens[0]) == "INVALID_ARGUMENT"
            clock.advance(TOKEN_S)
            assert await opened(tokens[1]) == ""
            clock.advance(0.001)
            for token in tokens:
                assert await opened(token) == "INVALID_ARGUMENT"

    asyncio.run(scenario())
