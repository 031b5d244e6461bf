"""Configuration of the scheduler: budgets, policies and their constants."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from kvservice.errors import InvalidArgumentError


class BatchPolicy(Enum):
    """The contents of a batch.

    CHUNKED: decodes first, then chunks of prompts as far as the token budget reaches. PREFILL_FIRST: whole prompts
    while any is admitted, decodes otherwise (vLLM v0 without chunked prefill).
    """

    CHUNKED = "chunked"
    PREFILL_FIRST = "prefill_first"


class QueueOrder(Enum):
    """FCFS: by arrival. PRIORITY: by priority (lower first), then by arrival; a waiting request preempts running
    requests of lower priority."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class PreemptionMode(Enum):
    """How the blocks of a preempted request are given up. AUTO chooses what costs less at the measured speeds."""

    RECOMPUTE = "recompute"
    SWAP = "swap"
    AUTO = "auto"


@dataclass
class Speeds:
    """The seconds to copy one block to the swap tier, and to compute one token. They may change while the engine
    runs."""

    swap_block_s: float
    compute_token_s: float


@dataclass(frozen=True)
class SchedulerConfig:
    """Budgets of a step, policies, and the constants of the policies.

    `max_step_tokens` and `max_running` limit a step's tokens and the running sequences. `lookahead` slots past the next
    token are reserved for each running sequence. Prompts longer than `long_prefill_tokens` get at most so many tokens
    of a step, and at most `max_long_prefills` of them are in progress; 0 means no limit.

    `reserve_steps`: new requests leave free the blocks that running sequences will need within so many steps.
    `max_stalled_fraction`: while blocks are short, up to this fraction of the running sequences (at least one) wait for
    a block where they are; beyond it, one is preempted. `size_delay_steps`: a prompt queues as if it arrived so many
    steps later for each of its blocks, at most `max_size_delay_steps`; 0 is strictly first come, first served.
    `delay_factor`: new requests wait until the oldest has waited so many times the duration of the last prefill.

    `swap_block_s` and `compute_token_s` are the first values of the engine's `speeds`, see Speeds. Raises
    InvalidArgumentError naming the field that is out of range.
    """

    max_step_tokens: int = 8192
    max_running: int = 256
    batches: BatchPolicy = BatchPolicy.CHUNKED
    order: QueueOrder = QueueOrder.FCFS
    preemption: PreemptionMode = PreemptionMode.AUTO
    lookahead: int = 0
    long_prefill_tokens: int = 0
    max_long_prefills: int = 0
    max_requests: int = 65536
    reserve_steps: int = 5
    max_stalled_fraction: float = 1 / 16
    size_delay_steps: float = 0.3
    max_size_delay_steps: float = 20.0
    delay_factor: float = 0.0
    share_prefixes: bool = True
    swap_block_s: float = 40e-6
    compute_token_s: float = 20e-6

    def __post_init__(self) -> None:
        for field, lowest, highest in (
            ("max_step_tokens", 1, 2**31 - 1),
            ("max_running", 1, 2**24),
            ("lookahead", 0, 2**16),
            ("long_prefill_tokens", 0, 2**31 - 1),
            ("max_long_prefills", 0, 2**24),
            ("max_requests", 1, 2**24),
            ("reserve_steps", 0, 2**16),
        ):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
                raise InvalidArgumentError(f"must be a whole number from {lowest} to {highest}", field=field)
        for field in (
            "max_stalled_fraction",
            "size_delay_steps",
            "max_size_delay_steps",
            "delay_factor",
            "swap_block_s",
            "compute_token_s",
        ):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise InvalidArgumentError("must be a number, at least 0", field=field)
        if self.max_stalled_fraction > 1:
            raise InvalidArgumentError("must be a fraction from 0 to 1", field="max_stalled_fraction")
        for field, kind in (("batches", BatchPolicy), ("order", QueueOrder), ("preemption", PreemptionMode)):
            if not isinstance(getattr(self, field), kind):
                raise InvalidArgumentError(f"must be a {kind.__name__}", field=field)
