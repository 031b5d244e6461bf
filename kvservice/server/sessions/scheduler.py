"""The scheduler of one session: its requests within the daemon's limits, the loads of blocks for those that wait, and
the measured speed of its engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import re
from collections.abc import Awaitable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvservice.blocks import SessionNamespace, Slices
from kvservice.blocks.slices import SLICE_SEQUENCES
from kvservice.engine import CacheEngine
from kvservice.errors import (
    DuplicateSequenceError,
    FailedPreconditionError,
    InvalidArgumentError,
    KVServiceError,
    QuotaExceededError,
    SequenceScheduledError,
    UnknownSequenceError,
    UnknownSessionError,
)
from kvservice.scheduler import (
    EngineScheduler,
    Report,
    Request,
    RequestSnapshot,
    ScheduledBatch,
    SchedulerConfig,
    Speeds,
)
from kvservice.scheduler.requests import PreparedRequest, RequestState
from kvservice.server.tiering.pool_tier import PoolTier, PromptLoad
from kvservice.wire.tensors import Array

# Tokens of prompts in one slice, and the fixed cost of a request in tokens. A slice takes a few milliseconds.
_SLICE_TOKENS: Final = 32768
_REQUEST_TOKENS: Final = 256
# Waiting requests whose missing blocks are loaded ahead of their admission.
_LOADED_AHEAD: Final = 8
# Fields of the scheduler that have another name in the contract.
_FIELDS: Final = {"finished": "finished_ids", "parents": "parent_ids"}


_log = logging.getLogger(__name__)


class SessionScheduler:
    """The scheduler of one session. A method that raises has changed nothing."""

    def __init__(
        self, engine: CacheEngine, namespace: SessionNamespace, settings: SchedulerSettings, totals: QueueTotals
    ) -> None:
        self.settings = settings
        self.scheduler: EngineScheduler = engine.schedulers.open_engine(namespace, settings.config, settings.weight)
        self._engine, self._namespace, self._totals = engine, namespace, totals
        speeds = self.scheduler.queues.speeds
        self._meter = SpeedMeter(
            engine, speeds, swap_is_fixed=settings.swap_is_fixed, compute_is_fixed=settings.compute_is_fixed
        )
        # The number of prompt tokens of each request that is not finished.
        self._requests: dict[int, int] = {}
        # Aborted requests that end with a report.
        self._aborted: set[int] = set()
        # Requests that could not go on, and that the client has not aborted since. They end with a report, too.
        self._failed: set[int] = set()
        # The error that stopped the making of a batch. The next call raises it.
        self._error: Exception | None = None
        # The loads of blocks that are in progress, each with the request that waited for it when it began.
        self._loads: set[tuple[RequestState, PromptLoad]] = set()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, requests: Sequence[Request], now_s: float, reserved: Collection[int]) -> Slices[None]:
        """Queue all requests in the last slice, or none. `reserved` are ids that other sequences will have. Raises the
        errors of EngineScheduler.add; QuotaExceededError; UnknownSessionError if the session ends meanwhile."""
        sizes = [len(request.token_ids) for request in requests]  # type: ignore[arg-type]  # they are arrays
        try:
            self._totals.add(len(sizes), sum(sizes))
        except QuotaExceededError:
            self.scheduler.queues.counters.refused += len(sizes)
            raise
        try:
            prepared = yield from self._prepare(requests)
            self._check_reserved(prepared, reserved)
            self.scheduler.enqueue(prepared, now_s, "requests[{}].request_id")
        except BaseException:
            self._totals.remove(len(sizes), sum(sizes))
            raise
        self._requests.update(zip((request.request_id for request in requests), sizes, strict=True))

    def _prepare(self, requests: Sequence[Request]) -> Slices[list[PreparedRequest]]:
        """Check requests and hash their prompts, in slices."""
        prepared: list[PreparedRequest] = []
        in_slice = 0
        for i, request in enumerate(requests):
            with fields_below(f"requests[{i}]"):
                prepared.append((yield from self.scheduler.prepare(request)))
            in_slice += _REQUEST_TOKENS + len(prepared[-1].checked.tokens)
            if in_slice >= _SLICE_TOKENS:
                yield
                in_slice = 0
        if self._namespace.closed:
            raise UnknownSessionError("the session was closed", field="session_token")
        return prepared

    def _check_reserved(self, prepared: Sequence[PreparedRequest], reserved: Collection[int]) -> None:
        """Raise DuplicateSequenceError if a sequence of a request has one of these ids."""
        for i, one in enumerate(prepared if reserved else ()):
            if used := [sequence_id for sequence_id in one.sequence_ids if sequence_id in reserved]:
                raise DuplicateSequenceError(
                    f"sequence {used[0]} is in use", field=f"requests[{i}].request_id", sequence_id=used[0]
                )

    def abort(self, request_ids: Sequence[int]) -> list[int]:
        """Abort all these requests, or none. Returns those that have ended already; the others end with a report.
        Raises UnknownSequenceError, InvalidArgumentError."""
        for i, request_id in enumerate(request_ids):
            if request_id not in self._requests or request_id in self._aborted:
                raise UnknownSequenceError(
                    f"request {request_id} is unknown or finished", field=f"request_ids[{i}]", sequence_id=request_id
                )
        if len(set(request_ids)) != len(request_ids):
            raise InvalidArgumentError("a request appears twice", field="request_ids")
        for request_id in request_ids:
            if request_id not in self._failed:
                self.scheduler.abort(request_id)
        self._failed.difference_update(request_ids)
        ended = [request_id for request_id in request_ids if request_id not in self.scheduler.queues.requests]
        self._aborted.update(set(request_ids).difference(ended))
        self._forget(ended)
        return ended

    def load_ahead(self, tier: PoolTier) -> Awaitable[object] | None:
        """Begin to load missing blocks of the requests that are admitted next. They are not admitted until then.
        Returns what to wait for if nothing else can run meanwhile."""
        queues = self.scheduler.queues
        for state in itertools.islice(queues.waiting, _LOADED_AHEAD):
            if not state.looked_up:
                state.looked_up = True
                load = tier.before_admission(
                    queues.namespace, state.tokens, state.hashes, queues.speeds.compute_token_s
                )
                if load is not None:
                    self._loads.add((state, load))
                    queues.loading.add(load.chain_hash)
                    load.done.add_done_callback(functools.partial(self._loaded, state, load))
        if queues.num_running or queues.flight or len(queues.swapped):
            return None
        first = next(iter(queues.waiting), None)
        dones = [load.done for state, load in self._loads if state is first]
        return asyncio.wait(dones) if dones else None

    def _loaded(self, state: RequestState, load: PromptLoad, _done: asyncio.Future[object]) -> None:
        self._loads.discard((state, load))
        if all(one.chain_hash != load.chain_hash for _, one in self._loads):
            self.scheduler.queues.loading.discard(load.chain_hash)

    def step(self, request: StepRequest, now_s: float) -> tuple[list[int], ScheduledBatch]:
        """Apply the reports, then make a batch. Returns the ids of the requests that have ended, and the batch, whose
        copies the device executes. Raises the errors of EngineScheduler.update and schedule. An error that comes when
        something has changed already is raised by the next call, once."""
        self._check(request)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        self._meter.called([report.batch for report in request.reports], now_s)
        ended: list[int] = []
        for report in request.reports:
            ended += self.scheduler.update(report, now_s)
        batch = self._next_batch(request, now_s)
        self._note_errors(batch)
        self._meter.made(batch)
        self._meter.forget(self.scheduler.unreported)
        over = (*self._aborted, *self._failed)
        ended += [request_id for request_id in over if request_id not in self.scheduler.queues.requests]
        ended = list(dict.fromkeys(ended))
        self._forget(ended)
        return ended, batch

    def _next_batch(self, request: StepRequest, now_s: float) -> ScheduledBatch:
        """Open the batch in progress again for a retry, if anything of it is left to compute, or make the next one."""
        again = self._engine.retry(self.scheduler) if request.retry else None
        if again is not None and again.step is not None:
            return again
        tokens, running = request.max_step_tokens, request.max_running
        batch = self._engine.schedule(self.scheduler, now_s, tokens, running, ahead=request.ahead)
        if again is None:
            return batch
        preempted, error = again.preempted + batch.preempted, again.error or batch.error
        return dataclasses.replace(batch, preempted=preempted, error=error)

    def _note_errors(self, batch: ScheduledBatch) -> None:
        """Log the errors of a batch. Its failed requests end with it, or with a report."""
        for request_id, error in batch.failed:
            _log.warning("request %d of a scheduler has failed", request_id, exc_info=error)
        self._failed.update(request_id for request_id, _ in batch.failed)
        if batch.error is not None:
            _log.error("a batch could not be made as planned", exc_info=batch.error)
            self._error = batch.error

    def _check(self, request: StepRequest) -> None:
        """Raise, before a report is accepted, the errors that the scheduler would raise after it."""
        config = self.settings.config
        for field, highest in (("max_step_tokens", config.max_step_tokens), ("max_running", config.max_running)):
            value = getattr(request, field)
            if value is not None and not 1 <= value <= highest:
                raise InvalidArgumentError(f"must be from 1 to {highest}, not {value}", field=field)
        with _field_names():
            self.scheduler.check(request.reports)
        left = self.scheduler.unreported[len(request.reports) :]
        if len(left) > request.ahead and not request.retry:
            raise FailedPreconditionError(f"batch {left[0]} is not reported", field="reports")

    def describe(
        self, request_ids: Sequence[int] | None, first: int, limits: PageLimits
    ) -> Slices[list[RequestSnapshot]]:
        """Describe these requests, or all from index `first` on, in slices. The page has the first of them that are
        within the limits, and at least one. Raises UnknownSequenceError, also for a request that ends meanwhile."""
        if request_ids is None:
            following = itertools.islice(self._requests, first, None)
            request_ids = list(itertools.islice(following, limits.max_sequences))
        page: list[RequestSnapshot] = []
        num_sequences = num_tokens = 0
        for i, request_id in enumerate(request_ids):
            try:
                (snapshot,) = self.scheduler.describe([request_id])
            except KVServiceError as error:
                error.field = f"request_ids[{i}]"
                raise
            num_sequences += len(snapshot.samples)
            num_tokens += sum(len(sample.token_ids) for sample in snapshot.samples)
            if page and (num_sequences > limits.max_sequences or num_tokens > limits.max_tokens):
                break
            page.append(snapshot)
            if len(page) % SLICE_SEQUENCES == 0:
                yield
        return page

    def check_unscheduled(self, sequence_ids: Array | Sequence[int], field: str) -> None:
        """Raise SequenceScheduledError for a sequence that belongs to a request."""
        if not self._requests:
            return
        queues = self.scheduler.queues
        ended = {sequence_id for flight in queues.flight for sequence_id in flight.ended}
        for i, sequence_id in enumerate(sequence_ids):
            if int(sequence_id) in queues.requests or int(sequence_id) in queues.reserved or int(sequence_id) in ended:
                raise SequenceScheduledError(
                    f"sequence {sequence_id} belongs to the session's scheduler",
                    field=field.format(i), sequence_id=int(sequence_id),
                )  # fmt: skip

    def pause(self) -> None:
        """Stop waiting for blocks while the client is away, because other engines would keep them free. The next step
        resumes the wait."""
        self.scheduler.share.hungry = False

    def close(self) -> Slices[None]:
        """Forget all requests; the session's namespace is closed next. Returns slices that give back their memory."""
        queues = self.scheduler.queues
        states = list(queues.states.values())
        self._engine.schedulers.close_engine(self._namespace)
        queues.clear()
        self._forget(list(self._requests))
        return _drop_in_slices(states)

    def _forget(self, request_ids: Sequence[int]) -> None:
        if request_ids:
            sizes = [self._requests.pop(request_id) for request_id in request_ids]
            self._aborted.difference_update(request_ids)
            self._failed.difference_update(request_ids)
            self._totals.remove(len(sizes), sum(sizes))


