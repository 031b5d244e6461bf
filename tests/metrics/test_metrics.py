"""The metrics port against the daemon's own statistics, after traffic that moves every figure."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvservice.client import KVClient, Session
from kvservice.errors import LayerWrittenError, UnknownSequenceError
from kvservice.launch import Daemon
from kvservice.v1 import blocks_pb2, blocks_pb2_grpc

BLOCK_BYTES = 2 * 2 * 32 * 4 * 4
POOL = {
    "num_layers": 2,
    "num_kv_heads": 1,
    "head_size": 32,
    "dtype": "float32",
    "block_size": 4,
    "num_blocks": 8,
    "watermark": 0.0,
    "swap_space_gib": 4 * BLOCK_BYTES / 2**30,
}
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def compute(kv: Session, token_ids: list[int]) -> object:
    sequence = kv.allocate(token_ids)
    step = kv.open_step([sequence])
    step.write(*(np.ones((2, step.num_tokens, 1, 32), np.float32),) * 2)
    return sequence


@pytest.fixture
def running(free_port: int) -> Iterator[tuple[Daemon, int]]:
    with Daemon(http_address=f"127.0.0.1:{free_port}", **POOL) as daemon:
        yield daemon, free_port


def test_every_figure_is_the_pools(running: tuple[Daemon, int]) -> None:
    daemon, port = running
    with KVClient(daemon.address) as client, client.session() as kv:
        first = compute(kv, list(range(8)))
        second = kv.allocate([0, 1, 2, 3, 50, 51])  # shares one block
        kv.open_step([second]).write(*(np.ones((2, 2, 1, 32), np.float32),) * 2)
        child = kv.fork(second)
        kv.append([child], [7])  # copies one block
        kv.swap_out([first])
        kv.pin(list(range(4)), ttl_s=60)
        kv.free([second])
        with pytest.raises(UnknownSequenceError):
            kv.free([second])
        samples, stats = scrape(port), client.stats()

        states = {
            "free": stats.free_blocks,
            "active": stats.active_blocks,
            "shared": stats.shared_blocks,
            "cached": stats.cached_blocks,
            "pinned": stats.pinned_blocks,
            "swapped": stats.used_swap_blocks,
        }
        assert {state: value(samples, "kvservice_blocks", state=state) for state in states} == states
        assert sum(states.values()) - states["swapped"] == 8
        assert states["swapped"] == 2
        assert value(samples, "kvservice_block_usage_ratio") == (stats.active_blocks + stats.shared_blocks) / 8
        assert value(samples, "kvservice_capacity_blocks", tier="device") == 8
        assert value(samples, "kvservice_capacity_blocks", tier="swap") == 4
        assert value(samples, "kvservice_block_size_bytes") == BLOCK_BYTES
        assert value(samples, "kvservice_memory_bytes", use="pool") == 8 * BLOCK_BYTES
        assert value(samples, "kvservice_memory_bytes", use="swap") == 4 * BLOCK_BYTES
        assert value(samples, "kvservice_tokens") == 8 + 7
        assert value(samples, "kvservice_sequences", tier="device") == 1
        assert value(samples, "kvservice_sequences", tier="swap") == 1
        assert value(samples, "kvservice_sessions") == 1
        assert value(samples, "kvservice_prefix_cache_query_tokens_total") == 8 + 6
        assert value(samples, "kvservice_prefix_cache_hit_tokens_total") == 4
        assert value(samples, "kvservice_cow_copies_total") == 1
        assert value(samples, "kvservice_swap_blocks_total", direction="out") == 2
        assert value(samples, "kvservice_swap_blocks_total", direction="in") == 0
        assert value(samples, "kvservice_swap_bytes_total", direction="out") == 2 * BLOCK_BYTES

        def calls(method: str, status: str) -> float:
            name = "kvservice_rpc_duration_seconds_count"
            return value(samples, name, method=method, status=status, transport="stream")

        assert (calls("allocate", "OK"), calls("write", "OK"), calls("free", "OK")) == (2, 2, 1)
        assert calls("free", "NOT_FOUND") == 1


def test_regions_are_counted(free_port: int) -> None:
    with (
        Daemon(http_address=f"127.0.0.1:{free_port}", allow_client_shm=True, **POOL) as daemon,
        KVClient(daemon.address) as client,
        client.session() as kv,
        client.session() as other,
    ):
        kv.create_region(4096)
        other.create_region(8192)
        samples = scrape(free_port)
        assert value(samples, "kvservice_regions") == 2
        assert value(samples, "kvservice_region_bytes") == 4096 + 8192
        kv.unregister_region()
        samples = scrape(free_port)
        assert value(samples, "kvservice_regions") == 1
        assert value(samples, "kvservice_region_bytes") == 8192


def test_lanes_and_their_calls_are_counted(free_port: int) -> None:
    duration = "kvservice_lane_call_duration_seconds"
    with (
        Daemon(http_address=f"127.0.0.1:{free_port}", allow_client_shm=True, **POOL) as daemon,
        KVClient(daemon.address, transport="lane") as client,
    ):
        for after in (2, 4):  # what ended lanes did is counted as well
            with client.session() as kv, client.session():
                step = kv.open_step([kv.allocate([1])])
                ones = np.ones((1, 1, 32), np.float32)
                step.extend(0, ones, ones, ones)
                with pytest.raises(LayerWrittenError):
                    step.extend(0, ones, ones, ones)
                samples = scrape(free_port)
                assert value(samples, "kvservice_lanes") == 2
                assert value(samples, f"{duration}_count") == value(samples, f"{duration}_bucket", le="+Inf") == after
                assert value(samples, "kvservice_lane_errors_total") == after / 2
                assert 0 < value(samples, f"{duration}_sum") < 60
        samples = scrape(free_port)
        assert value(samples, "kvservice_lanes") == 0
        assert value(samples, f"{duration}_count") == 4


def test_unknown_sessions_are_counted(running: tuple[Daemon, int]) -> None:
    daemon, port = running
    with grpc.insecure_channel(daemon.address) as channel:
        stub: Any = blocks_pb2_grpc.BlockServiceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError):
            stub.Free(blocks_pb2.FreeRequest(session_token=b"none", sequence_ids=[1]))
    name = "kvservice_rpc_duration_seconds_count"
    assert value(scrape(port), name, method="free", status="NOT_FOUND", transport="unary") == 1


def test_evictions_are_counted(running: tuple[Daemon, int]) -> None:
    daemon, port = running
    with KVClient(daemon.address) as client, client.session() as kv:
        kv.free([compute(kv, list(range(16)))])
        compute(kv, list(range(100, 124)))
        assert value(scrape(port), "kvservice_evictions_total") == 2 == client.stats().evicted_blocks


def test_names_follow_the_conventions(running: tuple[Daemon, int]) -> None:
    names = {name for name, _ in scrape(running[1]) if name.startswith("kvservice_")}
    assert names
    for name in names:
        assert re.fullmatch(r"kvservice_[a-z_]+", name)
        assert not re.search(r"_(ms|us|mb|gib|milliseconds|kilobytes)(_|$)", name), "base units only"
