"""The values of a session's scheduler: requests and reports that a client sends, and batches that it receives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypedDict, TypeVar

from kvservice.client.requests import build, int_list, whole
from kvservice.client.sequences import ExtraKeys, extra_key_messages
from kvservice.v1 import scheduler_pb2
from kvservice.wire.tensors import Array

StepT = TypeVar("StepT")
SchedulerT = TypeVar("SchedulerT")


class SchedulerArguments(TypedDict, total=False):
    """The settings of a scheduler. A setting that is left out has the daemon's default.

    `max_step_tokens` and `max_running` limit the tokens of a step and the running sequences. `policy`: "chunked"
    (decodes first, then chunks of prompts) or "prefill_first". `order`: "fcfs" or "priority". `preemption`:
    "recompute", "swap" or "auto". `lookahead`: the most proposals for a sequence, for which slots are reserved. A
    prompt longer than `long_prefill_tokens` gets at most so many tokens of a step, and at most `max_long_prefills` of
    them are in progress. `max_requests`: the most unfinished requests. `weight`: the share of the pool among all
    schedulers. `swap_block_s` and `compute_token_s`: seconds to copy a block to the swap tier and to recompute a token,
    which the daemon measures otherwise. The rest is explained in OpenSchedulerRequest in scheduler.proto.
    """

    max_step_tokens: int
    max_running: int
    policy: str
    order: str
    preemption: str
    lookahead: int
    long_prefill_tokens: int
    max_long_prefills: int
    max_requests: int
    reserve_steps: int
    max_stalled_fraction: float
    size_delay_steps: float
    max_size_delay_steps: float
    delay_factor: float
    share_prefixes: bool
    swap_block_s: float
    compute_token_s: float
    weight: float


@dataclass(frozen=True)
class SchedulerInfo:
    """The settings of a scheduler that limit its client."""

    max_step_tokens: int
    max_running: int
    lookahead: int
    max_requests: int


@dataclass(frozen=True)
class ScheduledRequest:
    """A request for `width` continuations of a prompt, of at most `max_tokens` tokens each.

    Its sequences have the ids from `request_id` to `request_id + width - 1`. `token_ids` is int[n], n >= 1. A lower
    `priority` is more urgent. `extra_keys` as in SessionCore.allocate. `stop_lengths`: empty, or int[width], the length
    with the prompt at which each sample ends. `beams`: the samples run in lock-step, and reports may rearrange them.
    """

    request_id: int
    token_ids: Iterable[int]
    max_tokens: int
    priority: int = 0
    extra_keys: ExtraKeys = ()
    width: int = 1
    stop_lengths: Iterable[int] = ()
    beams: bool = False


@dataclass(frozen=True)
class BatchReport:
    """The tokens that the engine sampled after the batch with the number `batch`.

    The m rows are the sequences of the batch's `sampled`, in their order, without the sequences that the report of the
    batch before named in `finished`. `token_ids` is int[t], their sampled tokens. `num_tokens` is int[m], or None for
    one each. `parents` is int[m], for beams the sequence that each row continues, or None. `finished` is int[f], the
    sequences that the engine found finished. `proposals` is int[p], draft tokens for the next step, with `num_proposed`
    int[m] of each row, or None for none.
    """

    batch: int
    token_ids: Iterable[int] = ()
    num_tokens: Iterable[int] | None = None
    parents: Iterable[int] | None = None
    finished: Iterable[int] = ()
    proposals: Iterable[int] = ()
    num_proposed: Iterable[int] | None = None


@dataclass(frozen=True)
class PreemptedSequence:
    """A sequence that was preempted with `num_tokens` computed tokens. `swapped` says that they are in
    the swap tier."""

    sequence_id: int
    num_tokens: int
    swapped: bool


@dataclass(frozen=True, eq=False)
class EngineBatch(Generic[StepT]):
    """The batch of one step.

    `number` is 0 if no sequence can run; then `step` is None, and there is nothing to report. `sequence_ids` is
    int64[n], the sequences of the step; the first `num_decodes` get their next token, with their proposals, and the
    others a chunk of their prompt. `sampled` is int64[m], the sequences for which the engine samples tokens, and
    `sampled_rows` int32[m] the row of the step that each of them samples from. `finished` are the requests that the
    reports of the call have ended. `num_stalled` running sequences wait for a block. `waiting`, `running` and `swapped`
    count requests.
    """

    number: int
    step: StepT | None
    sequence_ids: Array
    num_decodes: int
    sampled: Array
    sampled_rows: Array
    finished: list[int]
    preempted: list[PreemptedSequence]
    num_stalled: int
    waiting: int
    running: int
    swapped: int


@dataclass(frozen=True)
class SampleInfo:
    """The daemon's state of one sequence of a request. `length` counts its tokens with the prompt and the last reported
    token. `token_ids` is empty unless requested."""

    sequence_id: int
    finished: bool
    num_generated: int
    length: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class RequestInfo:
    """The daemon's state of a request. `phase` is "waiting", "prefilling", "decoding" or "swapped"."""

    request_id: int
    phase: str
    sequences: tuple[SampleInfo, ...]
    extra_keys: tuple[tuple[int, bytes], ...]


def request_message(request: ScheduledRequest) -> scheduler_pb2.ScheduledRequest:
    return build(
        scheduler_pb2.ScheduledRequest,
        request_id=whole(request.request_id, "request_id"),
        token_ids=int_list(request.token_ids, "token_ids"),
        max_tokens=whole(request.max_tokens, "max_tokens"),
        priority=whole(request.priority, "priority"),
        extra_keys=extra_key_messages(request.extra_keys),
        width=whole(request.width, "width"),
        stop_lengths=int_list(request.stop_lengths, "stop_lengths"),
        beams=bool(request.beams),
    )


def report_message(report: BatchReport) -> scheduler_pb2.StepReport:
    return build(
        scheduler_pb2.StepReport,
        batch=whole(report.batch, "batch"),
        token_ids=int_list(report.token_ids, "token_ids"),
        num_tokens=_optional_list(report.num_tokens, "num_tokens"),
        parent_ids=_optional_list(report.parents, "parent_ids"),
        finished_ids=int_list(report.finished, "finished_ids"),
        proposals=int_list(report.proposals, "proposals"),
        num_proposed=_optional_list(report.num_proposed, "num_proposed"),
    )


def _optional_list(values: Iterable[int] | None, field: str) -> list[int] | None:
    return None if values is None else int_list(values, field)


def request_info(message: scheduler_pb2.RequestDescription) -> RequestInfo:
    phase = scheduler_pb2.RequestPhase.Name(message.phase)
    return RequestInfo(
        message.request_id,
        str(phase).removeprefix("REQUEST_PHASE_").lower(),
        tuple(
            SampleInfo(one.sequence_id, one.finished, one.num_generated, one.length, tuple(one.token_ids))
            for one in message.sequences
        ),
        tuple((extra.position, extra.key) for extra in message.extra_keys),
    )
