"""Translation of Allocate and CanAllocate between protobuf and the block manager. Large requests are read in slices."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from kvservice.blocks import Allocation, AllocationRequest, AllocStatus, SessionNamespace, Slices
from kvservice.blocks.slices import Waits, in_turn
from kvservice.errors import KVServiceError
from kvservice.server.codec import extra_keys
from kvservice.v1 import blocks_pb2
from kvservice.wire.tensors import token_array

T = TypeVar("T")

ALLOC_STATUS = {
    AllocStatus.OK: blocks_pb2.ALLOC_STATUS_OK,
    AllocStatus.LATER: blocks_pb2.ALLOC_STATUS_LATER,
    AllocStatus.NEVER: blocks_pb2.ALLOC_STATUS_NEVER,
}


def allocation_requests(
    sequences: Iterable[blocks_pb2.SequenceAllocation], lookahead: int
) -> Slices[list[AllocationRequest]]:
    return in_turn(
        AllocationRequest(sequence.sequence_id, token_array(sequence), extra_keys(sequence.extra_keys), lookahead)
        for sequence in sequences
    )


def allocating(
    allocate: Callable[[SessionNamespace, list[AllocationRequest]], Waits[T]],
    namespace: SessionNamespace,
    request: blocks_pb2.AllocateRequest | blocks_pb2.CanAllocateRequest,
) -> Waits[T]:
    """Call `allocate` with the sequences of a request."""
    requests = yield from allocation_requests(request.sequences, request.lookahead)
    with _allocation_fields():
        return (yield from allocate(namespace, requests))


def allocate_response(allocations: Iterable[Allocation]) -> blocks_pb2.AllocateResponse:
    return blocks_pb2.AllocateResponse(
        num_cached_tokens=[allocation.num_cached_tokens for allocation in allocations],
        num_blocks=[allocation.num_blocks for allocation in allocations],
    )


@contextlib.contextmanager
def _allocation_fields() -> Iterator[None]:
    """Rename the fields in errors of the block manager to the fields of the protobuf message."""
    try:
        yield
    except KVServiceError as error:
        field = re.sub(r"^requests\b", "sequences", error.field)
        error.field = re.sub(r"^sequences\[\d+\]\.lookahead$", "lookahead", field)
        raise
