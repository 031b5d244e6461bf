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

import pytest
from other_user import as_user, run_as
from small_pool import SMALL_POOL

from kvservice.client import KVClient
from kvservice.client.threads import finish
from kvservice.config import ServeConfig
from kvservice.errors import InvalidArgumentError, PoolNotSharedError, RegionsNotAllowedError
from kvservice.launch import Daemon
from kvservice.server import session_user
from kvservice.server.clock import Clock, SystemClock
from kvservice.server.fd_passing import TOKEN_S
from kvservice.server.peers import Peer
from kvservice.server.session_user import SessionUser, Trust
from kvservice.v1 import shared_memory_pb2

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
from kvservice.v1 import host_pb2, shared_memory_pb2 as shm
answers = [
    session.call("open_lane", host_pb2.OpenLaneRequest()),
    session.call("create_region", shm.CreateRegionRequest(name="a", byte_size=4096)),
    session.call("map_pool", host_pb2.MapPoolRequest(writable=True)),
    session.call("system_shared_memory_register", shm.SystemSharedMemoryRegisterRequest(
        name="b", key=sys.argv[2], byte_size=4096)),
]
print(json.dumps([getattr(answer, "reason", "done") for answer in answers]))
"""
# Opens each object by name: with a token that identifies the user, and with the same token again.
BY_NAME = """
from kvservice.v1 import shared_memory_pb2 as shm
session = raw_wire.RawSession(raw_wire.Wire(sys.argv[1]))
outcomes = {}
for number, key in enumerate(sys.argv[2:]):
    token = fd_passing.introduce(fd_passing.socket_path(sys.argv[1]), session.token)
    request = shm.SystemSharedMemoryRegisterRequest(name=key, key=key, byte_size=4096, handover_token=token)
    outcomes[key] = getattr(session.call("system_shared_memory_register", request), "reason", "done")
    session.call("system_shared_memory_unregister", shm.SystemSharedMemoryUnregisterRequest(name=key))
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
SILENT = """
path = fd_passing.socket_path(sys.argv[1])
connections = [socket.socket(socket.AF_UNIX) for _ in range(200)]
for connection in connections:
    connection.connect(path)
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def auto() -> Iterator[Daemon]:
    with Daemon(**OPEN_TO_ALL) as running:
        os.chmod(Path(running.address.removeprefix("unix://")).parent, 0o755)
        yield running


@pytest.fixture(scope="module")
def trusting() -> Iterator[Daemon]:
    with Daemon(**OPEN_TO_ALL, allow_client_shm="on", trusted_uids=str(UID)) as running:
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
    transport, logged = json.loads(run_as(UID, TRANSPORT, auto.address))
    assert transport == "inline"
    assert "uses the transport inline, slower than what the daemon offers (lane: " in logged
    assert f"the daemon hands nothing over to user {UID} (allow_client_shm, trusted_uids)" in logged


def test_a_stranger_who_asks_all_the_same_costs_no_memory(auto: Daemon) -> None:
    with shm_object(0o666) as path:
        assert json.loads(run_as(UID, RAW, auto.address, path.name)) == [
            "REGIONS_NOT_ALLOWED", "REGIONS_NOT_ALLOWED", "POOL_NOT_SHARED", "REGIONS_NOT_ALLOWED"
        ]  # fmt: skip
    maps = Path(f"/proc/{auto.process.pid}/maps").read_text()
    assert "kvservice-lane" not in maps
    assert "kvservice-region" not in maps


def test_the_daemons_user_has_a_lane_beside_it(auto: Daemon) -> None:
    with KVClient(auto.address) as client, client.session() as kv, shm_object(0o600) as path:
        assert kv.transport == "lane"
        assert bytes(kv.open_region(path.name, 4096).array(4096, "uint8")) == CONTENT


def test_without_a_token_nothing_is_opened_by_its_name(auto: Daemon) -> None:
    """The client runs as the daemon's own user, but gRPC does not report it, and other users can connect."""
    request = shared_memory_pb2.SystemSharedMemoryRegisterRequest(name="r", byte_size=4096)
    with KVClient(auto.address) as client, client.session() as kv, shm_object(0o600) as path:
        request.key = path.name
        with pytest.raises(RegionsNotAllowedError, match="handover_token"):
            finish(cast(Any, kv._core).call("system_shared_memory_register", request))


def test_who_is_trusted_has_a_lane(trusting: Daemon) -> None:
    assert json.loads(run_as(UID, TRANSPORT, trusting.address)) == ["lane", ""]


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


