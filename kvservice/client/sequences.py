"""Conversion of a caller's sequences, tokens and keys to the fields of requests, and back."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Batch

import numpy as np

from kvservice.client.batches import check_size
from kvservice.client.requests import build, int_list, whole
from kvservice.client.values import PoolInfo, Sequence, StepInfo
from kvservice.errors import InvalidArgumentError
from kvservice.v1 import blocks_pb2
from kvservice.wire.tensors import to_ints

ExtraKeys = Iterable[tuple[int, bytes]]


def ids_of(sequences: Iterable[Sequence]) -> list[int]:
    return [sequence.sequence_id for sequence in sequences]


def growing_ids_of(sequences: Iterable[Sequence], field: str) -> list[int]:
    """Return the ids for a call that changes, or copies, what is known of the sequences. Raises InvalidArgumentError
    for what cannot be changed, such as SequenceInfo."""
    for number, sequence in enumerate(sequences):
        if not isinstance(sequence, Sequence):
            raise InvalidArgumentError(
                f"is a {type(sequence).__name__}; make a Sequence of its sequence_id and length",
                field=f"{field}[{number}]",
            )
    return ids_of(sequences)


def token_list(token_ids: Iterable[int], info: PoolInfo) -> list[int]:
    """Convert token ids. Raises MessageTooLargeError if the daemon would refuse so many."""
    flat = int_list(token_ids, "token_ids")
    check_size(4 * len(flat), "token_ids", info)
    return flat


def extra_key_messages(keys: ExtraKeys) -> list[blocks_pb2.ExtraKey]:
    return [build(blocks_pb2.ExtraKey, position=position, key=key) for position, key in keys]


def allocation_messages(
    prompts: Batch[Iterable[int]], ids: Batch[int], keys: Batch[ExtraKeys] | None, info: PoolInfo
) -> list[blocks_pb2.SequenceAllocation]:
    """Convert a batch of prompts. Raises InvalidArgumentError, and MessageTooLargeError if the daemon would refuse so
    many tokens."""
    if len(ids) != len(prompts):
        raise InvalidArgumentError(f"{len(ids)} ids for {len(prompts)} prompts", field="sequence_ids")
    if keys is None:
        keys = [()] * len(prompts)
    tokens = [int_list(prompt, "token_ids") for prompt in prompts]
    check_size(sum(4 * len(token_ids) for token_ids in tokens), "token_ids", info)
    return [
        build(
            blocks_pb2.SequenceAllocation,
            sequence_id=whole(sequence_id, "sequence_ids"),
            token_ids=token_ids,
            extra_keys=extra_key_messages(extra),
        )
        for sequence_id, token_ids, extra in zip(ids, tokens, keys, strict=True)
    ]


def allocated(allocation: blocks_pb2.SequenceAllocation, num_cached_tokens: int) -> Sequence:
    """Return the sequence that an allocation has made."""
    extra_keys = tuple((extra.position, extra.key) for extra in allocation.extra_keys)
    return Sequence(allocation.sequence_id, len(allocation.token_ids), num_cached_tokens, extra_keys)


def allocation_status(status: blocks_pb2.AllocStatus) -> str:
    """Return "ok", "later" or "never"."""
    return str(blocks_pb2.AllocStatus.Name(status)).removeprefix("ALLOC_STATUS_").lower()


def step_info(
    response: blocks_pb2.StepResponse, num_restarts: int, session_token: bytes = b"", *, ahead: bool = False
) -> StepInfo:
    query_lens = to_ints(response.query_lens, np.int32)
    return StepInfo(
        step_id=response.step_id,
        num_sequences=len(query_lens),
        num_tokens=int(query_lens.sum()),
        query_lens=query_lens,
        context_lens=to_ints(response.context_lens, np.int32),
        cow_copies=response.cow_copies,
        mapped=(response.mapped.slot, response.mapped.offset) if response.HasField("mapped") else None,
        num_restarts=num_restarts,
        ahead=ahead,
        session_token=session_token,
    )
