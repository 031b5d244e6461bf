"""Start and shutdown of a daemon: which sockets it replaces, and how SIGTERM drains it."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from refused_starts import refusals_to_serve
from waiting import PATIENCE_S, until

from kvservice.client import KVClient, PutStatus, Session, Step, StoreNamespace
from kvservice.environment import missing_environment
from kvservice.errors import ConnectionLostError, DrainingError
from kvservice.launch import Daemon
from kvservice.server.daemon import Drain
from kvservice.v1 import blocks_pb2

POOL: dict[str, Any] = {
    "num_layers": 3,
    "num_kv_heads": 1,
    "head_size": 32,
    "dtype": "float32",
    "num_blocks": 16,
    "swap_space_gib": 0,
}
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def send_layer(step: Step, layer: int) -> np.ndarray:
    kv = np.full((step.num_tokens, 1, 32), 1.0 + layer, np.float32)
    output: np.ndarray = step.extend(layer, kv, kv, kv)
    return output


def begun_step(kv: Session) -> Step:
    step = kv.open_step([kv.allocate([1, 2, 3])])
    send_layer(step, 0)
    return step


def drains(kv: Session) -> bool:
    try:
        kv.allocate([9])
    except DrainingError:
        return True
    return False


def test_a_step_between_two_layers_is_finished_and_nothing_new_is_begun(raw: Any) -> None:
    options = POOL | {"drain_stall_s": 60}
    with Daemon(**options) as daemon, KVClient(daemon.address) as client, client.session() as kv:
        wire = raw.Wire(daemon.address)
        pinning = raw.RawSession(wire)
        step = begun_step(kv)
        waiting = kv.allocate([4, 5])
        unbegun = kv.open_step([waiting])
        computed = kv.allocate(list(range(16)))
        kv.open_step([computed]).write(*(np.ones((3, 16, 1, 32), np.float32),) * 2)
        pinned = blocks_pb2.PinRequest(token_ids=range(16), ttl_s=60, request_id=99)
        pin = pinning.ok("pin", pinned)
        states: queue.SimpleQueue[int] = queue.SimpleQueue()
        watching = threading.Thread(target=_watch, args=(daemon.address, states))
        watching.start()
        assert states.get(timeout=PATIENCE_S) == SERVING

        daemon.process.send_signal(signal.SIGTERM)

        assert states.get(timeout=PATIENCE_S) == NOT_SERVING
        until(lambda: drains(kv))
        for refused in (
            lambda: client.session(),
            lambda: kv.append([waiting], [6]),
            lambda: kv.fork(waiting),
            lambda: kv.open_step([waiting]),
            lambda: send_layer(unbegun, 0),
        ):
            with pytest.raises(DrainingError):
                refused()
        assert daemon.process.poll() is None
        # A repeated request still gets its reply.
        assert pinning.ok("pin", pinned).pin_id == pin.pin_id
        pinning.stream.cancel()
        wire.close()
        for layer in (1, 2):
            np.testing.assert_array_equal(send_layer(step, layer), np.full((3, 1, 32), 1.0 + layer, np.float32))
        assert daemon.process.wait(10) == 0
        watching.join(10)


def _watch(address: str, states: queue.SimpleQueue[int]) -> None:
    with grpc.insecure_channel(address) as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            for answer in stub.Watch(health_pb2.HealthCheckRequest()):
                states.put(answer.status)
        except grpc.RpcError:
            pass  # the daemon has exited


def test_a_draining_daemon_finishes_what_the_block_store_has_begun() -> None:
    """Blocks are read, leases renewed and reservations committed, but nothing is reserved. Leases do not hold it."""
    options = POOL | {"drain_stall_s": 60, "store_gib": 1 / 64, "share_store": "write"}
    namespace, keys = StoreNamespace("m", 4096), [bytes([number]) * 32 for number in range(4)]
    values = np.random.default_rng(0).integers(0, 256, (4, 4096), np.uint8)
    out = np.zeros_like(values)
    with (
        Daemon(**options) as daemon,
        KVClient(daemon.address) as client,
        client.session() as kv,
        client.store(namespace, unreachable="raise") as store,
        client.store(namespace, unreachable="raise") as refused,
        client.store(namespace) as missing,
    ):
        store.put(keys[:2], values[:2])
        lease, reservation = store.acquire(keys[:2]), store.reserve(keys[2:3])
        step = begun_step(kv)
        daemon.process.send_signal(signal.SIGTERM)
        until(lambda: drains(kv))
        with grpc.insecure_channel(daemon.address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            assert health.Check(health_pb2.HealthCheckRequest()).status == NOT_SERVING
        assert lease.renew()
        (place,) = reservation.views
        assert place is not None
        place[...] = values[2]
        assert reservation.commit() == 1
        assert store.get(keys, out).tolist() == [True, True, True, False]
        np.testing.assert_array_equal(out[:3], values[:3])
        for refuse in (lambda: refused.put(keys, values), lambda: client.store(namespace, unreachable="raise")):
            with pytest.raises(DrainingError):
                refuse()
        assert (missing.put(keys, values) == PutStatus.UNREACHABLE).all()
        assert daemon.process.poll() is None
        assert lease.check().all()
        for layer in (1, 2):
            send_layer(step, layer)
        assert daemon.process.wait(10) == 0
        np.testing.assert_array_equal(np.array(lease.views), values[:2])
        with pytest.raises(ConnectionLostError):
            store.lookup(keys)


def test_an_idle_daemon_leaves_at_once_and_takes_its_socket_away() -> None:
    options = POOL | {"log_level": "info", "store_gib": 1 / 64}
    with Daemon(**options) as daemon, KVClient(daemon.address) as client, client.session() as kv:
        kv.allocate([1])
        leaves_at_once(daemon, signal.SIGTERM)
        log = daemon.log.read_text()
    assert f"the block store takes {4 * (4 << 20) * 1025 // 1024} bytes, share_store is auto" in log
    assert log.index("draining") < log.index("stopped")


def leaves_at_once(daemon: Daemon, number: signal.Signals) -> None:
    socket = Path(daemon.address.removeprefix("unix://"))
    assert socket.exists()
    daemon.process.send_signal(number)
    assert daemon.process.wait(20) == 0  # the drain time is 30 s
    assert not socket.exists()


def test_a_step_that_is_never_finished_does_not_hold_the_daemon() -> None:
    options: dict[str, Any] = POOL | {"drain_timeout_s": 3600, "drain_stall_s": 0.1}
    with Daemon(**options) as daemon, KVClient(daemon.address) as client, client.session() as kv:
        begun_step(kv)
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(60) == 0
        assert "no more waiting for half-written steps, sessions [1]" in daemon.log.read_text()


def test_steps_are_waited_for_while_their_layers_come() -> None:
    drain = Drain(timeout_s=30.0, stall_s=5.0, now=100.0)
    assert drain.goes_on(100.0, 0, {1: 3, 2: 7})
    assert drain.goes_on(104.9, 0, {1: 4, 2: 7})
    assert drain.goes_on(109.8, 0, {1: 4, 2: 7})  # the second session has stalled, the first has not
    assert not drain.goes_on(110.0, 0, {1: 4, 2: 7})


def test_a_session_that_goes_on_after_a_stall_is_waited_for_again() -> None:
    drain = Drain(timeout_s=30.0, stall_s=5.0, now=0.0)
    assert drain.goes_on(0.0, 0, {1: 1, 2: 1})
    assert drain.goes_on(4.0, 0, {1: 1, 2: 2})
    assert drain.goes_on(8.0, 0, {1: 2, 2: 2})
    assert drain.goes_on(12.0, 0, {1: 2})


def test_calls_in_flight_are_waited_for_until_the_time_is_over(caplog: pytest.LogCaptureFixture) -> None:
    drain = Drain(timeout_s=30.0, stall_s=5.0, now=0.0)
    assert drain.goes_on(0.0, 1, {1: 1})
    assert drain.goes_on(29.9, 1, {1: 1})
    assert not drain.goes_on(30.1, 1, {1: 1})
    assert "still busy after 30 s" in caplog.text


def test_nothing_is_waited_for_where_nothing_has_begun(caplog: pytest.LogCaptureFixture) -> None:
    assert not Drain(timeout_s=30.0, stall_s=5.0, now=0.0).goes_on(0.0, 0, {})
    assert not caplog.records


def test_a_killed_clients_step_does_not_hold_the_daemon() -> None:
    with Daemon(session_grace_s=60, **POOL) as daemon:
        with KVClient(daemon.address) as client:
            kv = client.session(detachable=True)
            begun_step(kv)
            kv.detach()
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(10) == 0
        assert "still busy" not in daemon.log.read_text()


def test_only_a_stale_socket_is_taken(tmp_path: Path, free_port: int) -> None:
    path, precious, address = tmp_path / "k.sock", tmp_path / "file.sock", f"127.0.0.1:{free_port}"
    precious.write_text("precious")
    with Daemon(unix_socket=path, unix_socket_mode="0660", tcp_address=address, **POOL) as first:
        assert path.stat().st_mode & 0o777 == 0o660
        served, no_socket, in_use = refusals_to_serve(
            {"unix_socket": path}, {"unix_socket": precious}, {"tcp_address": address}
        )
        assert "served by another process" in served
        assert "is not a socket" in no_socket
        assert precious.read_text() == "precious"
        assert "tcp_address" in in_use
        for of_first in (first.address, address):
            with KVClient(of_first) as client:
                assert client.ping(b"still here") == b"still here"
        assert first.process.poll() is None
        first.process.kill()
        first.process.wait()
        assert path.exists()
        with Daemon(unix_socket=path, **POOL) as second:
            with KVClient(second.address) as client:
                assert client.ping() == b""
            leaves_at_once(second, signal.SIGINT)


def test_a_fault_in_the_pool_ends_the_daemon_with_its_own_status(tmp_path: Path) -> None:
    """After a failed kernel the contents of the pool are unknown, and serving them would be worse than not serving."""
    script = tmp_path / "faulty.py"
    script.write_text(
        "from kvservice import ops\n"
        "from kvservice.cli import main\n"
        "def broken(*_, **__): raise RuntimeError('a broken kernel')\n"
        "ops.write_kv = broken\n"
        "main(['serve'])\n"
    )
    path = tmp_path / "k.sock"
    options = POOL | {"tcp_address": "", "http_address": "", "unix_socket": path, "keeper": False}
    environ = os.environ | missing_environment(os.environ)
    environ |= {f"KVSERVICE_{name.upper()}": str(value) for name, value in options.items()}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-P", str(script)], stdout=log, stderr=log, env=environ)
    try:
        until(path.exists)
        with KVClient(f"unix://{path}", transport="inline") as client, client.session() as kv:
            step = kv.open_step([kv.allocate([1, 2])])
            with pytest.raises(Exception, match=r"failed|ended|UNAVAILABLE"):
                send_layer(step, 0)
        assert process.wait(10) == 70
        assert "a broken kernel" in (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
