"""A link asks for the mapping that the daemon allows, and the log says when descriptors or memory have run out."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvservice.client import fd_passing
from kvservice.client.connection import SessionConnection
from kvservice.client.fd_passing import FdPassing
from kvservice.client.regions import RegionTable
from kvservice.client.store.mapping import StoreMapper
from kvservice.client.store.memory import Geometry, MappedStore
from kvservice.client.store.staging import StoreStaging
from kvservice.client.threads import finish
from kvservice.errors import (
    ConnectionLostError,
    KVServiceError,
    QuotaExceededError,
    RegionsNotAllowedError,
    ResourceExhaustedError,
    StoreNotSharedError,
)

NO_WRITER = QuotaExceededError("there are 64 writers", limit="writers", value=64)
NO_DESCRIPTOR = ResourceExhaustedError("the daemon has no file descriptor left")


class Daemon:
    """Maps a store as `refusals` say: by whether the mapping is for writing. `calls` are the mappings asked for."""

    path: str | None = "/there.fds"

    def __init__(self, **refusals: KVServiceError) -> None:
        self.refusals = refusals
        self.calls: list[bool] = []

    def next_request_id(self) -> int:
        return 1

    async def call(self, _: str, request: Any, __: float) -> Any:
        self.calls.append(request.writable)
        self._refuse("write" if request.writable else "read")
        return SimpleNamespace(handover_token=b"", num_bytes=4096)

    async def introduce_once(self) -> None:
        self._refuse("introduce")

    async def fetch(self, _: bytes, __: int) -> list[int]:
        self._refuse("fetch")
        descriptor = os.memfd_create("store")
        os.truncate(descriptor, 4096)
        return [descriptor]

    def map(self, shared: str) -> MappedStore:
        geometry = Geometry(64, 4096, 64, 64)
        mapper = StoreMapper(cast(SessionConnection, self), cast(FdPassing, self), geometry, shared, 1.0)
        return finish(mapper.open(1))

    def _refuse(self, what: str) -> None:
        if what in self.refusals:
            raise self.refusals[what]


@pytest.mark.parametrize(("shared", "writable"), [("write", True), ("read", False)])
def test_one_call_maps_what_the_daemon_shares(shared: str, writable: bool, caplog: pytest.LogCaptureFixture) -> None:
    daemon = Daemon()
    assert daemon.map(shared).writable == writable
    assert daemon.calls == [writable]
    assert caplog.messages == []


def test_a_store_that_is_not_shared_is_not_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    off, refused, tcp = Daemon(), Daemon(write=StoreNotSharedError("not to this user")), Daemon()
    tcp.path = None
    for daemon, shared, reason in ((off, "off", "share-store off"), (refused, "write", "user"), (tcp, "write", "unix")):
        with pytest.raises(StoreNotSharedError, match=reason):
            daemon.map(shared)
    assert (off.calls, refused.calls, tcp.calls) == ([], [True], [])
    assert caplog.messages == []


def test_without_room_for_a_writer_the_store_is_mapped_to_read(caplog: pytest.LogCaptureFixture) -> None:
    daemon = Daemon(write=NO_WRITER)
    assert not daemon.map("write").writable
    assert caplog.messages == ["the block store is not mapped for writing: there are 64 writers"]


@pytest.mark.parametrize("where", ["introduce", "read", "fetch"])
def test_the_log_says_that_descriptors_have_run_out(where: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(StoreNotSharedError):
        Daemon(**{where: NO_DESCRIPTOR}).map("read")
    assert caplog.messages == [f"the block store is not mapped, blocks take a slower way: {NO_DESCRIPTOR}"]


@pytest.mark.parametrize(
    ("error", "warnings"),
    [
        (ResourceExhaustedError("no memory"), 1),
        (RegionsNotAllowedError("not to you"), 0),
        (ConnectionLostError("/there.fds: No such file or directory"), 1),
    ],
)
def test_the_log_says_once_that_blocks_travel_in_messages(
    error: KVServiceError, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def create(_: int, **__: Any) -> Any:
        raise error

    regions = cast(RegionTable, SimpleNamespace(create=create, connected=True))
    staging = StoreStaging(regions, contextlib.nullcontext(), True)
    for _ in range(2):
        assert finish(staging.room(4096, 64, 1.0)) is None
    assert caplog.messages == [f"blocks of the store travel in messages, which is slow: {error}"] * warnings


def test_a_connection_that_is_lost_is_not_taken_for_a_missing_socket() -> None:
    async def create(_: int, **__: Any) -> Any:
        raise ConnectionLostError("UNAVAILABLE")

    regions = cast(RegionTable, SimpleNamespace(create=create, connected=False))
    staging = StoreStaging(regions, contextlib.nullcontext(), True)
    with pytest.raises(ConnectionLostError):
        finish(staging.room(4096, 64, 1.0))
    assert staging.allowed


def fetch(path: str) -> None:
    fd_passing.fetch(path, b"token", 1)


def introduce(path: str) -> None:
    fd_passing.introduce(path, b"token")


@pytest.mark.parametrize("act", [fetch, introduce])
def test_a_process_without_descriptors_says_so(
    act: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socket", none_left)
    with pytest.raises(ResourceExhaustedError, match="this process"):
        act(str(tmp_path / "fds"))


def test_a_process_without_room_for_a_descriptor_says_so() -> None:
    ours, theirs = socket.socketpair()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ours, theirs:
        socket.send_fds(theirs, [b"\0"], [0])
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, limit[1]))
        try:
            with pytest.raises(ResourceExhaustedError, match="this process"):
                fd_passing._receive(ours, 1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