def _drop_in_slices(states: list[RequestState]) -> Slices[None]:
    """Empty the list. A request and its samples refer to each other, which only the garbage collector would resolve."""
    while states:
        for state in states[-SLICE_SEQUENCES:]:
            state.group.members.clear()
        del states[-SLICE_SEQUENCES:]
        yield


@contextlib.contextmanager
def fields_below(path: str) -> Iterator[None]:
    """Put this path before the fields in errors of the scheduler."""
    try:
        yield
    except KVServiceError as error:
        error.field = f"{path}.{error.field}" if error.field else path
        raise


@contextlib.contextmanager
def _field_names() -> Iterator[None]:
    """Rename the fields of reports in errors to those of the contract."""
    try:
        yield
    except KVServiceError as error:
        error.field = re.sub(r"\w+", lambda name: _FIELDS.get(name[0], name[0]), error.field)
        raise


# ---- settings, calls for a batch, and limits


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


# ---- measured speeds: they decide whether preempted sequences are swapped or computed again

# Steps with fewer tokens, or without a part of a prompt, do not show how fast prompts are computed.
_MIN_TOKENS: Final = 64
# The weight of the latest step.
_WEIGHT: Final = 1 / 8


class SpeedMeter:
    """Measures the speeds of one engine by the times of its calls. A speed that the client has fixed stays."""

    def __init__(self, engine: CacheEngine, speeds: Speeds, *, swap_is_fixed: bool, compute_is_fixed: bool) -> None:
        self._engine, self._speeds = engine, speeds
        self._swap_is_fixed, self._compute_is_fixed = swap_is_fixed, compute_is_fixed
        # The tokens of each batch that is not reported, or 0 if its step does not count.
        self._tokens: dict[int, int] = {}
        self._called_at_s = 0.0

    def called(self, reported: list[int], now_s: float) -> None:
        """Note a call that reports these batches. The engine computed them since the last call."""
        num_tokens = [self._tokens.pop(number, 0) for number in reported]
        if num_tokens and min(num_tokens) > 0 and not self._compute_is_fixed:
            token_s = (now_s - self._called_at_s) / sum(num_tokens)
            self._speeds.compute_token_s += _WEIGHT * (token_s - self._speeds.compute_token_s)
        self._called_at_s = now_s
        if not self._swap_is_fixed:
            self._speeds.swap_block_s = self._engine.swap_block_s

    def made(self, batch: ScheduledBatch) -> None:
        """Note a batch that was made."""
        if batch.step is not None:
            counts = batch.num_tokens >= _MIN_TOKENS and batch.num_decodes < len(batch.step.sequence_ids)
            self._tokens[batch.number] = batch.num_tokens if counts else 0

    def forget(self, unreported: tuple[int, ...]) -> None:
        """Forget all batches except the unreported ones, because the others were taken back."""
        self._tokens = {number: self._tokens[number] for number in unreported if number in self._tokens}
