"""The handlers of BlockService, and their codec: sequences and their blocks, steps, the prefix cache."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from kvservice._ext import packed_fixed32, packed_fixed64, varint_field
from kvservice.blocks import (
    AllocationRequest,
    AllocStatus,
    DiskSequence,
    SequenceSnapshot,
    SessionNamespace,
    Slices,
    StepPlan,
)
from kvservice.blocks.slices import SLICE_SEQUENCES, Waits, in_turn
from kvservice.config import ServeConfig
from kvservice.engine import CacheEngine
from kvservice.errors import InvalidArgumentError, KVServiceError
from kvservice.server.calls.handlers import (
    AnyHandler,
    Published,
    WhileDraining,
    in_session,
    max_response_bytes,
    response_too_large,
)
from kvservice.server.memory.step_tables import Run
from kvservice.server.sessions.saved import DiskSwaps
from kvservice.server.sessions.session import ServerSession
from kvservice.server.tenants import ADMINS, names_salt
from kvservice.server.tiering.pool_tier import PoolTier
from kvservice.v1 import (
    blocks_pb2,
)
from kvservice.wire.tensors import Array, token_array

T = TypeVar("T")

ALLOC_STATUS: Final = {
    AllocStatus.OK: blocks_pb2.ALLOC_STATUS_OK,
    AllocStatus.LATER: blocks_pb2.ALLOC_STATUS_LATER,
    AllocStatus.NEVER: blocks_pb2.ALLOC_STATUS_NEVER,
}


class BlockCalls:
    def __init__(
        self, config: ServeConfig, engine: CacheEngine, swaps: DiskSwaps, tier: PoolTier | None = None
    ) -> None:
        """`tier` loads missing blocks, if there is one."""
        self._engine, self._swaps = engine, swaps
        self._manager = engine.manager
        self._tier = tier
        before = None if tier is None else tier.before_allocation
        self._allocate = functools.partial(self._manager.allocate_in_slices, before=before)
        self._max_request_sequences = config.max_request_sequences
        self._max_response_bytes = max_response_bytes(config)

    def handlers(self) -> tuple[AnyHandler, ...]:
        refused = WhileDraining.REFUSED
        return (
            in_session("allocate", blocks_pb2.AllocateRequest, self.allocate, refused),
            in_session("can_allocate", blocks_pb2.CanAllocateRequest, self.can_allocate),
            in_session("append", blocks_pb2.AppendRequest, self.append, refused, publishes=True),
            in_session("can_append", blocks_pb2.CanAppendRequest, self.can_append),
            in_session("open_step", blocks_pb2.OpenStepRequest, self.open_step, refused, publishes=True),
            in_session("open_ahead", blocks_pb2.OpenAheadRequest, self.open_ahead, refused, publishes=True),
            in_session("commit_ahead", blocks_pb2.CommitAheadRequest, self.commit_ahead, publishes=True),
            in_session("truncate", blocks_pb2.TruncateRequest, self.truncate),
            in_session("fork", blocks_pb2.ForkRequest, self.fork, refused),
            in_session("swap_out", blocks_pb2.SwapOutRequest, self.swap_out, refused),
            in_session("can_swap_out", blocks_pb2.CanSwapOutRequest, self.can_swap_out),
            in_session("swap_in", blocks_pb2.SwapInRequest, self.swap_in, refused),
            in_session("can_swap_in", blocks_pb2.CanSwapInRequest, self.can_swap_in),
            in_session("free", blocks_pb2.FreeRequest, self.free),
            in_session("describe", blocks_pb2.DescribeRequest, self.describe),
            in_session("match_prefix", blocks_pb2.MatchPrefixRequest, self.match_prefix),
            in_session("pin", blocks_pb2.PinRequest, self.pin, refused),
            in_session("unpin", blocks_pb2.UnpinRequest, self.unpin),
            in_session("reset_prefix_cache", blocks_pb2.ResetPrefixCacheRequest, self.reset_prefix_cache, roles=ADMINS),
            in_session("common_prefix", blocks_pb2.CommonPrefixRequest, self.common_prefix),
        )

    def allocate(
        self, session: ServerSession, request: blocks_pb2.AllocateRequest
    ) -> Waits[blocks_pb2.AllocateResponse]:
        ids = [sequence.sequence_id for sequence in request.sequences]
        if session.scheduler is not None:
            session.scheduler.check_unscheduled(ids, "sequences[{}].sequence_id")
        # Requests of the scheduler do not get these ids meanwhile.
        soon = set(ids).difference(session.allocated_soon)
        session.allocated_soon |= soon
        try:
            allocations = yield from _allocated(self._allocate, session, request)
        finally:
            session.allocated_soon -= soon
        response = blocks_pb2.AllocateResponse()
        cached, blocks = response.num_cached_tokens, response.num_blocks
        for allocation in allocations:
            cached.append(allocation.num_cached_tokens)
            blocks.append(allocation.num_blocks)
        return response

    def can_allocate(
        self, session: ServerSession, request: blocks_pb2.CanAllocateRequest
    ) -> Waits[blocks_pb2.CanAllocateResponse]:
        status = yield from _allocated(self._manager.can_allocate_in_slices, session, request)
        return blocks_pb2.CanAllocateResponse(status=ALLOC_STATUS[status])

    def append(self, session: ServerSession, request: blocks_pb2.AppendRequest) -> Published[blocks_pb2.StepResponse]:
        data = request.SerializeToString()
        lengths = packed_fixed64(data, request.EXPECTED_LENGTHS_FIELD_NUMBER)
        step = self._manager.append(
            session.namespace,
            _own_ids(session, request, data),
            packed_fixed32(data, request.TOKEN_IDS_FIELD_NUMBER),
            optional_ints(request.num_tokens, np.int32),
            lengths if len(lengths) else None,
            request.lookahead,
        )
        return self._opened(session, step, request.return_slot_mapping)

    def can_append(self, session: ServerSession, request: blocks_pb2.CanAppendRequest) -> blocks_pb2.CanAppendResponse:
        num_tokens = optional_ints(request.num_tokens, np.int32)
        sequence_ids = to_ints(request.sequence_ids)
        ok = self._manager.can_append(session.namespace, sequence_ids, num_tokens, request.lookahead)
        return blocks_pb2.CanAppendResponse(ok=ok)

    def open_step(
        self, session: ServerSession, request: blocks_pb2.OpenStepRequest
    ) -> Published[blocks_pb2.StepResponse]:
        num_tokens = optional_ints(request.num_tokens, np.int32)
        step = self._manager.open_step(session.namespace, _own_ids(session, request), num_tokens)
        return self._opened(session, step, request.return_slot_mapping)

    def open_ahead(
        self, session: ServerSession, request: blocks_pb2.OpenAheadRequest
    ) -> Published[blocks_pb2.StepResponse]:
        session.shared.check_writable()
        step = self._manager.open_ahead(
            session.namespace,
            _own_ids(session, request),
            request.num_steps,
            optional_ints(request.expected_lengths),
        )
        return self._opened(session, step, return_slot_mapping=False, to_lane=False)

    def commit_ahead(
        self, session: ServerSession, request: blocks_pb2.CommitAheadRequest
    ) -> Published[blocks_pb2.StepResponse]:
        session.shared.check_writable()
        num_tokens = optional_ints(request.num_tokens, np.int32)
        if request.token_ids and request.step_id in session.namespace.steps:
            session.shared.check_in_tables(request.step_id)
        with session.shared.following(request.step_id) as run:
            step = self._manager.commit_ahead(
                session.namespace, request.step_id, token_array(request), num_tokens, request.num_steps
            )
            if step is None:
                return blocks_pb2.StepResponse(), None
            return self._opened(session, step, return_slot_mapping=False, to_lane=False, run=run)

    def _opened(
        self,
        session: ServerSession,
        step: StepPlan,
        return_slot_mapping: bool,
        *,
        to_lane: bool = True,
        run: Run | None = None,
    ) -> Published[blocks_pb2.StepResponse]:
        """Submit the copies of a step, and publish it to the session's client. Return the response, and what to wait
        for before the client may work on the step."""
        mapped = published = None
        self._engine.copy_on_write(step)
        if session.shared.shares_steps:
            mapped, published = session.shared.publish(step, to_lane=to_lane, run=run)
        response = step_response(step, return_slot_mapping, mapped)
        return response, published

    def truncate(self, session: ServerSession, request: blocks_pb2.TruncateRequest) -> blocks_pb2.TruncateResponse:
        self._manager.truncate(session.namespace, _own_ids(session, request), to_ints(request.lengths))
        return blocks_pb2.TruncateResponse()

    def fork(self, session: ServerSession, request: blocks_pb2.ForkRequest) -> blocks_pb2.ForkResponse:
        data = request.SerializeToString()
        parents = packed_fixed64(data, request.PARENT_IDS_FIELD_NUMBER)
        children = packed_fixed64(data, request.CHILD_IDS_FIELD_NUMBER)
        if session.scheduler is not None:
            session.scheduler.check_unscheduled(parents, "parent_ids[{}]")
            session.scheduler.check_unscheduled(children, "child_ids[{}]")
        self._manager.fork(session.namespace, parents, children)
        return blocks_pb2.ForkResponse()

    def swap_out(self, session: ServerSession, request: blocks_pb2.SwapOutRequest) -> Waits[blocks_pb2.SwapResponse]:
        ids = _own_ids(session, request)
        if request.tier == blocks_pb2.SWAP_TIER_DISK:
            return blocks_pb2.SwapResponse(moved_blocks=(yield from self._swaps.swap_out(session, ids.tolist())))
        if request.tier != blocks_pb2.SWAP_TIER_UNSPECIFIED:
            raise InvalidArgumentError(f"there is no tier {request.tier}", field="tier")
        return blocks_pb2.SwapResponse(moved_blocks=len(self._engine.swap_out(session.namespace, ids)))

    def can_swap_out(
        self, session: ServerSession, request: blocks_pb2.CanSwapOutRequest
    ) -> blocks_pb2.CanSwapOutResponse:
        return blocks_pb2.CanSwapOutResponse(
            ok=self._manager.can_swap_out(session.namespace, to_ints(request.sequence_ids))
        )

    def swap_in(self, session: ServerSession, request: blocks_pb2.SwapInRequest) -> Waits[blocks_pb2.SwapResponse]:
        ids = _own_ids(session, request)
        if _any_on_disk(session, ids):
            return blocks_pb2.SwapResponse(moved_blocks=(yield from self._swaps.swap_in(session, ids.tolist())))
        return blocks_pb2.SwapResponse(moved_blocks=len(self._engine.swap_in(session.namespace, ids)))

    def can_swap_in(self, session: ServerSession, request: blocks_pb2.CanSwapInRequest) -> blocks_pb2.CanSwapInResponse:
        ids = to_ints(request.sequence_ids)
        if _any_on_disk(session, ids):
            status = self._swaps.can_swap_in(session, ids.tolist())
        else:
            status = self._manager.can_swap_in(session.namespace, ids)
        return blocks_pb2.CanSwapInResponse(status=ALLOC_STATUS[status])

    def free(self, session: ServerSession, request: blocks_pb2.FreeRequest) -> Slices[blocks_pb2.FreeResponse]:
        ids = _own_ids(session, request)
        on_disk = _any_on_disk(session, ids)
        yield from self._manager.free_in_slices(session.namespace, ids)
        if on_disk:
            self._swaps.forget(session)
        return blocks_pb2.FreeResponse()

    def describe(
        self, session: ServerSession, request: blocks_pb2.DescribeRequest
    ) -> Slices[blocks_pb2.DescribeResponse]:
        if request.first < 0:
            raise InvalidArgumentError("is negative", field="first")
        ids = optional_ints(request.sequence_ids)
        chosen = functools.partial(
            self._manager.describe_in_slices,
            session.namespace,
            _with_rows(session, ids),
            first=request.first,
            limit=self._max_request_sequences,
        )
        sequences = yield from chosen()
        if request.return_token_ids or request.return_block_ids:
            self._check_described(sequences)
            sequences = yield from chosen(
                include_tokens=request.return_token_ids, include_blocks=request.return_block_ids
            )
            self._check_described(sequences)  # the sequences may have grown between the slices
        descriptions = yield from in_turn(description(info) for info in sequences)
        if session.namespace.on_disk:
            descriptions = self._with_disk(session, ids, request.first, descriptions)
        lost = session.namespace.lost
        listed = sorted(lost)[request.first :][: self._max_request_sequences] if not request.sequence_ids else ()
        return blocks_pb2.DescribeResponse(
            num_sequences=len(session.namespace) + len(session.namespace.on_disk),
            sequences=descriptions,
            lost_sequence_ids=listed,
            num_lost_sequences=len(lost),
        )

    def _with_disk(
        self,
        session: ServerSession,
        ids: Array | None,
        first: int,
        descriptions: list[blocks_pb2.SequenceDescription],
    ) -> list[blocks_pb2.SequenceDescription]:
        """Add the sequences on the disk to the descriptions of the others: those of `ids` in their order, or those
        after the others."""
        on_disk = session.namespace.on_disk
        if ids is None:
            begin = max(first - len(session.namespace), 0)
            names = list(on_disk)[begin : begin + self._max_request_sequences - len(descriptions)]
            return descriptions + [disk_description(name, on_disk[name]) for name in names]
        others = {one.sequence_id: one for one in descriptions}
        return [others.get(name) or disk_description(name, on_disk[name]) for name in ids.tolist()]

    def _check_described(self, sequences: list[SequenceSnapshot]) -> None:
        num_bytes = sum(4 * (info.length + info.num_blocks) for info in sequences)
        if num_bytes > self._max_response_bytes:
            raise response_too_large(num_bytes, self._max_response_bytes, "sequence_ids")

    def match_prefix(
        self, session: ServerSession, request: blocks_pb2.MatchPrefixRequest
    ) -> blocks_pb2.MatchPrefixResponse:
        tokens = self._manager.match_prefix(token_array(request), extra_keys(session, request.extra_keys))
        return blocks_pb2.MatchPrefixResponse(num_cached_tokens=tokens)

    def pin(self, session: ServerSession, request: blocks_pb2.PinRequest) -> Waits[blocks_pb2.PinResponse]:
        token_ids, extra = token_array(request), extra_keys(session, request.extra_keys)
        if self._tier is not None and (event := self._tier.before_pin(session.namespace, token_ids, extra)) is not None:
            yield event
        pin = self._manager.pin(session.namespace, token_ids, extra, ttl_s=request.ttl_s)
        return blocks_pb2.PinResponse(pin_id=pin.pin_id, num_pinned_tokens=pin.num_tokens)

    def unpin(self, session: ServerSession, request: blocks_pb2.UnpinRequest) -> blocks_pb2.UnpinResponse:
        self._manager.unpin(session.namespace, request.pin_id)
        return blocks_pb2.UnpinResponse()

    def reset_prefix_cache(
        self, _: ServerSession, __: blocks_pb2.ResetPrefixCacheRequest
    ) -> Waits[blocks_pb2.ResetPrefixCacheResponse]:
        reset = self._manager.reset_prefix_cache_in_slices()
        yield from reset if self._tier is None else self._tier.reset(reset)
        return blocks_pb2.ResetPrefixCacheResponse()

    def common_prefix(
        self, session: ServerSession, request: blocks_pb2.CommonPrefixRequest
    ) -> blocks_pb2.CommonPrefixResponse:
        num_blocks = self._manager.common_prefix_blocks(session.namespace, to_ints(request.sequence_ids))
        return blocks_pb2.CommonPrefixResponse(num_blocks=num_blocks)


def _with_rows(session: ServerSession, ids: Array | None) -> Array | None:
    """Return those of these sequences that are not on the disk. Raises the error for unknown ones."""
    on_disk = session.namespace.on_disk
    if ids is None or not on_disk:
        return ids
    names = ids.tolist()
    if not all(name in session.namespace or name in on_disk for name in names):
        raise session.namespace.unknown_sequence(names, "sequence_ids")
    return ids[[name not in on_disk for name in names]]


def _any_on_disk(session: ServerSession, ids: Array) -> bool:
    on_disk = session.namespace.on_disk
    return bool(on_disk) and not on_disk.keys().isdisjoint(ids.tolist())


def _own_ids(
    session: ServerSession,
    request: blocks_pb2.AppendRequest
    | blocks_pb2.OpenStepRequest
    | blocks_pb2.OpenAheadRequest
    | blocks_pb2.TruncateRequest
    | blocks_pb2.SwapOutRequest
    | blocks_pb2.SwapInRequest
    | blocks_pb2.FreeRequest,
    data: bytes | None = None,
) -> Array:
    """Return the sequences that a request changes; `data` is the request, if it is serialized already. Raises
    SequenceScheduledError if one belongs to the scheduler."""
    data = request.SerializeToString() if data is None else data
    ids: Array = packed_fixed64(data, request.SEQUENCE_IDS_FIELD_NUMBER)
    if session.scheduler is not None:
        session.scheduler.check_unscheduled(ids, "sequence_ids[{}]")
    return ids


# ---- codec


def _allocated(
    allocate: Callable[[SessionNamespace, list[AllocationRequest]], Waits[T]],
    session: ServerSession,
    request: blocks_pb2.AllocateRequest | blocks_pb2.CanAllocateRequest,
) -> Waits[T]:
    """Call `allocate` with the sequences of a request. Large requests are translated in slices."""
    requests: list[AllocationRequest] = []
    for one in request.sequences:
        if requests and len(requests) % SLICE_SEQUENCES == 0:
            yield None
        extra = session.tenancy.salt
        if one.extra_keys:
            extra = extra_keys(session, one.extra_keys, f"sequences[{len(requests)}].extra_keys")
        requests.append(AllocationRequest(one.sequence_id, token_array(one), extra, request.lookahead))
    try:
        return (yield from allocate(session.namespace, requests))
    except KVServiceError as error:  # name the fields of the message
        field = re.sub(r"^requests\b", "sequences", error.field)
        error.field = re.sub(r"^sequences\[\d+\]\.lookahead$", "lookahead", field)
        raise


def extra_keys(
    session: ServerSession, keys: Iterable[blocks_pb2.ExtraKey], field: str = "extra_keys"
) -> tuple[tuple[int, bytes], ...]:
    """Return the extra keys of a request, and after them those of the session's tenant. Raises InvalidArgumentError for
    a key that could be another tenant's."""
    named, salt = tuple((key.position, key.key) for key in keys), session.tenancy.salt
    if salt and (i := names_salt(named)) is not None:
        raise InvalidArgumentError("is the daemon's own", field=f"{field}[{i}]")
    return named + salt if named else salt


