"""A daemon's figures count each block of a connector's request once, and name the connectors' sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from ports import free_port
from scraping import Samples, by_label, scrape_until
from small_pool import SMALL_POOL
from waiting import until

from kvservice.client import KVClient, StoreNamespace
from kvservice.integrations.common.blocks import EngineBlocks
from kvservice.integrations.common.identity import session_name
from kvservice.integrations.common.options import ConnectorOptions
from kvservice.integrations.common.waiting import ComputeTime
from kvservice.integrations.vllm.copiers import block_copier
from kvservice.integrations.vllm.finders import StoreFinder
from kvservice.integrations.vllm.layout import block_layout
from kvservice.integrations.vllm.steps import BlockLoad, BlockSave, ConnectorStep
from kvservice.integrations.vllm.working import ConnectorWorker
from kvservice.launch import Daemon
from kvservice.v1 import inspect_pb2, inspect_pb2_grpc

KEYS = tuple(bytes([n]) * 32 for n in range(4))
COUNTED = ("lookup_hits", "lookup_misses", "blocks_read", "blocks_stored")


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def daemon(port: int) -> Iterator[Daemon]:
    with Daemon(**SMALL_POOL | {"http_address": f"127.0.0.1:{port}"}) as running:
        yield running


def counters(samples: Samples, model: str) -> tuple[float, ...]:
    return tuple(by_label(samples, f"kvservice_store_{name}_total", "model").get(model, 0.0) for name in COUNTED)


def is_counted(port: int, model: str, *expected: int) -> bool:
    """Wait until the counters are these. The figures that the daemon publishes are those after some call."""
    return bool(scrape_until(port, lambda samples: counters(samples, model) == expected))


def wait(worker: ConnectorWorker, ended: Callable[[Any], bool]) -> None:
    """Wait for the threads of a worker."""
    for pending in list(worker._pending):
        assert pending.ended.wait(60)
    until(lambda: ended(worker.take_finished_loads()))


def test_a_request_of_vllm_counts_once(daemon: Daemon, port: int) -> None:
    """Two blocks are saved; the next request finds and loads them and misses a third."""
    blocks = torch.arange(8 * 16, dtype=torch.int32).reshape(8, 16)
    layout = block_layout({"layer": blocks}, 8)
    namespace = StoreNamespace("of vLLM", layout.block_bytes)
    with KVClient(daemon.address) as client:
        finder = StoreFinder(client.store(namespace), ComputeTime(1.0), 1.0)
        worker = ConnectorWorker(client.store(namespace), block_copier(layout, verify=False), layout.block_bytes)
        assert finder.find(KEYS[:2]) == (0, 0)
        worker.start_saves(ConnectorStep(saves=(BlockSave(KEYS[:2], (0, 1)),)))
        wait(worker, lambda _: True)
        assert is_counted(port, "of vLLM", 0, 2, 0, 2)
        assert finder.find(KEYS[:3]) == (2, 2)
        release = finder.lease(KEYS[:2])
        worker.start_loads(ConnectorStep(loads=(BlockLoad("a", KEYS[:2], (4, 5)),)))
        wait(worker, lambda loads: "a" in loads[0])
        release()
        assert torch.equal(blocks[4:6], blocks[:2])
        assert is_counted(port, "of vLLM", 2, 3, 2, 2)
        worker.close(60)
        finder.close()


def test_a_request_of_the_others_counts_once(daemon: Daemon, port: int) -> None:
    memory = np.arange(2 * 64, dtype=np.uint8).reshape(2, 64)
    addresses = (memory.ctypes.data + np.arange(2)[:, None] * 64).astype(np.int64)
    with closing(
        EngineBlocks(ConnectorOptions(daemon.address), StoreNamespace("of others", 64), "an engine", 16)
    ) as blocks:
        assert blocks.num_leading(KEYS[:2]) == 0
        assert blocks.save(KEYS[:2], addresses, (64,)).all()
        assert blocks.num_leading(KEYS[:3]) == 2
        assert blocks.num_leading(KEYS[:2], counted=False) == 2
        assert blocks.load(KEYS[:2], addresses, (64,)).all()
        assert is_counted(port, "of others", 2, 3, 2, 2)
        with grpc.insecure_channel(daemon.address) as channel:
            stub: Any = inspect_pb2_grpc.InspectServiceStub(channel)
            snapshot = stub.GetSnapshot(inspect_pb2.GetSnapshotRequest(), timeout=60)
        assert [session.name for session in snapshot.sessions] == ["an engine tp0"]


def test_the_name_of_a_session_has_the_rank() -> None:
    parallel = StoreNamespace("m", 64, tp_rank=1, tp_size=2)
    assert session_name("vllm worker", StoreNamespace("m", 64)) == "vllm worker tp0"
    assert session_name("vllm worker", parallel) == "vllm worker tp1"
    pipelined = StoreNamespace("m", 64, tp_rank=1, tp_size=2, pp_rank=3, pp_size=4)
    assert session_name("vllm scheduler", pipelined) == "vllm scheduler tp1 pp3"
