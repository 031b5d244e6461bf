"""A store is mapped as the daemon allows it, and the log says when descriptors or memory have run out."""

from __future__ import annotations

import errno
import os
import resource
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_calls import Send, around_calls, failing_calls, seen_calls
from cutting_proxy import CuttingProxy
from each_row import each_row
from store_daemons import BLOCK_BYTES, OpenStore, blocks_of, keys_of, new_namespace
from waiting import until

from kvservice import _ext
from kvservice.client import KVClient, PutStatus
from kvservice.errors import (
    ConnectionLostError,
    InvalidArgumentError,
    QuotaExceededError,
    RegionsNotAllowedError,
    ResourceExhaustedError,
    StoreNotSharedError,
)

NO_WRITER = QuotaExceededError("there are 64 writers", limit="writers", value=64)
NO_DESCRIPTOR = "this process has no file descriptor left"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


def test_one_call_maps_what_the_daemon_shares(store_daemon: OpenStore, caplog: pytest.LogCaptureFixture) -> None:
    with each_row() as row:
        for share_store, writable in (("write", True), ("auto", True), ("read", False)):
            with row(share_store), KVClient(store_daemon(share_store).address) as client, seen_calls() as seen:
                with client.store(new_namespace()) as store:
                    assert store.memory is not None
                    assert store.memory.writable == writable
                assert [one.writable for name, one in seen if name == "store_map_store"] == [writable]
    assert warnings(caplog) == []


def test_a_store_that_is_not_shared_is_not_asked_for(store_daemon: OpenStore, caplog: pytest.LogCaptureFixture) -> None:
    with KVClient(store_daemon("off").address) as client, seen_calls() as seen:
        with pytest.raises(StoreNotSharedError, match="share-store off"):
            client.store(new_namespace(), transport="mapped")
        assert "store_map_store" not in [name for name, _ in seen]
    with KVClient(store_daemon("write").address) as client:
        refusal = {"store_map_store": StoreNotSharedError("not to this user")}
        with failing_calls({**refusal}), pytest.raises(StoreNotSharedError, match="user"):
            client.store(new_namespace(), transport="mapped")
        with failing_calls({**refusal}), client.store(new_namespace()) as store:
            assert store.transport == "region"
        refusal = {"store_map_store": StoreNotSharedError("not for writing", field="writable")}
        with failing_calls({**refusal}), client.store(new_namespace()) as store:
            assert store.memory is not None
            assert not store.memory.writable
    assert warnings(caplog) == []


def test_a_store_is_shared_on_the_unix_socket_only(
    store_daemon: OpenStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The proxy hands no descriptors over, as little as a connection over TCP does."""
    with (
        CuttingProxy(tmp_path, store_daemon("write").address) as proxy,
        KVClient(proxy.address) as client,
        pytest.raises(StoreNotSharedError),
    ):
        client.store(new_namespace(), transport="mapped")
    assert len(warnings(caplog)) == 1


def test_without_room_for_a_writer_the_store_is_mapped_to_read(
    store_daemon: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        KVClient(store_daemon("write").address) as client,
        failing_calls({"store_map_store": NO_WRITER}),
        client.store(new_namespace()) as store,
    ):
        assert store.memory is not None
        assert not store.memory.writable
    assert warnings(caplog) == ["the block store is not mapped for writing: there are 64 writers"]


class FullTable:
    """Lets this process have no file descriptor left for the nth socket from now on, or for a descriptor that the
    daemon hands over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def no_socket(self, nth: int) -> None:
        make, numbers = socket.socket, iter(range(1000))

        def made(*args: Any, **options: Any) -> socket.socket:
            if next(numbers) == nth:
                raise OSError(errno.EMFILE, "Too many open files")
            return make(*args, **options)

        self._monkeypatch.setattr(socket, "socket", made)

    def no_room(self) -> None:
        receive, limit = socket.socket.recvmsg, resource.getrlimit(resource.RLIMIT_NOFILE)

        def crowded(connection: socket.socket, *args: Any) -> Any:
            resource.setrlimit(resource.RLIMIT_NOFILE, (1, limit[1]))
            try:
                return receive(connection, *args)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limit)

        self._monkeypatch.setattr(socket.socket, "recvmsg", crowded, raising=False)


