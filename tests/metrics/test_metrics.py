"""The metrics, compared with the daemon's statistics after traffic that changes every figure."""

from __future__ import annotations

import os
import platform
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from footprint import children
from ports import free_port
from scraping import BLOCK_BYTES, POOL, Samples, by_label, compute, scrape, scrape_until, value

from kvservice import __version__
from kvservice.client import KVClient
from kvservice.errors import InvalidArgumentError, LayerWrittenError, OutOfBlocksError, UnknownSequenceError
from kvservice.launch import Daemon
from kvservice.v1 import blocks_pb2, blocks_pb2_grpc, inspect_pb2, inspect_pb2_grpc, pool_pb2, pool_pb2_grpc


def test_every_figure_is_the_pools(shared: tuple[Daemon, int]) -> None:
    daemon, port = shared
    with KVClient(daemon.address) as client, client.session() as kv:
        before = client.stats()
        first = compute(kv, list(range(8)))
        second = compute(kv, [0, 1, 2, 3, 50, 51])  # shares one block
        child = kv.fork(second)
        kv.append([child], [7])  # copies one block
        kv.swap_out([first])
        kv.pin(list(range(4)), ttl_s=60)
        kv.free([second])
        samples, stats = scrape(port), client.stats()
        query_tokens = stats.prefix_cache_query_tokens - before.prefix_cache_query_tokens
        hit_tokens = stats.prefix_cache_hit_tokens - before.prefix_cache_hit_tokens

        states = {
            "free": stats.free_blocks,
            "active": stats.active_blocks,
            "shared": stats.shared_blocks,
            "cached": stats.cached_blocks,
            "pinned": stats.pinned_blocks,
            "swapped": stats.used_swap_blocks,
        }
        assert by_label(samples, "kvservice_blocks", "state") == states
        assert sum(states.values()) - states["swapped"] == 8
        assert states["swapped"] == 2
        assert value(samples, "kvservice_block_usage_ratio") == (stats.active_blocks + stats.shared_blocks) / 8
        assert by_label(samples, "kvservice_capacity_blocks", "tier") == {"device": 8, "swap": 4}
        assert value(samples, "kvservice_block_size_bytes") == BLOCK_BYTES
        memory = {"pool": 8 * BLOCK_BYTES, "swap": 4 * BLOCK_BYTES}
        assert by_label(samples, "kvservice_memory_bytes", "use") == memory
        assert value(samples, "kvservice_tokens") == 8 + 7 == stats.tokens
        assert by_label(samples, "kvservice_sequences", "tier") == {"device": 1, "swap": 1}
        assert value(samples, "kvservice_sessions") == 1
        assert value(samples, "kvservice_computed_tokens_total") == 8 + 2
        assert value(samples, "kvservice_prefix_cache_query_tokens_total") == 8 + 6 == query_tokens
        assert value(samples, "kvservice_prefix_cache_hit_tokens_total") == 4 == hit_tokens
        assert value(samples, "kvservice_cow_copies_total") == 1 == stats.cow_copies - before.cow_copies
        assert value(samples, "kvservice_draining") == 0
        assert value(samples, "kvservice_calls_in_flight") == 0


def test_swapping_is_counted_in_both_directions(shared: tuple[Daemon, int]) -> None:
    daemon, port = shared
    with KVClient(daemon.address) as client, client.session() as kv:
        one, two = compute(kv, list(range(8))), compute(kv, [100])
        earlier, before = client.stats(), scrape(port)
        kv.swap_out([one, two])
        kv.reset_prefix_cache()  # so that every block must be copied back
        out = scrape_until(port, lambda found: busy(found, "out") > 0)
        assert by_label(out, "kvservice_swap_blocks_total", "direction") == {"out": 3, "in": 0}
        assert by_label(out, "kvservice_swap_bytes_total", "direction") == {"out": 3 * BLOCK_BYTES, "in": 0}
        assert by_label(out, "kvservice_swapped_sequences_total", "direction") == {"out": 2, "in": 0}
        kv.swap_in([one])
        back = scrape_until(port, lambda found: busy(found, "in") > 0)
        assert by_label(back, "kvservice_swap_blocks_total", "direction") == {"out": 3, "in": 2}
        assert by_label(back, "kvservice_swap_bytes_total", "direction")["in"] == 2 * BLOCK_BYTES
        assert by_label(back, "kvservice_swapped_sequences_total", "direction") == {"out": 2, "in": 1}
        stats = client.stats()
        assert stats.swapped_out_blocks - earlier.swapped_out_blocks == 3
        assert stats.swapped_in_blocks - earlier.swapped_in_blocks == 2
        assert busy(before, "out") == busy(before, "in") == busy(out, "in") == 0
        assert busy(back, "out") == busy(out, "out")


def busy(samples: Samples, direction: str) -> float:
    return value(samples, "kvservice_swap_busy_seconds_total", direction=direction)


