"""Requests of clients, and the scheduler's state of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvservice.blocks import BlocksConfig
from kvservice.blocks.arguments import extra_keys_by_block, int32_array, int64_array, refuse, whole_number
from kvservice.blocks.plans import Int32Array
from kvservice.blocks.prefix import chain_hashes_in_slices
from kvservice.blocks.slices import Slices, finish
from kvservice.errors import InvalidArgumentError, OutOfBlocksError, QuotaExceededError


@dataclass(frozen=True, slots=True)
class Request:
    """A request for the continuation of a prompt by at most `max_tokens` tokens.

    `request_id` is the id of its sequence in the engine's namespace. With a `width` above 1 the request has that many
    samples; their sequences are request_id, request_id + 1, and so on, and `stop_lengths` int64[width] may give each of
    them a total length, prompt included, at which it ends. `beams` run in lock-step, and a report says which beam
    each of them continues. `token_ids` is int32[n], n >= 1. A lower `priority` is more urgent. `extra_keys` are those
    of AllocationRequest.
    """

    request_id: int
    token_ids: npt.ArrayLike
    max_tokens: int
    priority: int = 0
    extra_keys: Sequence[tuple[int, bytes]] = ()
    width: int = 1
    stop_lengths: npt.ArrayLike = ()
    beams: bool = False


class Phase(Enum):
    """The phase of a sample, which is in exactly one queue."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    SWAPPED = "swapped"


RUNNING = (Phase.PREFILLING, Phase.DECODING)


@dataclass(slots=True, eq=False)
class RequestGroup:
    """The samples of one request, whose prompt has `num_prompt_tokens`.

    `number` counts requests in the order of their arrival, from 1 on. `limits` are the most tokens that each sample may
    generate. `members` are the samples that are not finished: only the first until its prompt is computed, when the
    others are `forked` from it. `ended` has the tokens int32[n] of finished samples, by the ids of their sequences.
    """

    request: Request
    number: int
    num_prompt_tokens: int
    limits: tuple[int, ...]
    members: list[RequestState] = field(default_factory=list)
    forked: bool = False
    ended: dict[int, Int32Array] = field(default_factory=dict)

    @property
    def request_id(self) -> int:
        return self.request.request_id

    @property
    def reserved_ids(self) -> range:
        """The ids of the sequences of all samples except the first."""
        return range(self.request_id + 1, self.request_id + self.request.width)


@dataclass(slots=True, eq=False)
class RequestState:
    """State of one sample of a request.

    `tokens` int32[n] are the prompt and, after a preemption, the tokens generated so far; `hashes` are the chain hashes
    of its full blocks. `rank` orders the queue: (priority, place in the queue, arrival number). `pending` counts the
    tokens of a prefill that are not computed, `blocks` the blocks of its table. `next_token` is appended after a
    swap-in. With `resumes` it is also appended after the prefill, at whose end no token is sampled. `preempted` says
    that its `lost` computed tokens may be in the prefix cache. `token_at_s` is when its latest token was reported.
    `looked_up` says that its missing blocks were looked up below the pool since it waits.
    """

    group: RequestGroup
    sequence_id: int
    limit: int
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
    resumes: bool = False
    lost: int = 0
    token_at_s: float = 0.0
    looked_up: bool = False

    @property
    def unit(self) -> list[RequestState]:
        """The samples that run or wait together: all beams of a request, or this sample alone."""
        return self.group.members if self.group.request.beams else [self]

    @property
    def num_sampled(self) -> int:
        """Number of tokens that are sampled at the end of its prefill."""
        return 0 if self.resumes else self.num_places

    @property
    def num_places(self) -> int:
        """Number of sequences that it is, or becomes when its prompt is computed."""
        return 1 if self.group.forked else self.group.request.width

    def sibling(self, index: int) -> RequestState:
        """Return the state of another sample of the request, at the point where this one is."""
        priority, place, number = self.rank
        return replace(
            self,
            sequence_id=self.group.request_id + index,
            limit=self.group.limits[index],
            rank=(priority, place, number + index),
        )

    def continue_with(self, tokens: Int32Array, config: BlocksConfig) -> None:
        """Replace the tokens that a new prefill must compute by `tokens` int32[n]."""
        self.tokens = tokens
        self.hashes = hashes_of(tokens, self.extra, config)


def hashes_of(tokens: Int32Array, extra: dict[int, bytes], config: BlocksConfig) -> list[bytes]:
    """Return the chain hashes of the full blocks, or none if the prefix cache is off."""
    return finish(hashes_in_slices(tokens, extra, config))


