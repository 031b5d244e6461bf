"""A daemon with a metrics port and a small pool, and its metrics."""

from __future__ import annotations

import ssl
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from waiting import PATIENCE_S

from kvservice.client import Sequence, Session

BLOCK_BYTES = 2 * 2 * 32 * 4 * 4
POOL: dict[str, Any] = {
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
COUNTS = ("_total", "_count", "_bucket", "_sum")
# The counters of a port as they were when a test began.
_BEFORE: dict[int, Samples] = {}


def exposition(port: int, context: ssl.SSLContext | None = None) -> str:
    """Read the metrics, over TLS if a context is given."""
    scheme = "http" if context is None else "https"
    with urllib.request.urlopen(f"{scheme}://127.0.0.1:{port}/metrics", timeout=20, context=context) as answer:
        text: str = answer.read().decode()
        return text


def scrape(port: int, context: ssl.SSLContext | None = None) -> Samples:
    """Return all samples. Where counters count from now on, those are what was added."""
    families = text_string_to_metric_families(exposition(port, context))
    samples = {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}
    return samples | {key: samples[key] - before for key, before in _BEFORE.get(port, {}).items() if key in samples}


def count_from_now(port: int) -> None:
    """Let `scrape` return what counters of kvservice have counted since now."""
    _BEFORE.pop(port, None)
    _BEFORE[port] = counters(scrape(port))


def counters(samples: Samples) -> Samples:
    return {key: found for key, found in samples.items() if key[0].startswith("kvservice_") and key[0].endswith(COUNTS)}


def scrape_until(port: int, condition: Callable[[Samples], bool]) -> Samples:
    deadline = time.monotonic() + PATIENCE_S
    while not condition(samples := scrape(port)):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def by_label(samples: Samples, name: str, label: str) -> dict[str, float]:
    """Return the values of a metric with one label."""
    return {dict(labels)[label]: found for (of, labels), found in samples.items() if of == name}


def compute(kv: Session, token_ids: list[int]) -> Sequence:
    """Allocate a sequence, and compute the tokens that are not in the prefix cache."""
    sequence = kv.allocate(token_ids)
    step = kv.open_step([sequence])
    step.write(*(np.ones((2, step.num_tokens, 1, 32), np.float32),) * 2)
    return sequence
