"""The levels of a daemon's tiers, as its observer reports them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvservice.top.source import Source, to_json

PATIENCE_S, _PAUSE_S = 20.0, 0.05


@dataclass(frozen=True)
class Levels:
    """Blocks of the pool by state, and those that were saved in the block store or wait for it; values in the block
    store; whether the disk is open, its values and saved sessions, and the values that went to it and came from it.
    Saved, written and read ones are counted since the daemon started."""

    active: int
    cached: int
    free: int
    saved: int
    waiting: int
    store_values: int
    disk_is_open: bool
    disk_values: int
    saved_sessions: int
    written_values: int
    written_bytes: int
    read_values: int
    read_bytes: int


class LevelsWatch:
    """Reads the levels of the daemon at `address`. It is a context manager."""

    def __init__(self, address: str) -> None:
        self._source = Source(address)
        self._runner = asyncio.Runner()

    def __enter__(self) -> LevelsWatch:
        self._runner.__enter__()
        self._runner.run(self._source.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._runner.run(self._source.__aexit__(*error))
        finally:
            self._runner.close()

    def levels(self) -> Levels:
        """Return the current levels. Raises KVServiceError."""
        return _levels(to_json(self._runner.run(self._source.first_snapshot())))

    def wait(self, condition: Callable[[Levels], bool], show: Callable[[Levels], None]) -> None:
        """Read and show the levels until they fulfil the condition, or for PATIENCE_S seconds."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            levels = self.levels()
            show(levels)
            if condition(levels) or time.monotonic() > deadline:
                return
            time.sleep(_PAUSE_S)


def _levels(snapshot: dict[str, Any]) -> Levels:
    pool, store, spill = snapshot["pool"], snapshot["store"] or {}, snapshot["spill"] or {}
    disk: dict[str, Any] = next((tier for tier in snapshot["tiers"] if tier["name"] == "disk"), {})
    return Levels(
        active=pool["active_blocks"] + pool["shared_blocks"],
        cached=pool["cached_blocks"] + pool["pinned_blocks"],
        free=pool["free_blocks"],
        saved=spill.get("saved_blocks", 0),
        waiting=spill.get("queued", 0),
        store_values=store.get("blocks", 0),
        disk_is_open=disk.get("state") == "open",
        disk_values=disk.get("num_values", 0),
        saved_sessions=(snapshot["saved"] or {}).get("num_sessions", 0),
        written_values=disk.get("written_values", 0),
        written_bytes=disk.get("written_bytes", 0),
        read_values=disk.get("read_values", 0),
        read_bytes=disk.get("read_bytes", 0),
    )
