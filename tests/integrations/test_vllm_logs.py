"""The client's lines appear in vLLM's log, and the connector's counters in its metrics."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from fake_store import FakeStore
from prometheus_client import CollectorRegistry, Counter
from vllm_connector import Engine, cache_config, connector_config
from vllm_stub import Role
from waiting import until


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """The output of the engine's logger."""
    text = io.StringIO()
    engine, own = logging.getLogger("vllm"), logging.getLogger("kvservice")
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in (engine, own)]
    engine.addHandler(logging.StreamHandler(text))
    engine.setLevel(logging.INFO)
    yield text
    for logger, handlers, level, propagate in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate


def start(connector: Any) -> None:
    connector(connector_config(), Role.SCHEDULER, cache_config()).shutdown()


def test_lines_of_the_client_appear_once(
    written: io.StringIO, vllm_connector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root logger has no handlers, as in vLLM."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    client = logging.getLogger("kvservice.client.anything")
    client.info("is not shown")
    for _ in range(2):
        start(vllm_connector)
    client.info("is back")
    client.debug("a detail")
    assert written.getvalue() == "is back\n"


def test_handlers_of_the_application_stay_alone(written: io.StringIO, vllm_connector: Any) -> None:
    assert logging.getLogger().handlers, "those of pytest"
    start(vllm_connector)
    logging.getLogger("kvservice.client.anything").warning("away")
    assert written.getvalue() == ""


def test_statistics_of_workers_are_sums_in_vllms_log_and_metrics(vllm_connector: Any) -> None:
    engine = Engine(vllm_connector, FakeStore(), FakeStore())
    engine.save("a", [bytes(32), bytes([1]) * 32], [1, 2])
    until(lambda: all(len(store.values) == 2 for store in engine.stores))
    engine.close()
    total = vllm_connector.build_kv_connector_stats()
    assert total.is_empty()
    engine = Engine(vllm_connector, *engine.stores)
    engine.load("a", [bytes(32), bytes([2]) * 32], [3, 4])
    for rank, worker in enumerate(engine.workers):
        assert engine.loaded(rank) == ({"a"}, {4})
        total = total.aggregate(worker.get_kv_connector_stats())
    engine.close()
    assert not total.is_empty()
    reduced = total.reduce()
    assert (reduced["blocks_loaded"], reduced["blocks_not_loaded"], reduced["bytes_loaded"]) == (2, 2, 2 * 64)
    registry = CollectorRegistry()
    made = {Counter: lambda **options: Counter(**options, registry=registry)}
    metrics = vllm_connector.build_prom_metrics(None, made, ["engine"], {0: ["0"], 1: ["1"]})
    metrics.observe(total.data, 1)
    metrics.observe(total.data, 1)
    name = "vllm:kvservice_blocks_loaded_total"
    assert [registry.get_sample_value(name, {"engine": engine}) for engine in ("0", "1")] == [0, 4]
    total.reset()
    assert total.is_empty()
