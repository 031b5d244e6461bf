"""Info metrics: build and configuration of the daemon, as labels of a constant 1."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping

from prometheus_client.core import InfoMetricFamily, Metric

CONFIG_LABELS = (
    "device", "dtype", "kv_cache_dtype", "block_size", "num_layers", "num_kv_heads", "head_size", "prefix_caching",
)  # fmt: skip


def about_metrics(info: Mapping[str, object]) -> Iterator[Metric]:
    version = {"version": str(info["version"]), "python": platform.python_version()}
    yield InfoMetricFamily(
        "kvservice_build", "Always 1; the labels are the versions of the daemon and of Python.", version
    )
    config = {name: str(info[name]).lower() for name in CONFIG_LABELS}
    yield InfoMetricFamily("kvservice_config", "Always 1; the labels are the device and the pool's shape.", config)
