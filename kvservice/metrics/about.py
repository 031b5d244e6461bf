"""Info metrics: build and configuration of the daemon, as labels of a constant 1."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping

from prometheus_client.core import InfoMetricFamily, Metric

_CONFIG = (
    "device", "dtype", "kv_cache_dtype", "block_size", "num_layers", "num_kv_heads", "head_size", "prefix_caching",
)  # fmt: skip


def about_metrics(info: Mapping[str, object]) -> Iterator[Metric]:
    version = {"version": str(info["version"]), "python": platform.python_version()}
    yield InfoMetricFamily("kvservice_build", "The daemon's version.", version)
    config = {name: str(info[name]).lower() for name in _CONFIG}
    yield InfoMetricFamily("kvservice_config", "The pool's shape.", config)
