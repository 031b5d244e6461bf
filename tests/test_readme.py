"""The README's references are complete."""

from __future__ import annotations

from pathlib import Path

import prometheus_client
import pytest

from kvservice import errors
from kvservice.config import ServeConfig

README = (Path(__file__).parents[1] / "README.md").read_text()


def metric_names() -> set[str]:
    registry = prometheus_client.CollectorRegistry()
    manager = BlockManager(BlocksConfig(num_blocks=1))
    registry.register(PoolCollector(manager.stats, lambda: 0, 1, {"pool": 1}))
    registry.register(RegionCollector(lambda: 0, lambda: 0))
    registry.register(LaneCollector(lambda: 0, lambda: (0, 0, [0, 0], 0.0), [1.0]))
    RpcMetrics(registry)
    return {metric.name + ("_total" if metric.type == "counter" else "") for metric in registry.collect()}


@pytest.mark.parametrize("name", sorted(ServeConfig.model_fields))
def test_every_option_is_explained(name: str) -> None:
    assert f"| `{name}` |" in README


@pytest.mark.parametrize("name", sorted(metric_names()))
def test_every_metric_is_explained(name: str) -> None:
    assert f"| `{name}`" in README or f"| `{name}{{" in README


def test_every_error_that_is_raised_is_explained() -> None:
    bases = {errors.KVServiceError, errors.NotFoundError, errors.ResourceExhaustedError}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.KVServiceError) and kind not in bases:
            assert f"| `{kind.__name__}` | {kind.status} | {kind.reason} |" in README, kind.__name__
