"""Requests of the engine as requests of the daemon's scheduler."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from transformers import PreTrainedModel

from kvservice.client import PoolInfo, ScheduledRequest
from kvservice.engines.host import DAEMON_LOST, WatchedScheduler
from kvservice.engines.requests import EngineRequest
from kvservice.errors import KVServiceError
from kvservice.integrations.transformers.keys import ExtraKeys, identify, private_keys, shared_keys


def scheduled(model: PreTrainedModel, requests: Sequence[EngineRequest]) -> list[ScheduledRequest]:
    """Return new requests as the scheduler takes them."""
    return [_whole(request, keys) for request, keys in zip(requests, _keys(model, len(requests)), strict=True)]


def remaining(model: PreTrainedModel, requests: Sequence[EngineRequest]) -> list[ScheduledRequest]:
    """Return what is left of requests after their state in the daemon is lost.

    Samples that have tokens become requests of their own, with these tokens as part of their prompts. Beams begin
    again, since a beam search is the same each time.
    """
    left: list[ScheduledRequest] = []
    for request, keys in zip(requests, _keys(model, len(requests)), strict=True):
        request.restart_beams()
        for sample in request.samples:
            sample.proposals = []
        request.grouped = not any(sample.num_generated for sample in request.samples)
        if request.grouped:
            left.append(_whole(request, keys))
            continue
        left += [
            ScheduledRequest(
                sample.sequence_id,
                sample.token_ids,
                sample.max_tokens - sample.num_generated,
                priority=sample.params.priority,
                extra_keys=keys,
            )
            for sample in request.samples
            if not sample.finished
        ]
    return left


def submit(scheduler: WatchedScheduler, requests: Sequence[ScheduledRequest], info: PoolInfo) -> None:
    """Queue all requests, or none, in as many calls as their limits need. No step of the scheduler is made meanwhile.

    Raises the daemon's errors.
    """
    added: list[int] = []
    for part in _parts(requests, info):
        try:
            scheduler.add(part)
        except DAEMON_LOST:
            raise
        except KVServiceError as error:
            error.field = _shifted(error.field, len(added))
            abort(scheduler, added, info)
            raise
        added += [request.request_id for request in part]


def _shifted(field: str, num_before: int) -> str:
    """Return the name of a field of a part, with the index of its request among all requests."""
    return re.sub(r"\[(\d+)\]", lambda at: f"[{int(at[1]) + num_before}]", field, count=1)


def abort(scheduler: WatchedScheduler, request_ids: Sequence[int], info: PoolInfo) -> list[int]:
    """Abort requests, in as many calls as their limits need. Returns those that have ended already."""
    most = info.max_request_sequences
    ended: list[int] = []
    for first in range(0, len(request_ids), most):
        ended += scheduler.abort(request_ids[first : first + most])
    return ended


def _parts(requests: Sequence[ScheduledRequest], info: PoolInfo) -> Iterator[list[ScheduledRequest]]:
    """Yield the requests in parts that fit into one call each."""
    part: list[ScheduledRequest] = []
    num_tokens = 0
    for request in requests:
        length = len(request.token_ids)  # type: ignore[arg-type]  # it is a list or a tuple
        if part and (len(part) == info.max_request_sequences or num_tokens + length > info.max_request_tokens):
            yield part
            part, num_tokens = [], 0
        part.append(request)
        num_tokens += length
    if part:
        yield part


def aborted_ids(request: EngineRequest) -> list[int]:
    """Return the ids by which the scheduler knows what is aborted of a request."""
    if request.grouped:
        return [request.request_id]
    return [sample.sequence_id for sample in request.samples if sample.finish_reason in ("abort", "error")]


def _whole(request: EngineRequest, keys: ExtraKeys) -> ScheduledRequest:
    prompt = request.prompt
    return ScheduledRequest(
        request.request_id,
        prompt.token_ids,
        prompt.max_tokens,
        priority=prompt.params.priority,
        extra_keys=keys,
        width=prompt.params.width,
        beams=request.beams is not None,
    )


def _keys(model: PreTrainedModel, count: int) -> list[ExtraKeys]:
    """Return the extra keys of `count` prompts. Those of a model whose K/V are not shared are all different."""
    identity = identify(model)
    if identity.private_because:
        return [private_keys() for _ in range(count)]
    return [shared_keys(identity)] * count
