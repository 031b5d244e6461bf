"""Requests: what a client asks for, and the scheduler's state of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvservice.blocks import AllocationRequest, BlocksConfig
from kvservice.blocks.arguments import extra_keys_by_block, int32_array, whole_number
from kvservice.blocks.plans import Int32Array
from kvservice.blocks.prefix import chain_hashes
from kvservice.errors import InvalidArgumentError, OutOfBlocksError


@dataclass(frozen=True, slots=True)
class Request:
    """A request for the continuation of a prompt by at most `max_tokens` tokens.

    `request_id` is the id of its sequence in the engine's namespace. `token_ids` is int32[n], n >= 1. A lower
    `priority` is more urgent. `extra_keys` are those of AllocationRequest.
    """

    request_id: int
    token_ids: npt.ArrayLike
    max_tokens: int
    priority: int = 0
    extra_keys: Sequence[tuple[int, bytes]] = ()


class Phase(Enum):
    """Where a request is. It is in exactly one queue."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    SWAPPED = "swapped"


@dataclass(slots=True, eq=False)
class RequestState:
    """State of one request.

    `tokens` int32[n] are the prompt and, after a preemption, the tokens generated so far; `hashes` are the chain hashes
    of its full blocks. `rank` orders the queue: (priority, place in the queue, arrival number). `pending` counts the
    tokens of a prefill that are not computed, `blocks` the blocks of its table. `next_token` is appended after a
    swap-in. `preempted` says that its `lost` computed tokens may be in the prefix cache. `token_at_s` is when its
    latest token was reported.
    """

    request: Request
    rank: tuple[int, float, int]
    tokens: Int32Array
    hashes: list[bytes]
    extra: dict[int, bytes]
    arrived_at_s: float
    phase: Phase = Phase.WAITING
    generated: int = 0
    pending: int = 0
    blocks: int = 0
    next_token: int = 0
    preempted: bool = False
    lost: int = 0
    token_at_s: float = 0.0

    @property
    def request_id(self) -> int:
        return self.request.request_id

    def allocation(self, lookahead: int) -> AllocationRequest:
        return AllocationRequest(self.request_id, self.tokens, self.request.extra_keys, lookahead, self.hashes)

    def continue_with(self, tokens: Int32Array, config: BlocksConfig) -> None:
        """Replace the tokens that a new prefill must compute."""
        self.tokens = tokens
        self.hashes = hashes_of(tokens, self.extra, config)


def hashes_of(tokens: Int32Array, extra: dict[int, bytes], config: BlocksConfig) -> list[bytes]:
    """Return the chain hashes of the full blocks, or none if the prefix cache is off."""
    return chain_hashes(tokens, extra, config.block_size) if config.enable_prefix_caching else []


def check_request(request: Request, config: BlocksConfig, lookahead: int) -> tuple[Int32Array, dict[int, bytes]]:
    """Validate a request. Returns (token ids int32[n], encoded extra keys by block).

    Raises InvalidArgumentError, and OutOfBlocksError with `never` if the pool cannot hold the whole request above the
    watermark.
    """
    limit = config.max_sequence_tokens
    whole_number(request.request_id, "request_id", 0, 2**63 - 1)
    tokens = int32_array(request.token_ids, "token_ids")
    if len(tokens) >= limit:
        raise InvalidArgumentError(
            f"has {len(tokens)} tokens and must have fewer than max_sequence_tokens = {limit}", field="token_ids"
        )
    longest = max(limit - len(tokens) - lookahead, 1)
    max_tokens = whole_number(request.max_tokens, "max_tokens", 1, longest)
    whole_number(request.priority, "priority", -(2**31), 2**31 - 1)
    extra: dict[int, bytes] = {}
    if request.extra_keys:
        extra = extra_keys_by_block(request.extra_keys, "extra_keys", config.block_size, limit)
    required = config.num_blocks_for(len(tokens) + max_tokens + lookahead)
    available = config.num_blocks - config.watermark_blocks
    if required > available:
        raise OutOfBlocksError(
            f"prompt and max_tokens need {required} blocks, and the pool can never give more than {available}",
            tier="device", required=required, free=available, total=config.num_blocks, never=True,
            field="max_tokens",
        )  # fmt: skip
    return np.array(tokens, np.int32), extra