def test_calls_are_counted_by_method_status_and_transport(shared: tuple[Daemon, int]) -> None:
    daemon, port = shared
    with grpc.insecure_channel(daemon.address) as channel:
        stub: Any = blocks_pb2_grpc.BlockServiceStub(channel)
        with pytest.raises(grpc.RpcError):
            stub.Free(blocks_pb2.FreeRequest(session_token=b"none", sequence_ids=[1]))
    with KVClient(daemon.address, transport="inline") as client, client.session() as kv:
        kept, freed = compute(kv, [1, 2]), compute(kv, [3])
        kv.free([freed])
        for _ in range(2):
            with pytest.raises(UnknownSequenceError):
                kv.free([freed])
        kv.describe([kept])
        samples = scrape(port)
        counts = {
            tuple(dict(labels)[name] for name in ("method", "status", "transport")): found
            for (name, labels), found in samples.items()
            if name == "kvservice_rpc_duration_seconds_count" and found
        }
        assert counts == {
            ("free", "NOT_FOUND", "unary"): 1,
            ("get_info", "OK", "unary"): 1,
            ("open", "OK", "unary"): 1,
            ("allocate", "OK", "stream"): 2,
            ("open_step", "OK", "stream"): 2,
            ("write", "OK", "stream"): 2,
            ("free", "OK", "stream"): 1,
            ("free", "NOT_FOUND", "stream"): 2,
            ("describe", "OK", "stream"): 1,
        }


def test_calls_in_flight_are_counted(shared: tuple[Daemon, int]) -> None:
    """Calls wait for a stopped observer, and then do not all get their answers at once."""
    daemon, port = shared
    scrape(port)
    (observer,) = children(daemon.process.pid)
    with grpc.insecure_channel(daemon.address) as channel:
        stub: Any = inspect_pb2_grpc.InspectServiceStub(channel)
        os.kill(observer, signal.SIGSTOP)
        try:
            waiting = [stub.GetSnapshot.future(inspect_pb2.GetSnapshotRequest(), timeout=60) for _ in range(64)]
            pool: Any = pool_pb2_grpc.PoolServiceStub(channel)
            pool.Ping(pool_pb2.PingRequest())  # behind them on their connection
        finally:
            os.kill(observer, signal.SIGCONT)
        assert value(scrape(port), "kvservice_calls_in_flight") > 0
        for call in waiting:
            call.result()
    assert value(scrape(port), "kvservice_calls_in_flight") == 0


def test_refusals_for_want_of_blocks_are_counted(shared: tuple[Daemon, int]) -> None:
    daemon, port = shared
    with KVClient(daemon.address) as client, client.session() as kv:
        held = kv.allocate(list(range(32)))
        for _ in range(2):
            with pytest.raises(OutOfBlocksError):
                kv.allocate([1])
        with pytest.raises(OutOfBlocksError):
            kv.append([held], [1])
        with pytest.raises(OutOfBlocksError):
            kv.swap_out([held])  # the swap tier has fewer
        with pytest.raises(InvalidArgumentError):
            kv.allocate([])
        assert kv.can_allocate([[1]]) == "later"  # is not counted as a refusal
        assert value(scrape(port), "kvservice_out_of_blocks_total") == 4


def test_regions_are_counted(shared: tuple[Daemon, int]) -> None:
    daemon, port = shared
    with KVClient(daemon.address) as client, client.session() as kv, client.session() as other:
        kv.create_region(4096)
        other.create_region(8192)
        samples = scrape(port)
        assert value(samples, "kvservice_regions") == 2
        assert value(samples, "kvservice_region_bytes") == 4096 + 8192
        kv.unregister_region()
        samples = scrape(port)
        assert value(samples, "kvservice_regions") == 1
        assert value(samples, "kvservice_region_bytes") == 8192


def test_lanes_and_their_calls_are_counted(shared: tuple[Daemon, int]) -> None:
    daemon, port = shared
    duration = "kvservice_lane_call_duration_seconds"
    with KVClient(daemon.address, transport="lane") as client:
        for after in (2, 4):  # calls of closed lanes count as well
            with client.session() as kv, client.session():
                step = kv.open_step([kv.allocate([1])])
                ones = np.ones((1, 1, 32), np.float32)
                step.extend(0, ones, ones, ones)
                with pytest.raises(LayerWrittenError):
                    step.extend(0, ones, ones, ones)
                samples = scrape(port)
                assert value(samples, "kvservice_lanes") == 2
                assert value(samples, f"{duration}_count") == value(samples, f"{duration}_bucket", le="+Inf") == after
                assert value(samples, "kvservice_lane_errors_total") == after / 2
                assert 0 < value(samples, f"{duration}_sum") < 60
        samples = scrape(port)
        assert value(samples, "kvservice_lanes") == 0
        assert value(samples, f"{duration}_count") == 4


