"""The values that calls return, as plain dataclasses without protobuf."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvservice.wire.tensors import Array

T = TypeVar("T")


@dataclass(frozen=True)
class PoolInfo:
    """Shape of the daemon's pool, and the daemon's limits; see GetInfoResponse in pool.proto."""

    version: str
    device: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str
    block_size: int
    num_blocks: int
    num_swap_blocks: int
    block_bytes: int
    enable_prefix_caching: bool
    max_sequences: int
    max_sequence_tokens: int
    max_message_bytes: int
    max_request_sequences: int
    max_request_tokens: int
    max_request_blocks: int
    session_grace_s: float
    kv_cache_dtype: str
    batch_invariant: bool
    allow_client_shm: bool
    share_pool: str
    store_bytes: int
    share_store: str
    transfer_protocol: str
    transfer_address: str


@dataclass(frozen=True)
class PoolStats:
    """Gauges and counters of the pool; see GetStatsResponse in pool.proto."""

    num_blocks: int
    free_blocks: int
    active_blocks: int
    shared_blocks: int
    cached_blocks: int
    pinned_blocks: int
    num_swap_blocks: int
    used_swap_blocks: int
    sequences: int
    swapped_sequences: int
    tokens: int
    sessions: int
    prefix_cache_query_tokens: int
    prefix_cache_hit_tokens: int
    cow_copies: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    evicted_blocks: int
    quarantined_blocks: int


@dataclass
class Sequence:
    """A sequence of a session. Calls through that session update `length`, in tokens.

    `extra_keys` are the (position, bytes) pairs with which it was allocated, in the same order.
    """

    sequence_id: int
    length: int
    num_cached_tokens: int = 0
    extra_keys: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True)
class SequenceInfo:
    """The daemon's state of a sequence. `token_ids` and `block_ids` are empty unless requested, and for a sequence on
    the disk."""

    sequence_id: int
    length: int
    num_computed_tokens: int
    num_blocks: int
    swapped: bool
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    on_disk: bool = False


@dataclass(slots=True, eq=False)
class StepInfo:
    """A step as the daemon has opened it. `query_lens` and `context_lens` are int32[num_sequences]. It is not frozen,
    because that would take a microsecond of each short call."""

    step_id: int
    num_sequences: int
    num_tokens: int
    query_lens: Array
    context_lens: Array
    cow_copies: int
    mapped: tuple[int, int] | None
    """Slot number and byte offset of the step in the session's tables. None: the step is not in them, because they were
    full or the pool was not mapped yet."""
    num_restarts: int = 0
    """How often the daemon had been restarted, see Session.num_restarts, when it opened the step."""
    ahead: bool = False
    """Whether it is a step ahead, which only the client writes, in the mapped pool."""
    session_token: bytes = field(default=b"", repr=False)
    """The token of its session. Empty: a step of a scheduler."""


@dataclass(frozen=True)
class RegionInfo:
    """A region of the session. `offset` and `byte_size` are in bytes. `key` is empty unless the region lies in a POSIX
    object, from `offset` on. `device_id` is the number of the GPU, None for host memory."""

    name: str
    key: str
    offset: int
    byte_size: int
    device_id: int | None


@dataclass(frozen=True)
class Pin:
    pin_id: int
    num_pinned_tokens: int


def from_message(kind: type[T], message: Message) -> T:
    """Convert a message to a dataclass with the same field names."""
    values: dict[str, Any] = {}
    for one in fields(kind):  # type: ignore[arg-type]
        value = getattr(message, one.name)
        values[one.name] = value if isinstance(value, (int, float, str, bool)) else tuple(value)
    return kind(**values)