@pytest.mark.parametrize("way", [BY_NAME, OPEN_REGION], ids=["by name", "client"])
def test_an_object_is_opened_if_its_peer_could(trusting: Daemon, way: str) -> None:
    with contextlib.ExitStack() as stack:
        objects = {stack.enter_context(shm_object(*of)): may for *of, may in OBJECTS}
        outcomes = json.loads(run_as(UID, way, trusting.address, *(path.name for path in objects), groups=(GROUP,)))
        assert outcomes == {path.name: "done" if may else "REGION_NOT_OPENED" for path, may in objects.items()}
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


def test_a_token_is_of_one_session_and_good_once(trusting: Daemon) -> None:
    with (
        KVClient(trusting.address) as client,
        client.session() as one,
        client.session() as other,
        shm_object(0o600) as path,
    ):
        request = shared_memory_pb2.SystemSharedMemoryRegisterRequest(name="r", key=path.name, byte_size=4096)
        request.handover_token = finish(one._core.context.fds.introduce())
        with pytest.raises(InvalidArgumentError, match="handover_token"):
            finish(cast(Any, other._core).call("system_shared_memory_register", request))
        finish(cast(Any, one._core).call("system_shared_memory_register", request))
        request.name = "s"
        with pytest.raises(InvalidArgumentError, match="handover_token"):
            finish(cast(Any, one._core).call("system_shared_memory_register", request))


def test_idle_connections_of_one_user_keep_no_other_out(trusting: Daemon) -> None:
    with as_user(UID, SILENT, trusting.address) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "connected\n"
        with KVClient(trusting.address) as client, client.session() as kv:
            assert kv.transport == "lane"
        process.communicate()


class TestWhoIsKnown:
    """The user of a session, as identified by its introduction."""

    OWN, TRUSTED, STRANGER = (Peer(uid, frozenset()) for uid in (os.geteuid(), 1, 2))

    def user(self, clock: Clock | None = None, **options: Any) -> SessionUser:
        trust = Trust.of(ServeConfig(**{"unix_socket_mode": "0666", "trusted_uids": "1"} | options))
        return SessionUser(trust, clock or SystemClock())

    @pytest.mark.parametrize(
        ("option", "allowed"), [("off", []), ("auto", [OWN]), ("on", [OWN, TRUSTED])], ids=lambda part: str(part)
    )
    def test_who_may_have_lanes_and_regions(self, option: str, allowed: list[Peer]) -> None:
        async def scenario() -> None:
            for peer in (self.OWN, self.TRUSTED, self.STRANGER):
                user = self.user(allow_client_shm=option)
                with pytest.raises(RegionsNotAllowedError):
                    user.check_may_share()
                user.introduce(peer)
                with contextlib.nullcontext() if peer in allowed else pytest.raises(RegionsNotAllowedError):
                    user.check_may_share()

        asyncio.run(scenario())

    @pytest.mark.parametrize("shared", ["off", "read"])
    def test_who_may_map_the_pool(self, shared: str) -> None:
        async def scenario() -> None:
            for peer in (None, self.OWN, self.TRUSTED, self.STRANGER):
                user = self.user(share_pool=shared, allow_client_shm="auto")
                if peer is not None:
                    user.introduce(peer)
                allowed = shared == "read" and peer in (self.OWN, self.TRUSTED)
                with contextlib.nullcontext() if allowed else pytest.raises(PoolNotSharedError):
                    user.check_may_map()

        asyncio.run(scenario())

    def test_where_nobody_else_can_connect_it_is_the_daemons_user(self) -> None:
        user = self.user(unix_socket_mode="0600")
        user.check_may_share()
        assert user.opening_peer(b"").uid == os.geteuid()

    def test_another_client_of_the_session_is_not_known(self) -> None:
        async def scenario() -> None:
            user = self.user(allow_client_shm="on")
            token = user.introduce(self.TRUSTED)
            user.forget()
            with pytest.raises(RegionsNotAllowedError):
                user.check_may_share()
            with pytest.raises(InvalidArgumentError):
                user.opening_peer(token)

        asyncio.run(scenario())

    def test_a_token_is_good_for_so_long_and_so_many_are(self) -> None:
        clock: Any = SimpleNamespace(time=lambda: clock.now, now=1000.0)
        user = self.user(clock)
        tokens = [user.introduce(self.TRUSTED) for _ in range(session_user.MAX_INTRODUCTIONS + 1)]
        with pytest.raises(InvalidArgumentError):
            user.opening_peer(tokens[0])
        clock.now += TOKEN_S
        assert user.opening_peer(tokens[1]) == self.TRUSTED
        clock.now += 0.001
        for token in tokens:
            with pytest.raises(InvalidArgumentError):
                user.opening_peer(token)