def to_ints(repeated: Sequence[int], dtype: type[np.integer[Any]] = np.int64) -> Array:
    """Return a repeated integer field as an array. `packed_fixed64` is faster for those of 64 bits each."""
    return np.fromiter(repeated, dtype, len(repeated))


def optional_ints(repeated: Sequence[int], dtype: type[np.integer[Any]] = np.int64) -> Array | None:
    """Return the integers as an array, or None for an empty repeated field, which means that it was not set."""
    return np.fromiter(repeated, dtype, len(repeated)) if repeated else None


def step_response(step: StepPlan, return_slot_mapping: bool, mapped: tuple[int, int] | None) -> blocks_pb2.StepResponse:
    """Encode a step. `mapped` has the slot and the offset of the step in the session's step tables."""
    response = blocks_pb2.StepResponse(step_id=step.step_id, cow_copies=len(step.copies.src))
    lens = varint_field(response.QUERY_LENS_FIELD_NUMBER, step.query_lens)
    response.MergeFromString(lens + varint_field(response.CONTEXT_LENS_FIELD_NUMBER, step.context_lens))
    if return_slot_mapping:
        response.MergeFromString(varint_field(response.SLOT_MAPPING_FIELD_NUMBER, step.slot_mapping))
    if mapped is not None:
        response.mapped.slot, response.mapped.offset = mapped
    return response


def description(info: SequenceSnapshot) -> blocks_pb2.SequenceDescription:
    return blocks_pb2.SequenceDescription(
        sequence_id=info.sequence_id,
        length=info.length,
        num_computed_tokens=info.num_computed,
        num_blocks=info.num_blocks,
        swapped=info.swapped,
        token_ids=() if info.token_ids is None else info.token_ids.tolist(),
        block_ids=() if info.block_ids is None else info.block_ids.tolist(),
    )


def disk_description(sequence_id: int, info: DiskSequence) -> blocks_pb2.SequenceDescription:
    return blocks_pb2.SequenceDescription(
        sequence_id=sequence_id,
        length=info.length,
        num_computed_tokens=info.num_computed,
        swapped=True,
        on_disk=True,
    )
