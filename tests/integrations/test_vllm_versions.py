"""What differs between versions of vLLM."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from each_row import each_row
from vllm_connector import FakePool, cache_config, connector_config
from vllm_stub import Role


def warnings_of(connector: Any, caplog: pytest.LogCaptureFixture, role: Role = Role.SCHEDULER, **config: Any) -> str:
    """Return what a start warns of."""
    caplog.clear()
    connector(connector_config(**config), role, cache_config()).shutdown()
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)


def test_a_version_that_is_not_tested_is_named_once(
    vllm_connector: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        ("0.23.1", "0.24 or later, this is 0.23.1"),
        ("0.24.0", ""),
        ("0.33.2", ""),
        ("0.34.0", "up to 0.33, this is 0.34.0"),
        ("1.0.0rc1", "up to 0.33, this is 1.0.0rc1"),
        ("0.1.dev1+gabc", ""),
        ("dev", ""),
    ]
    with each_row() as row:
        for version, expected in rows:
            with row(version):
                monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
                text = warnings_of(vllm_connector, caplog)
                assert (expected in text) if expected else text == ""
                assert warnings_of(vllm_connector, caplog, Role.WORKER) == "", "the scheduler says it"


def test_vllm_gives_blocks_back_at_once_though_the_connector_loads(vllm_connector: Any) -> None:
    """vLLM's scheduler makes the connector, asks whether it loads, and gives it the pool of blocks afterwards."""
    cases: list[dict[str, Any]] = [{}, {"producer": False}, {"consumer": False}]
    with each_row() as row:
        for role in cases:
            with row(str(role)):
                config = connector_config(**role)
                transfer = config.kv_transfer_config
                before, loads = transfer.kv_role, transfer.is_kv_consumer
                connector = vllm_connector(config, Role.SCHEDULER, cache_config())
                assert not transfer.is_kv_consumer
                connector.bind_gpu_block_pool(FakePool(8))
                assert (transfer.kv_role, transfer.is_kv_consumer) == (before, loads)
                connector.shutdown()
                vllm_connector(config, Role.WORKER, cache_config()).shutdown()
                assert transfer.kv_role == before


def test_found_tokens_are_those_of_the_host_where_vllm_asks() -> None:
    """The source is imported with the class, so each case has its own stub."""
    from vllm_stub import stub_vllm

    with stub_vllm() as connector:
        assert connector._cache_hit_source == "host"
    with stub_vllm(without=("vllm.v1.metrics.cache_hit_source",)) as connector:
        assert not hasattr(connector, "_cache_hit_source")


def test_batch_invariant_kernels_have_blocks_of_their_own(vllm_connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from fake_store import FakeStore
    from vllm_connector import stores_of

    layouts = []
    for value in ("0", "1"):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
        worker = vllm_connector(connector_config(), Role.WORKER, cache_config())
        with stores_of(lambda _: FakeStore()):
            worker.register_kv_caches({"layer": torch.zeros(8, 4)})
        layouts.append(worker.get_handshake_metadata().namespace.layout)
        worker.shutdown()
    assert layouts[0] != layouts[1]
    assert "batch-invariant" in layouts[1]


def test_the_pool_is_whole_before_vllm_resets_it(vllm_connector: Any) -> None:
    """Twice, and with another connector at the same pool."""
    pool = FakePool(8)
    for _ in range(2):
        connector = vllm_connector(connector_config(), Role.SCHEDULER, cache_config())
        connector.bind_gpu_block_pool(pool)
        assert pool.reset_prefix_cache()
        pool.touch(pool.blocks[1:2])
        assert not pool.reset_prefix_cache(), "a request uses it"
        pool.free_blocks(pool.blocks[1:2])
        connector.shutdown()


def test_an_output_without_a_report_is_understood(vllm_connector: Any) -> None:
    connector = vllm_connector(connector_config(), Role.SCHEDULER, cache_config())
    connector.update_connector_output(
        SimpleNamespace(
            finished_recving=None, invalid_block_ids=set(), kv_connector_worker_meta=None, kv_connector_stats=None
        )
    )
    assert not connector.has_pending_push_work()
    connector.shutdown()
