"""Descriptions of requests, with all their tokens: an engine that starts again goes on from them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy.typing as npt

from kvservice.blocks.arguments import int64_array
from kvservice.blocks.plans import Int32Array
from kvservice.errors import InvalidArgumentError, UnknownSequenceError
from kvservice.scheduler.requests import Phase, RequestGroup
from kvservice.scheduler.state import EngineQueues


@dataclass(frozen=True, slots=True, eq=False)
class SampleSnapshot:
    """Description of a sample. `token_ids` int32[n] are the prompt and all `num_generated` reported tokens. A finished
    sample of a request that goes on has no blocks any more."""

    sequence_id: int
    finished: bool
    num_generated: int
    token_ids: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class RequestSnapshot:
    """Description of a request: the phase of its first sample that is not finished, all samples in the order of their
    ids, and the extra keys of the request."""

    request_id: int
    phase: Phase
    samples: tuple[SampleSnapshot, ...]
    extra_keys: Sequence[tuple[int, bytes]]


def describe_requests(
    queues: EngineQueues, request_ids: npt.ArrayLike | None, first: int, limit: int | None
) -> list[RequestSnapshot]:
    """See EngineScheduler.describe."""
    if request_ids is None:
        chosen = itertools.islice(queues.requests.values(), min(first, len(queues.requests)), None)
        return [_describe(queues, group) for group in itertools.islice(chosen, limit)]
    ids = int64_array(request_ids, "request_ids").tolist()
    for i, request_id in enumerate(ids):
        if request_id < 0:
            raise InvalidArgumentError("must not be negative", field=f"request_ids[{i}]")
        if request_id not in queues.requests:
            raise UnknownSequenceError(
                f"request {request_id} is unknown or finished", field=f"request_ids[{i}]", sequence_id=request_id
            )
    return [_describe(queues, queues.requests[request_id]) for request_id in ids]


def _describe(queues: EngineQueues, group: RequestGroup) -> RequestSnapshot:
    """Describe one request."""
    samples = []
    for sequence_id in range(group.request_id, group.request_id + group.request.width):
        state, finished = queues.states.get(sequence_id), sequence_id in group.ended
        if finished:
            tokens = group.ended[sequence_id]
        else:  # before the fork, all samples have the first one's tokens
            tokens = queues.tokens_of(group.members[0] if state is None else state)
        samples.append(SampleSnapshot(sequence_id, finished, len(tokens) - group.num_prompt_tokens, tokens))
    request = group.request
    return RequestSnapshot(group.request_id, group.members[0].phase, tuple(samples), request.extra_keys)