def test_what_happens_to_blocks_is_counted_with_their_ages(shared: tuple[Daemon, int]) -> None:
    daemon, port = shared
    pause = 0.06  # longer than the bound of the second bucket
    with KVClient(daemon.address) as client, client.session() as kv:
        earlier = client.stats().evicted_blocks
        kv.free([compute(kv, list(range(16)))])
        time.sleep(pause)
        again = kv.allocate(list(range(16)))
        reused = again.num_cached_tokens // 4
        kv.free([again])
        ages = scrape(port)
        assert age_count(ages, "reuse_gap") == reused == 3
        assert age_count(ages, "lifetime") == 1  # the newly allocated block, which is not computed
        assert_longer(ages, "reuse_gap", reused, pause)

        time.sleep(pause)
        compute(kv, list(range(100, 124)))  # six blocks, of which four are free
        stats, ages = client.stats(), scrape(port)
        assert value(ages, "kvservice_evictions_total") == 2 == stats.evicted_blocks - earlier
        assert age_count(ages, "idle_before_eviction") == 2
        assert_longer(ages, "idle_before_eviction", 2, pause)
        assert age_count(ages, "lifetime") == 1 + 2
        assert age_count(ages, "reuse_gap") == reused


def age_count(samples: Samples, name: str) -> float:
    return value(samples, f"kvservice_block_{name}_seconds_count")


def assert_longer(samples: Samples, name: str, count: int, seconds: float) -> None:
    """All of them lasted at least this long."""
    family = f"kvservice_block_{name}_seconds"
    assert value(samples, f"{family}_sum") >= count * seconds
    assert value(samples, f"{family}_bucket", le="0.05") == 0
    assert value(samples, f"{family}_bucket", le="86400") == count


def test_block_events_and_their_subscribers_are_counted(shared: tuple[Daemon, int]) -> None:
    daemon, port = shared
    with KVClient(daemon.address) as client, client.session() as kv:
        earlier = client.stats().evicted_blocks
        kv.free([compute(kv, list(range(16)))])
        kv.free([compute(kv, list(range(100, 128)))])
        events = client.events(start_number=1)
        next(events)
        samples = scrape(port)
        assert value(samples, "kvservice_event_streams") == 1
        counted = by_label(samples, "kvservice_block_events_total", "event")
        assert counted == {"stored": 4 + 7, "removed": client.stats().evicted_blocks - earlier, "cleared": 0}
        assert counted["removed"] == 3
        kv.reset_prefix_cache()
        assert by_label(scrape(port), "kvservice_block_events_total", "event") == counted | {"cleared": 1}
        events.close()
        scrape_until(port, lambda found: value(found, "kvservice_event_streams") == 0)


@pytest.fixture(scope="module")
def without_events() -> Iterator[tuple[Daemon, int]]:
    port = free_port()
    with Daemon(http_address=f"127.0.0.1:{port}", event_window=0, **POOL) as daemon:
        yield daemon, port


def test_without_events_none_are_counted(without_events: tuple[Daemon, int]) -> None:
    daemon, port = without_events
    with KVClient(daemon.address) as client, client.session() as kv:
        compute(kv, list(range(16)))
        counted = by_label(scrape(port), "kvservice_block_events_total", "event")
        assert counted == {"stored": 0, "removed": 0, "cleared": 0}


def test_the_event_loop_is_asked_each_second(without_events: tuple[Daemon, int]) -> None:
    _, port = without_events
    family = "kvservice_event_loop_latency_seconds"
    first = scrape(port)
    asked = value(first, f"{family}_count")
    later = scrape_until(port, lambda found: value(found, f"{family}_count") > asked)
    assert asked >= 1  # the observer makes a request before its first answer
    assert 0 < value(first, f"{family}_sum") < value(later, f"{family}_sum")


def test_a_daemon_that_does_not_answer_has_its_last_metrics(without_events: tuple[Daemon, int]) -> None:
    daemon, port = without_events
    scrape(port)
    os.kill(daemon.process.pid, signal.SIGSTOP)
    try:
        found = scrape(port)
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)
    assert value(found, "kvservice_event_loop_silent_seconds") > 1
    assert value(found, "kvservice_capacity_sequences") > 0


def test_the_build_and_the_configuration_are_exported(shared: tuple[Daemon, int]) -> None:
    samples = scrape(shared[1])
    version = {"version": __version__, "python": platform.python_version()}
    assert value(samples, "kvservice_build_info", **version) == 1
    shape = {"block_size": "4", "num_layers": "2", "num_kv_heads": "1", "head_size": "32", "prefix_caching": "true"}
    types = {"device": "cpu", "dtype": "float32", "kv_cache_dtype": "float32"}
    assert value(samples, "kvservice_config_info", **shape, **types) == 1
    assert value(samples, "kvservice_capacity_sessions") == 256
    assert value(samples, "kvservice_capacity_sequences") == 1024


def test_the_process_is_the_daemons_and_not_the_observers(shared: tuple[Daemon, int]) -> None:
    daemon, port = shared
    samples = scrape(port)
    (observer,) = children(daemon.process.pid)
    assert value(samples, "process_start_time_seconds") == pytest.approx(start_time(daemon.process.pid), abs=0.02)
    assert start_time(observer) > start_time(daemon.process.pid)
    assert value(samples, "process_open_fds") == len(os.listdir(f"/proc/{daemon.process.pid}/fd"))
    assert value(samples, "process_resident_memory_bytes") > 2**20


def start_time(pid: int) -> float:
    """Return the start time in seconds since 1970, at the kernel's resolution of hundredths of seconds."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
