"""The operations of a session, shared by the sync and async API.

The methods are coroutines over a `Stream`. The async API awaits them. The sync API (`blocking.py`) passes a stream that
never suspends and runs each coroutine to completion.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Batch
from typing import Generic, TypeVar

import numpy as np

from kvservice.client import tensors
from kvservice.client.batches import OVERHEAD_BYTES, describable_batches, id_batches, token_parts
from kvservice.client.mapped import MappedPool, OpenStep
from kvservice.client.requests import build, int_list, whole
from kvservice.client.shared_memory import RegionCore, Stream
from kvservice.client.transports import StreamTransport, Transport, TransportName
from kvservice.client.values import Pin, PoolInfo, Sequence, SequenceInfo, from_message
from kvservice.errors import (
    InvalidArgumentError,
    MessageTooLargeError,
    RegionsNotAllowedError,
    UnknownSequenceError,
)
from kvservice.pool.layout import TENSOR_DTYPES
from kvservice.v1 import attention_pb2, blocks_pb2, host_pb2
from kvservice.wire.tensors import Array

ExtraKeys = Iterable[tuple[int, bytes]]
StepT = TypeVar("StepT")


class SessionCore(RegionCore, Generic[StepT]):
    """A session, which owns sequences.

    Methods raise the errors of `kvservice.errors`. A method that raises has changed nothing, except with
    ConnectionLostError or CallTimeoutError, where the answer was lost. `timeout_s` is the time limit of a call in
    seconds, math.inf for no limit; None: the session's default. A method that sends several requests applies it to
    each.
    """

    def __init__(
        self,
        stream: Stream,
        fd_path: str | None,
        info: PoolInfo,
        token: bytes,
        session_id: int,
        make_step: Callable[..., StepT],
        resumed: bool,
    ) -> None:
        shares = info.allow_client_shm or info.share_pool != "off"
        super().__init__(stream, fd_path if shares else None, token)
        self.info = info
        self.session_id = session_id
        self._make_step = make_step
        # The ids of a resumed session start at a random number, to avoid the ids of its previous client.
        self._sequence_ids = itertools.count(secrets.randbits(62) if resumed else 0)
        self._dropped: deque[Sequence] = deque()
        # The client replaces it with the transport that it selects.
        self.attending: Transport = StreamTransport(self)

    @property
    def transport(self) -> TransportName:
        """The name of the session's transport: "lane", "mapped", "region" or "inline"."""
        return self.attending.name

    def check_regions_allowed(self) -> None:
        """Raise RegionsNotAllowedError unless the session may have regions."""
        if not (self.can_share and self.info.allow_client_shm):
            raise RegionsNotAllowedError("regions are for clients on the unix socket, with --allow-client-shm")

    async def allocate(
        self,
        token_ids: Iterable[int],
        *,
        sequence_id: int | None = None,
        extra_keys: ExtraKeys = (),
        lookahead: int = 0,
        timeout_s: float | None = None,
    ) -> Sequence:
        """Allocate a sequence for a prompt. `num_cached_tokens` of the result counts its prefix-cache hits.

        `extra_keys`: (position, bytes) pairs for whatever the K/V depend on besides the tokens, as part of the prefix
        cache's key. `lookahead`: slots to reserve beyond the prompt.
        """
        ids = None if sequence_id is None else [sequence_id]
        batch = await self.allocate_batch(
            [token_ids], sequence_ids=ids, extra_keys=[extra_keys], lookahead=lookahead, timeout_s=timeout_s
        )
        return batch[0]

    async def allocate_batch(
        self,
        prompts: Batch[Iterable[int]],
        *,
        sequence_ids: Batch[int] | None = None,
        extra_keys: Batch[ExtraKeys] | None = None,
        lookahead: int = 0,
        timeout_s: float | None = None,
    ) -> list[Sequence]:
        """Allocate all sequences of a batch, or none."""
        allocations = self._allocations(prompts, sequence_ids, extra_keys)
        await self._free_dropped(timeout_s)
        request = build(
            blocks_pb2.AllocateRequest,
            request_id=self.next_request_id(),
            sequences=allocations,
            lookahead=whole(lookahead, "lookahead"),
        )
        response = await self.call("allocate", request, timeout_s)
        return [
            Sequence(allocation.sequence_id, len(allocation.token_ids), cached, _key_pairs(allocation))
            for allocation, cached in zip(allocations, response.num_cached_tokens, strict=True)
        ]

    async def can_allocate(
        self, prompts: Batch[Iterable[int]], *, lookahead: int = 0, timeout_s: float | None = None
    ) -> str:
        """Return whether the batch fits: "ok" (now), "later" or "never"."""
        allocations = self._allocations(prompts, None, None)
        await self._free_dropped(timeout_s)
        request = build(blocks_pb2.CanAllocateRequest, sequences=allocations, lookahead=whole(lookahead, "lookahead"))
        response = await self.call("can_allocate", request, timeout_s)
        return _alloc_status(response.status)

    async def can_append(
        self,
        sequences: Batch[Sequence],
        num_tokens: Iterable[int] | None = None,
        *,
        lookahead: int = 0,
        timeout_s: float | None = None,
    ) -> bool:
        """Return whether there are enough blocks now to append `num_tokens` tokens to each sequence; None: one each."""
        request = build(
            blocks_pb2.CanAppendRequest,
            sequence_ids=_ids(sequences),
            num_tokens=None if num_tokens is None else int_list(num_tokens, "num_tokens"),
            lookahead=whole(lookahead, "lookahead"),
        )
        await self._free_dropped(timeout_s)
        return bool((await self.call("can_append", request, timeout_s)).ok)

    async def can_swap_out(self, sequences: Batch[Sequence], *, timeout_s: float | None = None) -> bool:
        """Return whether the swap tier has room for the sequences now."""
        request = build(blocks_pb2.CanSwapOutRequest, sequence_ids=_ids(sequences))
        return bool((await self.call("can_swap_out", request, timeout_s)).ok)

    async def can_swap_in(self, sequences: Batch[Sequence], *, timeout_s: float | None = None) -> str:
        """Return whether the device tier has room for the sequences: "ok" (now), "later" or "never"."""
        request = build(blocks_pb2.CanSwapInRequest, sequence_ids=_ids(sequences))
        return _alloc_status((await self.call("can_swap_in", request, timeout_s)).status)

    def _allocations(
        self, prompts: Batch[Iterable[int]], ids: Batch[int] | None, keys: Batch[ExtraKeys] | None
    ) -> list[blocks_pb2.SequenceAllocation]:
        if ids is None:
            ids = [next(self._sequence_ids) for _ in prompts]
        if len(ids) != len(prompts):
            raise InvalidArgumentError(f"{len(ids)} ids for {len(prompts)} prompts", field="sequence_ids")
        if keys is None:
            keys = [()] * len(prompts)
        tokens = [int_list(prompt, "token_ids") for prompt in prompts]
        self.check_size(sum(4 * len(token_ids) for token_ids in tokens), "token_ids")
        return [
            build(
                blocks_pb2.SequenceAllocation,
                sequence_id=whole(sequence_id, "sequence_ids"),
                token_ids=token_ids,
                extra_keys=_extra_keys(extra),
            )
            for sequence_id, token_ids, extra in zip(ids, tokens, keys, strict=True)
        ]

    async def append(
        self,
        sequences: Batch[Sequence],
        token_ids: Iterable[int],
        *,
        num_tokens: Iterable[int] | None = None,
        lookahead: int = 0,
        timeout_s: float | None = None,
    ) -> StepT:
        """Append tokens to sequences and open a step over all their pending tokens. `num_tokens` gives the number of
        tokens of each sequence; None: one each."""
        counts = None if num_tokens is None else int_list(num_tokens, "num_tokens")
        if counts is not None and len(counts) != len(sequences):
            raise InvalidArgumentError(f"{len(counts)} counts for {len(sequences)} sequences", field="num_tokens")
        request = build(
            blocks_pb2.AppendRequest,
            request_id=self.next_request_id(),
            sequence_ids=_ids(sequences),
            token_ids=self._token_list(token_ids),
            num_tokens=counts,
            expected_lengths=[sequence.length for sequence in sequences],
            lookahead=whole(lookahead, "lookahead"),
        )
        await self._free_dropped(timeout_s)
        response = await self.call("append", request, timeout_s)
        for sequence, added in zip(sequences, counts or itertools.repeat(1, len(sequences)), strict=True):
            sequence.length += added
        return self._step(sequences, response)

    async def open_step(
        self,
        sequences: Batch[Sequence],
        num_tokens: int | Iterable[int] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> StepT:
        """Open a step over tokens that are not computed yet: all of them, or the next `num_tokens` of each sequence
        (chunked prefill)."""
        counts = None
        if isinstance(num_tokens, Iterable):
            counts = int_list(num_tokens, "num_tokens")
        elif num_tokens is not None:
            counts = [whole(num_tokens, "num_tokens")] * len(sequences)
        request = build(
            blocks_pb2.OpenStepRequest,
            request_id=self.next_request_id(),
            sequence_ids=_ids(sequences),
            num_tokens=counts,
        )
        return self._step(sequences, await self.call("open_step", request, timeout_s))

    def _step(self, sequences: Batch[Sequence], response: blocks_pb2.StepResponse) -> StepT:
        return self._make_step(self, tuple(sequences), response)

    async def fork(
        self, parent: Sequence, sequence_id: int | None = None, *, timeout_s: float | None = None
    ) -> Sequence:
        """Create a sequence that shares every block of `parent`. The first write to a shared block copies it
        (copy-on-write)."""
        ids = None if sequence_id is None else [sequence_id]
        return (await self.fork_batch([parent], ids, timeout_s=timeout_s))[0]

    async def fork_batch(
        self,
        parents: Batch[Sequence],
        sequence_ids: Batch[int] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[Sequence]:
        """Create one child for each parent. The same parent may appear several times."""
        if sequence_ids is None:
            sequence_ids = [next(self._sequence_ids) for _ in parents]
        child_ids = int_list(sequence_ids, "child_ids")
        request = build(
            blocks_pb2.ForkRequest, request_id=self.next_request_id(), parent_ids=_ids(parents), child_ids=child_ids
        )
        await self.call("fork", request, timeout_s)
        return [
            Sequence(child_id, parent.length, extra_keys=parent.extra_keys)
            for child_id, parent in zip(child_ids, parents, strict=True)
        ]

    async def truncate(self, sequence: Sequence, length: int, *, timeout_s: float | None = None) -> None:
        """Remove the tokens past `length` and free their slots."""
        length = whole(length, "lengths")
        request = build(
            blocks_pb2.TruncateRequest,
            request_id=self.next_request_id(),
            sequence_ids=[sequence.sequence_id],
            lengths=[length],
        )
        await self.call("truncate", request, timeout_s)
        sequence.length = length

    async def swap_out(self, sequences: Batch[Sequence], *, timeout_s: float | None = None) -> int:
        """Move sequences to the swap tier. Returns the number of blocks moved."""
        request = build(blocks_pb2.SwapOutRequest, request_id=self.next_request_id(), sequence_ids=_ids(sequences))
        return int((await self.call("swap_out", request, timeout_s)).moved_blocks)

    async def swap_in(self, sequences: Batch[Sequence], *, timeout_s: float | None = None) -> int:
        """Move sequences back to the device tier. Returns the number of blocks moved, without the blocks that the
        prefix cache still had."""
        request = build(blocks_pb2.SwapInRequest, request_id=self.next_request_id(), sequence_ids=_ids(sequences))
        return int((await self.call("swap_in", request, timeout_s)).moved_blocks)

    async def free(self, sequences: Batch[Sequence], *, timeout_s: float | None = None) -> None:
        """Free sequences. Their full computed blocks stay in the prefix cache. A batch above the limit of one request
        is split into several requests, each of which frees all of its sequences or none."""
        for ids in list(id_batches(_ids(sequences), self.info)) or [[]]:
            request = build(blocks_pb2.FreeRequest, request_id=self.next_request_id(), sequence_ids=ids)
            await self.call("free", request, timeout_s)

    def free_later(self, sequences: Iterable[Sequence]) -> None:
        """Free sequences before the session's next allocation or append. Sequences that are already freed by then are
        ignored. This method makes no call and takes no lock, so finalizers may use it."""
        self._dropped.extend(sequences)

    async def _free_dropped(self, timeout_s: float | None) -> None:
        while self._dropped:
            sequence = self._dropped.popleft()
            try:
                with contextlib.suppress(UnknownSequenceError):
                    await self.free([sequence], timeout_s=timeout_s)
            except BaseException:
                self._dropped.append(sequence)
                raise

    async def map_pool(self, *, writable: bool = False, timeout_s: float | None = None) -> MappedPool:
        """Map the pool into this process, together with the tables of the steps opened from now on. Only for clients on
        the unix socket that the daemon trusts with the K/V of all sessions (--share-pool); others get
        PoolNotSharedError."""
        return await MappedPool.open(self, bool(writable), timeout_s)

    async def commit(self, step: OpenStep, *, timeout_s: float | None = None) -> None:
        """Mark a step's tokens as computed, after every layer was written to the mapped pool. On a GPU, synchronize the
        stream first."""
        request = build(host_pb2.CommitRequest, request_id=self.next_request_id(), step_id=step.step_id)
        await self.call("commit", request, timeout_s)

    async def describe(
        self,
        sequences: Batch[Sequence] | None = None,
        *,
        token_ids: bool = False,
        block_ids: bool = False,
        timeout_s: float | None = None,
    ) -> list[SequenceInfo]:
        """Return the daemon's state of sequences; of all sequences of the session if None."""
        if sequences is None:
            found = await self._describe_all(timeout_s)
        else:
            batches = id_batches(_ids(sequences), self.info)
            found = [info for ids in batches for info in await self._describe(ids, timeout_s)]
        if not (token_ids or block_ids):
            return found
        details = {"return_token_ids": token_ids, "return_block_ids": block_ids}
        details_of = describable_batches(found, self.info)
        return [info for ids in details_of for info in await self._describe(ids, timeout_s, **details)]

    async def _describe_all(self, timeout_s: float | None) -> list[SequenceInfo]:
        found: list[SequenceInfo] = []
        while True:
            response = await self.call("describe", build(blocks_pb2.DescribeRequest, first=len(found)), timeout_s)
            found += [from_message(SequenceInfo, one) for one in response.sequences]
            if not response.sequences or len(found) >= response.num_sequences:
                return found

    async def _describe(self, ids: list[int], timeout_s: float | None, **details: bool) -> list[SequenceInfo]:
        request = build(blocks_pb2.DescribeRequest, sequence_ids=ids, **details)
        response = await self.call("describe", request, timeout_s)
        return [from_message(SequenceInfo, one) for one in response.sequences]

    async def read(
        self,
        sequence: Sequence,
        start: int,
        stop: int,
        layer: int | None = None,
        *,
        timeout_s: float | None = None,
    ) -> tuple[Array, Array]:
        """Read K and V of token positions start <= p < stop, in the pool's dtype. Each is
        `[num_tokens, num_kv_heads, head_size]`, with a leading `[num_layers]` if no layer is given. A range larger than
        a message is read in parts."""
        start, stop = whole(start, "start"), whole(stop, "stop")
        parts = [
            await self._read(sequence.sequence_id, first, end, layer, timeout_s)
            for first, end in self._read_parts(start, stop, layer)
        ]
        if len(parts) == 1:
            return parts[0]
        keys, values = zip(*parts, strict=True)
        return np.concatenate(keys, axis=-3), np.concatenate(values, axis=-3)

    async def _read(
        self, sequence_id: int, start: int, stop: int, layer: int | None, timeout_s: float | None
    ) -> tuple[Array, Array]:
        part = build(attention_pb2.SequenceRange, sequence_id=sequence_id, start=start, stop=stop)
        request = build(attention_pb2.ReadRequest, ranges=[part], layer=layer)
        response = await self.call("read", request, timeout_s)
        return tensors.from_message(response.key, "key"), tensors.from_message(response.value, "value")

    def _read_parts(self, start: int, stop: int, layer: int | None) -> list[tuple[int, int]]:
        """Split a range into parts that fit into a message. An invalid range stays one part; the daemon refuses it."""
        if stop <= start:
            return [(start, stop)]
        info, num_layers = self.info, 1 if layer is not None else self.info.num_layers
        token_bytes = 2 * num_layers * info.num_kv_heads * info.head_size * TENSOR_DTYPES[info.dtype].itemsize
        return [(start + first, start + end) for first, end in token_parts(stop - start, token_bytes, info)]

    async def match_prefix(
        self, token_ids: Iterable[int], extra_keys: ExtraKeys = (), *, timeout_s: float | None = None
    ) -> int:
        """Return the number of leading tokens that are in the prefix cache."""
        request = build(
            blocks_pb2.MatchPrefixRequest,
            token_ids=self._token_list(token_ids),
            extra_keys=_extra_keys(extra_keys),
        )
        return int((await self.call("match_prefix", request, timeout_s)).num_cached_tokens)

    async def pin(
        self, token_ids: Iterable[int], ttl_s: float, extra_keys: ExtraKeys = (), *, timeout_s: float | None = None
    ) -> Pin:
        """Protect a prefix's cached blocks from eviction for `ttl_s` seconds."""
        request = build(
            blocks_pb2.PinRequest,
            request_id=self.next_request_id(),
            token_ids=self._token_list(token_ids),
            extra_keys=_extra_keys(extra_keys),
            ttl_s=ttl_s,
        )
        return from_message(Pin, await self.call("pin", request, timeout_s))

    async def unpin(self, pin: Pin, *, timeout_s: float | None = None) -> None:
        request = build(blocks_pb2.UnpinRequest, request_id=self.next_request_id(), pin_id=pin.pin_id)
        await self.call("unpin", request, timeout_s)

    async def reset_prefix_cache(self, *, timeout_s: float | None = None) -> None:
        """Clear the prefix cache of all sessions."""
        request = build(blocks_pb2.ResetPrefixCacheRequest, request_id=self.next_request_id())
        await self.call("reset_prefix_cache", request, timeout_s)

    async def common_prefix(self, sequences: Batch[Sequence], *, timeout_s: float | None = None) -> int:
        """Return the number of leading blocks that all sequences share and that are full and computed in each."""
        request = build(blocks_pb2.CommonPrefixRequest, sequence_ids=_ids(sequences))
        response = await self.call("common_prefix", request, timeout_s)
        return int(response.num_blocks)

    def _token_list(self, token_ids: Iterable[int]) -> list[int]:
        flat = int_list(token_ids, "token_ids")
        self.check_size(4 * len(flat), "token_ids")
        return flat

    def fits(self, num_bytes: int) -> bool:
        """Return whether tensors of this many bytes fit into a message."""
        return num_bytes + OVERHEAD_BYTES <= self.info.max_message_bytes

    def check_size(self, num_bytes: int, field: str) -> None:
        """Raise MessageTooLargeError if the daemon would refuse a message of this size."""
        if not self.fits(num_bytes):
            limit = self.info.max_message_bytes
            raise MessageTooLargeError(f"{num_bytes} bytes, a message may have {limit}", field=field)


def _alloc_status(status: blocks_pb2.AllocStatus) -> str:
    return str(blocks_pb2.AllocStatus.Name(status)).removeprefix("ALLOC_STATUS_").lower()


def _ids(sequences: Iterable[Sequence]) -> list[int]:
    return [sequence.sequence_id for sequence in sequences]


def _key_pairs(allocation: blocks_pb2.SequenceAllocation) -> tuple[tuple[int, bytes], ...]:
    return tuple((extra.position, extra.key) for extra in allocation.extra_keys)


def _extra_keys(keys: ExtraKeys) -> list[blocks_pb2.ExtraKey]:
    return [build(blocks_pb2.ExtraKey, position=position, key=key) for position, key in keys]
