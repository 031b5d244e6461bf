"""Requests to native values and plans to responses: where protobuf ends."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from kvservice.blocks import AllocationRequest, AllocStatus, BlocksStats, SequenceInfo, Step
from kvservice.config import ServeConfig
from kvservice.devices import AttentionOptions, BlockSparse, Device
from kvservice.errors import InvalidArgumentError, KVServiceError
from kvservice.v1 import attention_pb2, blocks_pb2, pool_pb2
from kvservice.wire.tensors import Array, to_ints

ALLOC_STATUS = {
    AllocStatus.OK: blocks_pb2.ALLOC_STATUS_OK,
    AllocStatus.LATER: blocks_pb2.ALLOC_STATUS_LATER,
    AllocStatus.NEVER: blocks_pb2.ALLOC_STATUS_NEVER,
}


def allocation_requests(sequences: Iterable[blocks_pb2.SequenceAllocation], lookahead: int) -> list[AllocationRequest]:
    return [
        AllocationRequest(
            sequence.sequence_id, to_ints(sequence.token_ids, np.int32), extra_keys(sequence.extra_keys), lookahead
        )
        for sequence in sequences
    ]


@contextlib.contextmanager
def allocation_fields() -> Iterator[None]:
    """Errors about the requests of a batch name the fields of the message that they came in."""
    try:
        yield
    except KVServiceError as error:
        field = re.sub(r"^requests\b", "sequences", error.field)
        error.field = re.sub(r"^sequences\[\d+\]\.lookahead$", "lookahead", field)
        raise


def extra_keys(keys: Iterable[blocks_pb2.ExtraKey]) -> tuple[tuple[int, bytes], ...]:
    return tuple((key.position, key.key) for key in keys)


def optional_ints(repeated: Sequence[int], dtype: type[np.integer[Any]] = np.int64) -> Array | None:
    """An empty repeated field means that it was left out."""
    return to_ints(repeated, dtype) if repeated else None


def optional_layer(request: attention_pb2.WriteRequest | attention_pb2.ReadRequest) -> int | None:
    return request.layer if request.HasField("layer") else None


def attention_options(options: attention_pb2.AttentionOptions) -> AttentionOptions:
    slopes = np.array(options.alibi_slopes, np.float32) if options.alibi_slopes else None
    sparse = block_sparse(options.block_sparse) if options.HasField("block_sparse") else None
    return AttentionOptions(options.scale or None, options.sliding_window, options.logits_soft_cap, slopes, sparse)


def block_sparse(sparse: attention_pb2.BlockSparse) -> BlockSparse:
    return BlockSparse(
        sparse.vert_stride, sparse.local_blocks, sparse.block_size, sparse.head_sliding_step, sparse.tp_rank
    )


def step_response(step: Step, return_slot_mapping: bool) -> blocks_pb2.StepResponse:
    response = blocks_pb2.StepResponse(
        step_id=step.step_id,
        query_lens=step.query_lens.tolist(),
        context_lens=step.context_lens.tolist(),
        cow_copies=len(step.copies),
    )
    if return_slot_mapping:
        response.slot_mapping.extend(step.slot_mapping.tolist())
    return response


def describe_response(sequences: Iterable[SequenceInfo]) -> blocks_pb2.DescribeResponse:
    return blocks_pb2.DescribeResponse(
        sequences=[
            blocks_pb2.SequenceDescription(
                sequence_id=info.sequence_id,
                length=info.length,
                num_computed_tokens=info.num_computed,
                num_blocks=info.num_blocks,
                swapped=info.swapped,
                token_ids=() if info.token_ids is None else info.token_ids.tolist(),
                block_ids=() if info.block_ids is None else info.block_ids.tolist(),
            )
            for info in sequences
        ]
    )


def info_response(config: ServeConfig, device: Device, version: str) -> pool_pb2.GetInfoResponse:
    return pool_pb2.GetInfoResponse(
        version=version,
        device=config.device,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        dtype=config.dtype,
        block_size=config.block_size,
        num_blocks=device.num_blocks,
        num_swap_blocks=device.num_swap_blocks,
        block_bytes=config.layout.block_bytes,
        enable_prefix_caching=config.enable_prefix_caching,
        max_sequences=config.max_sequences,
        max_sequence_tokens=config.max_sequence_tokens,
        max_message_bytes=config.max_message_bytes,
        session_grace_s=config.session_grace_s,
        kv_cache_dtype=config.layout.dtype,
        batch_invariant=config.batch_invariant,
    )


def stats_response(stats: BlocksStats, num_sessions: int) -> pool_pb2.GetStatsResponse:
    return pool_pb2.GetStatsResponse(
        num_blocks=stats.num_blocks,
        free_blocks=stats.num_free_blocks,
        active_blocks=stats.num_active_blocks - stats.num_shared_blocks,
        shared_blocks=stats.num_shared_blocks,
        cached_blocks=stats.num_cached_blocks - stats.num_pinned_blocks,
        pinned_blocks=stats.num_pinned_blocks,
        num_swap_blocks=stats.num_swap_blocks,
        used_swap_blocks=stats.num_used_swap_blocks,
        sequences=stats.num_sequences,
        swapped_sequences=stats.num_swapped_sequences,
        tokens=stats.num_tokens,
        sessions=num_sessions,
        prefix_cache_query_tokens=stats.prefix_query_tokens,
        prefix_cache_hit_tokens=stats.prefix_hit_tokens,
        cow_copies=stats.cow_copies,
        swapped_out_blocks=stats.swapped_out_blocks,
        swapped_in_blocks=stats.swapped_in_blocks,
        evicted_blocks=stats.evictions,
    )


def check_response_size(num_bytes: int, limit: int, field: str) -> None:
    """Refuse before the work is done what could not be sent after it."""
    if num_bytes > limit:
        raise InvalidArgumentError(f"the answer would take {num_bytes} bytes, a message may have {limit}", field=field)
