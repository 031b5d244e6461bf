"""Figures of the blocks of the pool that are saved in the block store, and loaded from it and the tiers below."""

from __future__ import annotations

from typing import NamedTuple


class SpillStats(NamedTuple):
    """Counters since the start, followed by gauges. Blocks, unless a name says otherwise.

    Not saved: `refused` blocks had no room in the store, `torn` ones left the pool while they were copied, and
    `dropped` ones were forgotten because the queue was full. Not loaded: `slower` blocks would have taken longer than
    computing them, and for `crowded` ones the pool had no room. `corrupt` values had a wrong checksum. `hit_tokens` are
    the tokens of loaded blocks that prompts have found.
    """

    saved_blocks: int = 0
    saved_bytes: int = 0
    save_s: float = 0.0
    refused: int = 0
    torn: int = 0
    dropped: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    hit_tokens: int = 0
    slower: int = 0
    crowded: int = 0
    corrupt: int = 0

    queued: int = 0
    loading: int = 0
    save_bytes_per_s: float = 0.0
    load_bytes_per_s: float = 0.0