def hashes_in_slices(tokens: Int32Array, extra: dict[int, bytes], config: BlocksConfig) -> Slices[list[bytes]]:
    """Do as `hashes_of`, in slices."""
    if not config.enable_prefix_caching:
        return []
    return (yield from chain_hashes_in_slices(tokens, extra, config.block_size))


class CheckedRequest(NamedTuple):
    """A valid request: token ids int32[n], encoded extra keys by block, and the most generated tokens of each
    sample."""

    tokens: Int32Array
    extra: dict[int, bytes]
    limits: tuple[int, ...]


class PreparedRequest(NamedTuple):
    """A valid request that is not queued yet, and the chain hashes of its prompt."""

    request: Request
    checked: CheckedRequest
    hashes: list[bytes]

    @property
    def sequence_ids(self) -> range:
        """The ids of the sequences of its samples."""
        return range(self.request.request_id, self.request.request_id + len(self.checked.limits))


def check_request(
    request: Request, config: BlocksConfig, lookahead: int, max_width: int, max_blocks: int
) -> CheckedRequest:
    """Validate a request.

    Raises InvalidArgumentError, and OutOfBlocksError with `never` if the pool cannot hold one of its samples, whole,
    above the watermark. Samples run one at a time if need be, but beams run together. Raises QuotaExceededError for
    one that may get more than max_request_tokens tokens, or more than `max_blocks` blocks, because one operation on it
    would exceed a limit.
    """
    limit = config.max_sequence_tokens
    width = whole_number(request.width, "width", 1, max_width)
    whole_number(request.request_id, "request_id", 0, 2**63 - width)
    tokens = int32_array(request.token_ids, "token_ids")
    longest = limit - len(tokens) - lookahead
    if longest < 1:
        raise InvalidArgumentError(
            f"has {len(tokens)} tokens, and with the lookahead it must have fewer than max_sequence_tokens = {limit}",
            field="token_ids",
        )
    max_tokens = whole_number(request.max_tokens, "max_tokens", 1, longest)
    whole_number(request.priority, "priority", -(2**31), 2**31 - 1)
    extra: dict[int, bytes] = {}
    if request.extra_keys:
        extra = extra_keys_by_block(request.extra_keys, "extra_keys", config.block_size, limit)
    if not isinstance(request.beams, bool):
        raise InvalidArgumentError("must be True or False", field="beams")
    required = config.num_blocks_for(len(tokens) + max_tokens + lookahead) * (width if request.beams else 1)
    _check_quota("max_request_tokens", len(tokens) + max_tokens, config.max_request_tokens, "tokens")
    _check_quota("max_request_blocks", required, max_blocks, "blocks beside those of the other sequences")
    if request.beams:  # they are rearranged in one operation
        _check_quota("max_request_blocks", 2 * required, config.max_request_blocks, "blocks before and after a step")
    available = config.num_blocks - config.watermark_blocks
    if required > available:
        raise OutOfBlocksError(
            f"prompt and max_tokens need {required} blocks, and the pool can never give more than {available}",
            tier="device", required=required, free=available, total=config.num_blocks, never=True,
            field="width" if request.beams else "max_tokens",
        )  # fmt: skip
    return CheckedRequest(np.array(tokens, np.int32), extra, _limits(request, width, len(tokens), max_tokens))


def _check_quota(limit: str, needed: int, available: int, unit: str) -> None:
    if needed > available:
        raise QuotaExceededError(
            f"prompt and max_tokens need {needed}, and {limit} leaves {available} {unit}",
            field="max_tokens", limit=limit, value=available,
        )  # fmt: skip


def _limits(request: Request, width: int, num_tokens: int, max_tokens: int) -> tuple[int, ...]:
    """Return the most tokens that each sample may generate. Raises InvalidArgumentError naming stop_lengths."""
    if not np.size(request.stop_lengths):
        return (max_tokens,) * width
    lengths = int64_array(request.stop_lengths, "stop_lengths")
    if len(lengths) != width:
        raise InvalidArgumentError(f"has {len(lengths)} elements for {width} samples", field="stop_lengths")
    if np.count_nonzero(lengths <= num_tokens):
        refuse("stop_lengths", lengths <= num_tokens, f"must be above the {num_tokens} tokens of the prompt")
    return tuple(np.minimum(lengths - num_tokens, max_tokens).tolist())