def test_the_log_says_that_descriptors_have_run_out(store_daemon: OpenStore, caplog: pytest.LogCaptureFixture) -> None:
    """When the client tells the daemon who it is, when it fetches the memory, and when the daemon has none."""
    daemon_has_none = ResourceExhaustedError("the daemon has no file descriptor left")
    with each_row() as row:
        for where in ("first socket", "second socket", "room", "daemon"):
            caplog.clear()
            with (
                row(where),
                KVClient(store_daemon("read").address) as client,
                pytest.MonkeyPatch.context() as patched,
                failing_calls({"store_map_store": daemon_has_none} if where == "daemon" else {}),
            ):
                if where == "room":
                    FullTable(patched).no_room()
                elif where != "daemon":
                    FullTable(patched).no_socket(("first socket", "second socket").index(where))
                with pytest.raises(StoreNotSharedError):
                    client.store(new_namespace(), transport="mapped")
                reason = str(daemon_has_none) if where == "daemon" else NO_DESCRIPTOR
                assert warnings(caplog) == [f"the block store is not mapped, blocks take a slower way: {reason}"]


def test_the_log_says_once_that_blocks_travel_in_messages(
    store_daemon: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    missing = ConnectionLostError("/there.fds: No such file or directory")
    rows = (ResourceExhaustedError("no memory"), 1), (RegionsNotAllowedError("not to you"), 0), (missing, 1)
    with each_row() as row:
        for error, count in rows:
            caplog.clear()

            async def refuse(name: str, request: Any, send: Send, error: Exception = error) -> Any:  # noqa: ARG001
                if name == "create_region":
                    raise error
                return await send()

            with row(error), KVClient(store_daemon("off").address) as client, around_calls(refuse):
                with client.store(new_namespace()) as store:
                    for number in range(2):
                        assert store.put(keys_of(number), blocks_of(number)).tolist() == [PutStatus.DONE]
                        assert store.get(keys_of(number), np.zeros((1, BLOCK_BYTES), np.uint8)).all()
                    assert store.transport == ("region" if isinstance(error, ResourceExhaustedError) else "inline")
                expected = f"blocks of the store travel in messages, which is slow: {error}"
                assert warnings(caplog) == [expected] * count


def test_a_connection_that_is_lost_is_not_taken_for_a_missing_socket(
    store_daemon: OpenStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cuts = [True]

    async def cut(name: str, request: Any, send: Send) -> Any:  # noqa: ARG001
        if name == "create_region" and cuts:
            cuts.clear()
            proxy.cut()
        return await send()

    with (
        CuttingProxy(tmp_path, store_daemon("off").address, handover=True) as proxy,
        KVClient(proxy.address) as client,
        around_calls(cut),
        client.store(new_namespace()) as store,
    ):
        until(lambda: store.reachable)
        assert not cuts
        assert store.transport == "region"
    assert not [line for line in warnings(caplog) if "travel in messages" in line]


def test_what_one_process_has_leased_another_reads(store_daemon: OpenStore) -> None:
    """It maps the same memory, perhaps in another way, and notices when a lease has ended."""
    address = store_daemon("write").address
    namespace = new_namespace()
    with KVClient(address) as one, KVClient(address) as other:
        store, reader = one.store(namespace, timeout_s=30.0), other.store(namespace, timeout_s=30.0)
        store.put(keys_of(1, 2, 3), blocks_of(1, 2, 3))
        lease = store.acquire(keys_of(1, 9, 3))
        assert store.memory is not None
        assert reader.memory is not None
        assert store.memory is not reader.memory
        assert store.memory.identity == reader.memory.identity
        out = np.zeros((2, BLOCK_BYTES), np.uint8)
        assert reader.memory.read(lease.offsets, lease.versions, out).tolist() == [True, True]
        assert np.array_equal(out, blocks_of(1, 3))
        lease.release()
        store.remove(keys_of(3))
        store.put(keys_of(5), blocks_of(5))
        assert reader.memory.read(lease.offsets, lease.versions, out).tolist() == [True, False]
        with pytest.raises(InvalidArgumentError):
            reader.memory.read(lease.offsets, lease.versions, out[:1])
        assert lease.alive
        store.close()
        assert not lease.alive
        reader.close()
    with KVClient(store_daemon("read").address) as another, another.store(namespace) as store:
        assert store.memory is not None
        assert store.memory.identity != reader_identity(address)


def reader_identity(address: str) -> tuple[int, int]:
    with KVClient(address) as client, client.store(new_namespace()) as store:
        assert store.memory is not None
        return store.memory.identity


def test_half_of_the_cores_copy_unless_a_client_says_otherwise(
    store_daemon: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, copy_in = store_daemon("write"), _ext.store_copy_in
    used: list[int] = []

    def counted(*arguments: Any) -> bytes:
        used.append(arguments[-1])
        return copy_in(*arguments)

    monkeypatch.setattr(_ext, "store_copy_in", counted)
    for num_cores in (1, 2, 5, 32, 64):
        cores = set(range(num_cores))
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        for copy_threads in (None, 3):
            with KVClient(daemon.address) as client, client.store(new_namespace(), copy_threads=copy_threads) as store:
                store.put(keys_of(1), blocks_of(1))
    assert used == [1, 3, 1, 3, 2, 3, 16, 3, 16, 3]
