"""The workers' counters for vLLM's log and its Prometheus metrics."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass
class TransferCounters:
    """Counters over an interval. Each name is also that of a metric, `vllm:kvservice_<name>`."""

    blocks_loaded: int = 0
    """Blocks loaded from the store."""
    blocks_not_loaded: int = 0
    """Blocks that could not be loaded and were computed again."""
    bytes_loaded: int = 0
    """Bytes loaded from the store."""
    load_seconds: float = 0.0
    """Seconds spent loading."""
    blocks_saved: int = 0
    """Blocks saved to the store."""
    blocks_not_saved: int = 0
    """Blocks that were not saved: no room, daemon away, or overwritten before their turn."""
    bytes_saved: int = 0
    """Bytes saved to the store."""
    save_seconds: float = 0.0
    """Seconds spent saving."""

    def as_dict(self) -> dict[str, float]:
        return dataclasses.asdict(self)

    @property
    def empty(self) -> bool:
        return not any(self.as_dict().values())


def add(some: dict[str, float], others: dict[str, float]) -> dict[str, float]:
    """Return the sums of two intervals or workers."""
    return {name: some.get(name, 0) + others.get(name, 0) for name in some.keys() | others.keys()}
