"""Stand-ins for what vLLM's scheduler hands to a connector."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvservice.integrations.vllm.groups import CacheGroups, Group, Wanted

BLOCK_SIZE = 4
FULL = CacheGroups([Group()], BLOCK_SIZE)


def chain(tokens: Sequence[int]) -> list[bytes]:
    """Return the hashes of the full blocks of tokens."""
    full = range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)
    return [hashlib.sha256(bytes(tokens[:stop])).digest() for stop in full]


def wanted(keys: Sequence[bytes], first: int = 0, groups: CacheGroups = FULL) -> Wanted:
    """Return blocks of a prompt that has a token more."""
    return Wanted(b"".join(keys), groups, first, (first + len(keys) // groups.num) * groups.block_size)


@dataclass
class FakeRequest:
    request_id: str
    tokens: list[int]
    lora_request: Any = None
    skip_reading_prefix_cache: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.tokens)  # it grows
        self.num_prompt_tokens = self.num_computed_tokens = len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        return chain(self.tokens)


def _tables(block_ids: Sequence[Any]) -> tuple[list[int], ...]:
    several = bool(block_ids) and not isinstance(block_ids[0], int)
    return tuple(map(list, block_ids)) if several else (list(block_ids),)


@dataclass
class FakeOutput:
    """A SchedulerOutput: rows of `new` are (request, block ids, computed tokens), those of `cached` (request id, added
    block ids or None, computed tokens). Block ids are those of one group, or a sequence for each."""

    num_scheduled_tokens: Mapping[str, int]
    new: Sequence[tuple[FakeRequest, Sequence[Any], int]] = ()
    cached: Sequence[tuple[str, Sequence[Any] | None, int]] = ()
    resumed: set[str] = field(default_factory=set)

    @property
    def scheduled_new_reqs(self) -> list[Any]:
        return [
            SimpleNamespace(req_id=request.request_id, block_ids=_tables(ids), num_computed_tokens=computed)
            for request, ids, computed in self.new
        ]

    @property
    def scheduled_cached_reqs(self) -> Any:
        return SimpleNamespace(
            req_ids=[row[0] for row in self.cached],
            new_block_ids=[None if row[1] is None else _tables(row[1]) for row in self.cached],
            num_computed_tokens=[row[2] for row in self.cached],
            resumed_req_ids=self.resumed,
        )
