"""Selection of a session's transport: the fastest that the daemon allows, or the requested one."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each_row import each_row
from small_pool import SMALL_POOL

from kvservice.client import KVClient
from kvservice.client.threads import finish
from kvservice.errors import (
    ConnectionLostError,
    KVServiceError,
    PoolNotSharedError,
    QuotaExceededError,
    RegionsNotAllowedError,
)
from kvservice.launch import Daemon
from kvservice.v1 import host_pb2

# ALLOWED: a daemon's configuration, the transport that "auto" selects for a client on the unix socket, and the error,
# type and field, of each transport that the configuration does not allow.
Refused = dict[str, tuple[type[KVServiceError], str]]
NO_REGIONS: Refused = {"lane": (RegionsNotAllowedError, ""), "region": (RegionsNotAllowedError, "")}
NO_POOL: Refused = {"mapped": (PoolNotSharedError, "writable")}
NO_LANE: Refused = {"lane": (QuotaExceededError, "")}
ALLOWED: list[tuple[dict[str, Any], str, Refused]] = [
    ({"allow_client_shm": "auto", "share_pool": "write"}, "lane", {}),
    ({"allow_client_shm": "auto", "share_pool": "write", "max_lanes": 0, "max_pool_mappings": 1}, "mapped", NO_LANE),
    ({"allow_client_shm": "auto", "share_pool": "read", "max_lanes": 0}, "region", NO_LANE),
    ({"allow_client_shm": "off", "share_pool": "write"}, "mapped", NO_REGIONS),
    ({"allow_client_shm": "off", "share_pool": "off"}, "inline", NO_REGIONS | NO_POOL),
]
EVERY = ("lane", "mapped", "region", "inline")


def layer(num_tokens: int) -> list[np.ndarray]:
    return [np.ones((num_tokens, 2, 32), np.float32)] * 3


def check_working(kv: Any) -> None:
    """Check that steps work, also with tensors large enough to be placed in a region."""
    step = kv.open_step([kv.allocate(range(100))])
    np.testing.assert_allclose(step.extend(0, *layer(step.num_tokens)), 1.0)


def await_no_sessions(client: KVClient) -> None:
    deadline = time.monotonic() + 10
    while client.stats().sessions:
        assert time.monotonic() < deadline, "sessions are left over"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("options", "best", "refused"),
    ALLOWED,
    ids=lambda part: "-".join(map(str, part.values())) if part and "share_pool" in part else "",
)
def test_what_is_allowed(
    options: dict[str, Any], best: str, refused: Refused, free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    far = f"127.0.0.1:{free_port}"
    with Daemon(**SMALL_POOL | options, tcp_address=far) as daemon:
        for address in (daemon.address, far):
            with KVClient(address) as client, client.session() as kv:
                assert kv.transport == (best if address != far else "inline")
                check_working(kv)
        if best == "inline":  # nothing is logged of what the daemon does not offer
            assert not [record for record in caplog.records if record.name.startswith("kvservice")]
        for wanted in EVERY:
            with KVClient(daemon.address, transport=wanted) as client:
                if wanted in refused:
                    kind, field = refused[wanted]
                    with pytest.raises(kind) as caught:
                        client.session()
                    assert (type(caught.value), caught.value.field) == (kind, field)
                    await_no_sessions(client)
                    continue
                with client.session() as kv:
                    assert kv.transport == wanted
                    check_working(kv)
            with KVClient(far, transport=wanted) as client:
                if wanted == "inline":
                    with client.session() as kv:
                        assert kv.transport == "inline"
                        check_working(kv)
                else:
                    with pytest.raises((RegionsNotAllowedError, PoolNotSharedError)):
                        client.session()
                    await_no_sessions(client)
        if "max_pool_mappings" in options:
            check_mappings(daemon)


def check_mappings(daemon: Daemon) -> None:
    """One session may have mapped the pool."""
    with KVClient(daemon.address) as client:
        with client.session() as first, client.session() as second:
            assert (first.transport, second.transport) == ("mapped", "region")
            with pytest.raises(QuotaExceededError) as refused:
                second.map_pool()
            assert refused.value.metadata["limit"] == "max_pool_mappings"
            first.map_pool(writable=True)  # the second mapping has the same tables
        with client.session() as third:
            assert third.transport == "mapped"
            check_working(third)


def test_all_sessions_together_share_so_much(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """The limit covers regions that the daemon creates or opens, lanes and tables: all of them cost the daemon
    memory."""
    object_ = Path("/dev/shm", f"kvservice-test-{tmp_path.parent.name}-{tmp_path.name}")
    object_.write_bytes(bytes(4096))
    with (
        Daemon(**SMALL_POOL | {"max_shared_mib": 1}) as daemon,
        KVClient(daemon.address, transport="inline") as client,
        client.session() as one,
        client.session() as other,
    ):
        one.create_region(1 << 20)
        for share in (
            lambda: other.create_region(1),
            lambda: other.open_region(object_.name, 4096),
            lambda: finish(other._core.context.connection.send("open_lane", host_pb2.OpenLaneRequest())),
            lambda: other.map_pool(),
        ):
            with pytest.raises(QuotaExceededError) as refused:
                share()
            assert refused.value.metadata["limit"] == "max_shared_mib"
        with KVClient(daemon.address) as fast, fast.session() as kv:
            assert kv.transport == "inline"
            check_working(kv)
        assert "uses the transport inline" in caplog.text
        assert "all sessions have 1048576 of 1 MiB" in caplog.text
        one.unregister_region()
        other.open_region(object_.name, 4096)
        other.unregister_region()
        other.create_region(1 << 20)
    object_.unlink()


def test_a_session_that_is_closed_keeps_nothing_mapped(daemon: Daemon) -> None:
    """The mappings go away although the session object still exists, because the daemon's limit counts them."""
    gc.disable()
    try:
        with each_row() as row:
            for wanted in EVERY:
                with row(wanted), KVClient(daemon.address, transport=wanted) as client:
                    with client.session() as kv:
                        check_working(kv)
                        transport = weakref.ref(kv._core.calls.transport)
                    assert transport() is None
                    assert kv.transport == "inline"
    finally:
        gc.enable()


@pytest.mark.parametrize("share_pool", ["off", "write"])
def test_who_is_handed_nothing_sends_messages(share_pool: str) -> None:
    """The client runs as a user that the daemon does not trust."""
    with Daemon(**SMALL_POOL | {"share_pool": share_pool, "max_lanes": 1}) as daemon:
        if share_pool == "off":
            check_lanes(daemon)
        Path(f"{daemon.address.removeprefix('unix://')}.fds").unlink()
        with KVClient(daemon.address) as client:
            for _ in range(2):
                with client.session() as kv:
                    assert kv.transport == "inline"
                    check_working(kv)
                    # The session released what could not be passed: it has no region, and a lane can be opened.
                    assert kv.regions() == []
                    finish(kv._core.context.connection.send("open_lane", host_pb2.OpenLaneRequest()))
        for wanted in ("lane", "mapped", "region"):
            if (wanted, share_pool) != ("mapped", "off"):
                with KVClient(daemon.address, transport=wanted) as client:
                    with pytest.raises(ConnectionLostError):
                        client.session()
                    await_no_sessions(client)


def check_lanes(daemon: Daemon) -> None:
    """A session that finds all lanes taken works without one."""
    with KVClient(daemon.address) as client:
        with client.session() as first, client.session() as second:
            assert (first.transport, second.transport) == ("lane", "region")
            check_working(first)
            check_working(second)
        with client.session() as third:
            assert third.transport == "lane"
