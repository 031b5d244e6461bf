"""`kvservice.health` against real daemons."""

from __future__ import annotations

import socket
import time
from concurrent import futures
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from waiting import PATIENCE_S

from kvservice.config import ServeConfig
from kvservice.health import address_of, check
from kvservice.launch import Daemon


def test_a_daemon_serves_until_it_is_stopped() -> None:
    with Daemon(num_blocks=64, num_layers=1, swap_space_gib=0) as daemon:
        assert check(daemon.address, timeout_s=10)
        daemon.stop()
        assert not check(daemon.address, timeout_s=1)


def test_a_daemon_that_drains_is_not_serving(tmp_path: Path) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = f"unix:{tmp_path}/health.sock"
    server.add_insecure_port(address)
    server.start()
    try:
        servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        assert check(address, timeout_s=10)
        servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert not check(address, timeout_s=10)
    finally:
        server.stop(None).wait()


def test_silence_is_not_serving_and_takes_no_longer_than_the_timeout() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        begin = time.monotonic()
        assert not check(f"127.0.0.1:{mute.getsockname()[1]}", timeout_s=0.5)
    assert 0.4 < time.monotonic() - begin < PATIENCE_S


def test_the_address_follows_the_configuration() -> None:
    addresses = {
        ("/run/kvservice/kvservice.sock", "0.0.0.0:50051"): "unix:/run/kvservice/kvservice.sock",
        ("", "0.0.0.0:50051"): "127.0.0.1:50051",
        ("", "[::]:1"): "[::1]:1",
        ("", "10.0.0.7:50051"): "10.0.0.7:50051",
        ("", ""): "",
    }
    configs = {key: ServeConfig(unix_socket=key[0], tcp_address=key[1]) for key in addresses}
    assert {key: address_of(config) for key, config in configs.items()} == addresses
