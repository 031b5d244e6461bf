"""The counters of saved and loaded blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvservice.tiers.speed import Speed


@dataclass
class SpillCounters:
    """The counters of SpillStats, and the speeds of copies."""

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
    save_speed: Speed = field(default_factory=Speed)
    load_speed: Speed = field(default_factory=Speed)

    def saved(self, num_blocks: int, num_bytes: int, seconds: float) -> None:
        self.saved_blocks += num_blocks
        self.saved_bytes += num_bytes
        self.save_s += seconds
        if num_bytes:
            self.save_speed.add(num_bytes, seconds)

    def loaded(self, num_blocks: int, num_bytes: int, seconds: float) -> None:
        self.loaded_blocks += num_blocks
        self.loaded_bytes += num_bytes
        self.load_s += seconds
        if num_bytes:
            self.load_speed.add(num_bytes, seconds)
