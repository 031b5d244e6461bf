"""Values of the schedulers of sessions: their settings, calls for a batch, and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvservice.errors import QuotaExceededError
from kvservice.scheduler import Report, SchedulerConfig


@dataclass(frozen=True)
class SchedulerSettings:
    """The settings that a client has asked for. A speed that is fixed is not measured."""

    config: SchedulerConfig
    weight: float
    swap_is_fixed: bool = False
    compute_is_fixed: bool = False


@dataclass(frozen=True)
class StepRequest:
    """A call for the next batch. `max_step_tokens` and `max_running` are None for the scheduler's own budgets."""

    reports: Sequence[Report]
    max_step_tokens: int | None
    max_running: int | None
    ahead: bool
    retry: bool


@dataclass(frozen=True)
class PageLimits:
    """The most sequences, and the most tokens, of a page of descriptions."""

    max_sequences: int
    max_tokens: int


class QueueTotals:
    """Counts the unfinished requests of all sessions' schedulers, and the tokens of their prompts."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._limits = {"max_queued_requests": max_requests, "max_queued_tokens": max_tokens}
        self.requests = self.tokens = 0

    def add(self, num_requests: int, num_tokens: int) -> None:
        """Count new requests. Raises QuotaExceededError."""
        totals = (self.requests + num_requests, self.tokens + num_tokens)
        for (limit, value), total in zip(self._limits.items(), totals, strict=True):
            if total > value:
                raise QuotaExceededError(
                    f"all schedulers would have {total}, more than {limit} = {value}",
                    field="requests", limit=limit, value=value,
                )  # fmt: skip
        self.requests, self.tokens = totals

    def remove(self, num_requests: int, num_tokens: int) -> None:
        """Forget requests that have ended."""
        self.requests -= num_requests
        self.tokens -= num_tokens
        assert min(self.requests, self.tokens) >= 0, "more requests have ended than were added"
