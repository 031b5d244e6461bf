"""The store's figures for the namespaces of one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class EngineFigures(NamedTuple):
    """An engine reports these of itself: how many requests have loads in flight, and as counters since its start the
    tokens that it looked up and found, and blocks."""

    loads_in_flight: int = 0
    prompt_tokens: int = 0
    found_tokens: int = 0
    blocks_loaded: int = 0
    blocks_not_loaded: int = 0
    blocks_saved: int = 0
    blocks_not_saved: int = 0
    blocks_skipped: int = 0


@dataclass
class NamespaceCounters:
    """Blocks since the start: `hits` and `misses` of lookups, `read` by gets and leases, `stored`, `evicted` from
    namespaces that are closed, `refused` because there was no room, `corrupt` ones, removed because their checksum was
    wrong, and `removed` by clients. The first missing block of each lookup is counted by the reason, see GhostKeys."""

    hits: int = 0
    misses: int = 0
    read: int = 0
    read_bytes: int = 0
    stored: int = 0
    stored_bytes: int = 0
    evicted: int = 0
    refused: int = 0
    corrupt: int = 0
    removed: int = 0
    evicted_misses: int = 0
    not_whole_misses: int = 0
    other_namespace_misses: int = 0
    never_stored_misses: int = 0


class ModelFigures(NamedTuple):
    """Gauges, then counters since the start, over all namespaces of a model."""

    namespaces: int = 0
    blocks: int = 0
    leased: int = 0
    reserved: int = 0
    quarantined: int = 0
    used_bytes: int = 0
    quota_bytes: int = 0

    hits: int = 0
    misses: int = 0
    read: int = 0
    read_bytes: int = 0
    stored: int = 0
    stored_bytes: int = 0
    evicted: int = 0
    refused: int = 0
    corrupt: int = 0
    removed: int = 0
    evicted_misses: int = 0
    not_whole_misses: int = 0
    other_namespace_misses: int = 0
    never_stored_misses: int = 0
