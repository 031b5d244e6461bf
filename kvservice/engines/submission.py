"""Requests of the engine as requests of the daemon's scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from kvservice.client import ScheduledRequest
from kvservice.engines.requests import EngineRequest
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
