"""Translation of the messages of SchedulerService to native values, and of batches to protobuf responses."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kvservice.blocks import Slices
from kvservice.blocks.slices import in_turn
from kvservice.config import ServeConfig
from kvservice.errors import InvalidArgumentError, QuotaExceededError
from kvservice.scheduler import (
    BatchPolicy,
    Phase,
    PreemptionMode,
    QueueOrder,
    Report,
    Request,
    RequestSnapshot,
    ScheduledBatch,
    SchedulerConfig,
)
from kvservice.server import codec
from kvservice.server.sessions.scheduler import SchedulerSettings, StepRequest
from kvservice.v1 import blocks_pb2, scheduler_pb2
from kvservice.wire.tensors import to_ints, token_array

_POLICIES: Final = {
    scheduler_pb2.BATCH_POLICY_UNSPECIFIED: BatchPolicy.CHUNKED,
    scheduler_pb2.BATCH_POLICY_CHUNKED: BatchPolicy.CHUNKED,
    scheduler_pb2.BATCH_POLICY_PREFILL_FIRST: BatchPolicy.PREFILL_FIRST,
}
_ORDERS: Final = {
    scheduler_pb2.QUEUE_ORDER_UNSPECIFIED: QueueOrder.FCFS,
    scheduler_pb2.QUEUE_ORDER_FCFS: QueueOrder.FCFS,
    scheduler_pb2.QUEUE_ORDER_PRIORITY: QueueOrder.PRIORITY,
}
_PREEMPTIONS: Final = {
    scheduler_pb2.PREEMPTION_MODE_UNSPECIFIED: PreemptionMode.AUTO,
    scheduler_pb2.PREEMPTION_MODE_RECOMPUTE: PreemptionMode.RECOMPUTE,
    scheduler_pb2.PREEMPTION_MODE_SWAP: PreemptionMode.SWAP,
    scheduler_pb2.PREEMPTION_MODE_AUTO: PreemptionMode.AUTO,
}
_PHASES: Final = {
    Phase.WAITING: scheduler_pb2.REQUEST_PHASE_WAITING,
    Phase.PREFILLING: scheduler_pb2.REQUEST_PHASE_PREFILLING,
    Phase.DECODING: scheduler_pb2.REQUEST_PHASE_DECODING,
    Phase.SWAPPED: scheduler_pb2.REQUEST_PHASE_SWAPPED,
}
# A request that leaves one of these settings unset gets the default of SchedulerConfig.
_OPTIONAL: Final = (
    "lookahead", "long_prefill_tokens", "max_long_prefills", "reserve_steps", "max_stalled_fraction",
    "size_delay_steps", "max_size_delay_steps", "delay_factor", "share_prefixes", "swap_block_s", "compute_token_s",
)  # fmt: skip


def settings_of(request: scheduler_pb2.OpenSchedulerRequest, config: ServeConfig) -> SchedulerSettings:
    """Return the settings of a request. Raises InvalidArgumentError, and QuotaExceededError for a setting above a limit
    of the daemon."""
    limits = config.request_limits
    highest = {
        "max_step_tokens": ("max_request_tokens", limits.max_request_tokens),
        "max_running": min(
            ("max_request_sequences", limits.max_request_sequences),
            ("max_sequences", config.max_sequences),
            key=lambda limit: limit[1],
        ),
        "max_requests": ("max_queued_requests", config.max_queued_requests),
    }
    values: dict[str, Any] = {name: getattr(request, name) for name in _OPTIONAL if request.HasField(name)}
    for name, (limit, value) in highest.items():
        values[name] = getattr(request, name) if request.HasField(name) else min(getattr(SchedulerConfig, name), value)
        if values[name] > value:
            raise QuotaExceededError(f"is above {limit} = {value}", field=name, limit=limit, value=value)
    settings = SchedulerConfig(
        batches=_choice(_POLICIES, request.policy, "policy"),
        order=_choice(_ORDERS, request.order, "order"),
        preemption=_choice(_PREEMPTIONS, request.preemption, "preemption"),
        **values,
    )
    weight = request.weight if request.HasField("weight") else 1.0
    fixed = [request.HasField(name) for name in ("swap_block_s", "compute_token_s")]
    return SchedulerSettings(settings, weight, *fixed)


def _choice(choices: dict[Any, Any], value: int, field: str) -> Any:
    if value not in choices:
        raise InvalidArgumentError(f"{value} is unknown", field=field)
    return choices[value]


def opened_response(settings: SchedulerSettings, *, existed: bool) -> scheduler_pb2.OpenSchedulerResponse:
    config = settings.config
    return scheduler_pb2.OpenSchedulerResponse(
        max_step_tokens=config.max_step_tokens,
        max_running=config.max_running,
        lookahead=config.lookahead,
        max_requests=config.max_requests,
        existed=existed,
    )


def requests_of(request: scheduler_pb2.AddRequestsRequest) -> Slices[list[Request]]:
    if not request.requests:
        raise InvalidArgumentError("must not be empty", field="requests")
    return in_turn(_request(one) for one in request.requests)


def _request(message: scheduler_pb2.ScheduledRequest) -> Request:
    return Request(
        message.request_id,
        token_array(message),
        message.max_tokens,
        message.priority,
        codec.extra_keys(message.extra_keys),
        message.width,
        to_ints(message.stop_lengths),
        message.beams,
    )


def step_request(request: scheduler_pb2.ScheduleRequest) -> StepRequest:
    return StepRequest(
        [_report(one) for one in request.reports],
        request.max_step_tokens or None,
        request.max_running or None,
        request.ahead,
        request.retry,
    )


def _report(message: scheduler_pb2.StepReport) -> Report:
    return Report(
        batch=message.batch,
        token_ids=token_array(message),
        num_tokens=codec.optional_ints(message.num_tokens, np.int32),
        parents=codec.optional_ints(message.parent_ids),
        finished=to_ints(message.finished_ids),
        proposals=codec.optional_ints(message.proposals, np.int32),
        num_proposed=codec.optional_ints(message.num_proposed, np.int32),
    )


def description(snapshot: RequestSnapshot, *, return_token_ids: bool) -> scheduler_pb2.RequestDescription:
    return scheduler_pb2.RequestDescription(
        request_id=snapshot.request_id,
        phase=_PHASES[snapshot.phase],
        sequences=[
            scheduler_pb2.RequestSequence(
                sequence_id=sample.sequence_id,
                finished=sample.finished,
                num_generated=sample.num_generated,
                length=len(sample.token_ids),
                token_ids=sample.token_ids.tolist() if return_token_ids else (),
            )
            for sample in snapshot.samples
        ],
        extra_keys=[blocks_pb2.ExtraKey(position=position, key=key) for position, key in snapshot.extra_keys],
    )


def schedule_response(
    batch: ScheduledBatch, ended: list[int], mapped: tuple[int, int] | None
) -> scheduler_pb2.ScheduleResponse:
    """Encode a batch. `ended` are the requests that the reports have ended; `mapped` is as in `step_response`."""
    response = scheduler_pb2.ScheduleResponse(
        finished_ids=ended,
        preempted_ids=[one.sequence_id for one in batch.preempted],
        preempted_tokens=[one.computed for one in batch.preempted],
        preempted_swapped=[one.swapped for one in batch.preempted],
        num_stalled=batch.num_stalled,
        num_waiting=batch.counts.waiting,
        num_running=batch.counts.running,
        num_swapped=batch.counts.swapped,
    )
    if batch.step is not None:
        response.batch = batch.number
        response.step.CopyFrom(codec.step_response(batch.step, return_slot_mapping=False, mapped=mapped))
        response.sequence_ids.extend(batch.step.sequence_ids.tolist())
        response.num_decodes = batch.num_decodes
        response.sampled_ids.extend(batch.sampled.tolist())
        response.sampled_rows.extend(batch.sampled_rows.tolist())
    return response
