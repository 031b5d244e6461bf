"""A daemon's figures count each block of a connector's request once, and name the connectors' sessions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from ports import free_port
from scraping import Samples, by_label, scrape_until
from small_pool import SMALL_POOL
from vllm_connector import Engine, connector_config
from vllm_requests import BLOCK_SIZE
from waiting import until

from kvservice.client import StoreNamespace
from kvservice.integrations.common import ConnectorOptions, EngineBlocks
from kvservice.launch import Daemon
from kvservice.v1 import inspect_pb2, inspect_pb2_grpc, store_pb2

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


def reasons(samples: Samples, model: str) -> dict[str, float]:
    """Return how many lookups missed a block, by the reason."""
    found = {
        dict(labels)["reason"]: value
        for (name, labels), value in samples.items()
        if name == "kvservice_store_lookups_missed_total" and dict(labels)["model"] == model
    }
    return {reason: value for reason, value in found.items() if value}


def sessions_of(daemon: Daemon) -> list[inspect_pb2.SessionSnapshot]:
    with grpc.insecure_channel(daemon.address) as channel:
        stub: Any = inspect_pb2_grpc.InspectServiceStub(channel)
        snapshot = stub.GetSnapshot(inspect_pb2.GetSnapshotRequest(), timeout=60)
    return list(snapshot.sessions)


def session_names(daemon: Daemon) -> list[str]:
    return sorted(session.name for session in sessions_of(daemon))


def test_a_request_of_vllm_counts_once(
    daemon: Daemon, port: int, vllm_connector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks of three are saved; the next request finds and loads them and misses two, of which one has its reason
    counted."""
    model = "of vLLM"
    monkeypatch.setattr(vllm_connector.groups, "pipeline", SimpleNamespace(rank_in_group=1, world_size=2))
    limits = {"lookup_timeout_s": 60.0, "transfer_timeout_s": 60.0, "prefill_tokens_per_s": 4.0}
    engine = Engine(vllm_connector, None, config=connector_config(daemon.address, model=model, extra=limits))
    try:
        assert engine.matched(engine.request("a", KEYS[:3])) == 0
        engine.save("a", KEYS[:2], [0, 1])
        assert is_counted(port, model, 0, 3, 0, 2)
        request = engine.request("b", KEYS)
        assert engine.matched(request) == 2 * BLOCK_SIZE
        engine.allocated(request, [4, 5, 6, 7], 2 * BLOCK_SIZE)
        engine.compute(engine.step())
        assert torch.equal(engine.blocks[4:6], engine.blocks[:2])
        assert is_counted(port, model, 2, 5, 2, 2)
        assert scrape_until(port, lambda samples: reasons(samples, model) == {"never_stored": 2})
        expected = store_pb2.EngineReport(
            prompt_tokens=6 * BLOCK_SIZE, found_tokens=2 * BLOCK_SIZE, blocks_loaded=2, blocks_saved=2
        )

        def reported() -> bool:
            engine.compute(engine.step())
            shown = {row.name: row.engine for row in sessions_of(daemon) if row.HasField("engine")}
            return shown == {"vllm background tp0 pp1": expected}

        until(reported)
        assert session_names(daemon) == [f"vllm {part} tp0 pp1" for part in ("background", "scheduler", "worker")]
    finally:
        engine.close()


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
        assert session_names(daemon) == ["an engine tp0"]
