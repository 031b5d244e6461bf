"""The operations of a session, shared by the sync and async API.

The methods are coroutines over a `SessionConnection`. The async API awaits them. The sync API (`blocking.py`) passes a
connection that never suspends and runs each coroutine to completion.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from collections.abc import Sequence as Batch
from typing import Any, Generic, Unpack

import numpy as np

from kvservice.client.mapped import HasStepInfo, MappedPool
from kvservice.client.messages import (
    ExtraKeys,
    allocation_messages,
    allocation_status,
    build,
    choice,
    describable_batches,
    extra_key_messages,
    flag,
    growing_ids_of,
    id_batches,
    id_of,
    ids_of,
    int_list,
    listed,
    size_of,
    step_info,
    token_list,
    token_parts,
    whole,
)
from kvservice.client.regions import HostRegion, SharedRegion
from kvservice.client.remote import Context
from kvservice.client.scheduler import MakeScheduler, MakeStep, SchedulerArguments, SchedulerT, StepT, open_scheduler
from kvservice.client.step import SessionCalls, Transport, TransportName
from kvservice.client.transports import transfer
from kvservice.client.transports.inline import InlineTransport, Places
from kvservice.client.values import Pin, PoolInfo, RegionInfo, Sequence, SequenceInfo, from_message
from kvservice.errors import (
    CallTimeoutError,
    ConnectionLostError,
    InvalidArgumentError,
    LengthMismatchError,
    UnknownPinError,
    UnknownSequenceError,
)
from kvservice.pool.layout import TENSOR_DTYPES
from kvservice.v1 import attention_pb2, blocks_pb2, host_pb2, session_pb2
from kvservice.wire.tensors import Array, to_array

# Asks the daemon to close the session with this token, if the client with this holder id still has it.
CloseSession = Callable[[bytes, int], Awaitable[None]]
# How long `detach` waits for calls that were cut short, in seconds.
SETTLE_S = 1.0
_LENGTH = operator.attrgetter("length")
_SWAP_TIERS = {"host": blocks_pb2.SWAP_TIER_UNSPECIFIED, "disk": blocks_pb2.SWAP_TIER_DISK}


class SessionCore(Generic[StepT, SchedulerT]):
    """A session, which owns sequences.

    Methods raise the errors of `kvservice.errors`. A method that raises has changed nothing. That holds in the end for
    one whose answer was lost, too (CallTimeoutError, ConnectionLostError, or a cancelled caller): what it has made is
    removed in the background, before the session's next call. Only `truncate`, `swap_out`, `swap_in`, `free`, `unpin`,
    `commit`, `commit_ahead` and `reset_prefix_cache` are completed then, if they were sent, and the sequences get their
    new lengths.

    `timeout_s` is the time limit of a call in seconds, math.inf for no limit; None: the session's default. A method
    that sends several requests applies it to each.
    """

    def __init__(
        self,
        context: Context,
        transport: Transport,
        token: bytes,
        session_id: int,
        make_step: MakeStep[StepT],
        make_scheduler: MakeScheduler[StepT, SchedulerT],
        close_session: CloseSession,
        *,
        resumed: bool,
    ) -> None:
        self.context = context
        self.info: PoolInfo = context.info
        self.token = token
        self.session_id = session_id
        self.calls = SessionCalls(context, transport)
        self._send = context.connection.send
        self._request_ids = context.connection.request_ids
        self._make_step, self._make_scheduler, self._close_session = make_step, make_scheduler, close_session
        # The ids of a resumed session start at a random number, to avoid the ids of its previous client.
        self._sequence_ids = itertools.count(secrets.randbits(62) if resumed else 0)
        self._dropped: deque[Sequence] = deque()
        self._has_mapped = False  # the pool, for the caller

    @property
    def transport(self) -> TransportName:
        """The name of the session's transport: "lane", "mapped", "region", "transfer" or "inline"."""
        return self.calls.transport.name

    @property
    def num_transfer_failures(self) -> int:
        """How often a Transfer Engine has failed, so that messages carried K and V."""
        return self.context.remote.num_failures

    @property
    def num_restarts(self) -> int:
        """How often another process of the daemon has taken the session over, as far as this client knows. Sequences
        and pins survive that, except those that `lost_sequences` names. A scheduler, user-made regions and mapped pools
        do not; steps do if the processes were exchanged in order."""
        return self.context.connection.num_restarts

    async def detach(
        self, *, ttl_s: float | None = None, durable: bool = False, timeout_s: float | None = None
    ) -> bytes:
        """Detach from the session and return its token, with which another client can resume it.

        The session waits for `ttl_s` seconds, 0: as long as the daemon allows; None: as it was opened, for
        `session_grace_s` seconds if not as detachable, and 0 if it is `durable`. With `durable` its sequences are on
        the daemon's disk when this returns. They survive a reboot, and need no memory until the session is resumed.
        Steps, pins and regions end.

        Raises SavedSessionsOffError, DiskFullError, DiskFailedError and QuotaExceededError. The session then goes on.
        """
        if ttl_s is not None or durable:
            await self._free_dropped(timeout_s)
            request = build(session_pb2.DetachRequest, ttl_s=ttl_s or 0.0, durable=durable)
            await self._send("detach", request, timeout_s)
        elif self.context.cut.pending:  # the next client does not know what they have made
            with contextlib.suppress(CallTimeoutError, ConnectionLostError):
                await self.context.cut.settled(self.context.connection.deadline(SETTLE_S))
        await self.calls.release(InlineTransport(self.context))
        await self.context.connection.close()
        return self.token

    async def close(self) -> None:
        """Close the session and free everything it owns. Does nothing if the session is gone or belongs to another
        client by now."""
        await self.calls.release(InlineTransport(self.context))
        if await self.context.connection.close():
            await self._close_session(self.token, self.context.connection.holder)

    # ---- sequences

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

        `extra_keys`: (position, bytes) pairs for what the K/V depend on besides the tokens, as part of the prefix
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
        num_prompts = size_of(prompts, "prompts")
        ids = list(itertools.islice(self._sequence_ids, num_prompts)) if sequence_ids is None else sequence_ids
        allocations = allocation_messages(prompts, ids, extra_keys, self.info)
        if self._dropped or self.context.cut.pending:
            await self._free_dropped(timeout_s)
        request = build(
            blocks_pb2.AllocateRequest,
            request_id=next(self._request_ids),
            sequences=allocations,
            lookahead=whole(lookahead, "lookahead"),
        )
        response = await self._send("allocate", request, timeout_s)
        made = []
        for allocation, num_cached in zip(allocations, response.num_cached_tokens, strict=True):
            keys = tuple((one.position, one.key) for one in allocation.extra_keys) if allocation.extra_keys else ()
            made.append(Sequence(allocation.sequence_id, len(allocation.token_ids), num_cached, keys))
        return made

    async def can_allocate(
        self, prompts: Batch[Iterable[int]], *, lookahead: int = 0, timeout_s: float | None = None
    ) -> str:
        """Return whether the batch fits: "ok" (now), "later" or "never"."""
        ids = list(itertools.islice(self._sequence_ids, size_of(prompts, "prompts")))
        allocations = allocation_messages(prompts, ids, None, self.info)
        if self._dropped or self.context.cut.pending:
            await self._free_dropped(timeout_s)
        request = build(blocks_pb2.CanAllocateRequest, sequences=allocations, lookahead=whole(lookahead, "lookahead"))
        response = await self._send("can_allocate", request, timeout_s)
        return allocation_status(response.status)

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
            sequence_ids=ids_of(sequences),
            num_tokens=None if num_tokens is None else int_list(num_tokens, "num_tokens"),
            lookahead=whole(lookahead, "lookahead"),
        )
        await self._free_dropped(timeout_s)
        return bool((await self._send("can_append", request, timeout_s)).ok)

    async def can_swap_out(self, sequences: Batch[Sequence], *, timeout_s: float | None = None) -> bool:
        """Return whether the swap tier has room for the sequences now."""
        request = build(blocks_pb2.CanSwapOutRequest, sequence_ids=ids_of(sequences))
        return bool((await self._send("can_swap_out", request, timeout_s)).ok)

    async def can_swap_in(self, sequences: Batch[Sequence], *, timeout_s: float | None = None) -> str:
        """Return whether the device tier has room for the sequences: "ok" (now), "later" or "never"."""
        request = build(blocks_pb2.CanSwapInRequest, sequence_ids=ids_of(sequences))
        return allocation_status((await self._send("can_swap_in", request, timeout_s)).status)

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
        tokens of each sequence; None: one each. Raises LengthMismatchError if another append to one of the sequences
        was under way: one of them counts."""
        if self._dropped or self.context.cut.pending:
            await self._free_dropped(timeout_s)
        counts = None if num_tokens is None else int_list(num_tokens, "num_tokens")
        ids = growing_ids_of(sequences, "sequences")
        if counts is not None and len(counts) != len(ids):
            raise InvalidArgumentError(f"{len(counts)} counts for {len(ids)} sequences", field="num_tokens")
        lengths = list(map(_LENGTH, sequences))
        request = build(
            blocks_pb2.AppendRequest,
            request_id=next(self._request_ids),
            sequence_ids=ids,
            token_ids=token_list(token_ids, self.info),
            num_tokens=counts,
            expected_lengths=lengths,
            lookahead=whole(lookahead, "lookahead"),
        )
        response = await self._send("append", request, timeout_s)
        if lengths != list(map(_LENGTH, sequences)):
            # To the daemon, an append of the same tokens to a sequence of this length is the last one, repeated.
            raise LengthMismatchError("another append to one of these was under way", field="sequences")
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
        ids, counts = ids_of(sequences), None
        if isinstance(num_tokens, Iterable):
            counts = int_list(num_tokens, "num_tokens")
        elif num_tokens is not None:
            counts = [whole(num_tokens, "num_tokens")] * len(ids)
        request = build(
            blocks_pb2.OpenStepRequest,
            request_id=next(self._request_ids),
            sequence_ids=ids,
            num_tokens=counts,
        )
        return self._step(sequences, await self._send("open_step", request, timeout_s))

    async def open_ahead(self, sequences: Batch[Sequence], num_steps: int, *, timeout_s: float | None = None) -> StepT:
        """Open a step over the next `num_steps` tokens of sequences that nobody knows yet, and whose other tokens are
        all computed. For sessions that have mapped the pool for writing; others get PoolNotSharedError. Raises
        LengthMismatchError if the daemon knows another length of a sequence, because the tokens would be written over
        others.

        `MappedPool.step` has its tables. The client writes one token of each sequence after another, and then calls
        `commit_ahead`. The step has no layers: its `extend`, `decode` and `write` raise FailedPreconditionError.
        """
        if self._dropped or self.context.cut.pending:
            await self._free_dropped(timeout_s)
        request = build(
            blocks_pb2.OpenAheadRequest,
            request_id=next(self._request_ids),
            sequence_ids=growing_ids_of(sequences, "sequences"),
            num_steps=whole(num_steps, "num_steps"),
            expected_lengths=list(map(_LENGTH, sequences)),
        )
        return self._step(sequences, await self._send("open_ahead", request, timeout_s), ahead=True)

    async def commit_ahead(
        self,
        step: HasStepInfo,
        token_ids: Iterable[int],
        *,
        num_tokens: Iterable[int] | None = None,
        num_steps: int = 0,
        request_id: int | None = None,
        timeout_s: float | None = None,
    ) -> StepT | None:
        """Append the tokens that were written in a step ahead, sequence after sequence, as computed tokens. On a GPU,
        synchronize with their kernels first.

        `num_tokens` gives the number of tokens of each sequence; None: the same number for each. Returns the next step,
        over the `num_steps` tokens after them, or None if that is 0. Tokens past those of `token_ids` that were written
        already, or are being written, have the same slots in the next step. If the call fails, this step goes on.

        After a CallTimeoutError nobody knows whether the daemon has executed the call. Make it again, with the same
        arguments and the same `request_id`, one of `next_request_id`: it is executed once. Without a `request_id` the
        commit is completed in the background, and the next step is closed.
        """
        counts = None if num_tokens is None else int_list(num_tokens, "num_tokens")
        tokens = token_list(token_ids, self.info)
        request = build(
            blocks_pb2.CommitAheadRequest,
            request_id=next(self._request_ids) if request_id is None else request_id,
            step_id=self._own_step(step),
            token_ids=tokens,
            num_tokens=counts,
            num_steps=whole(num_steps, "num_steps"),
        )

        def grow(*_: object) -> None:
            each = itertools.repeat(len(tokens) // max(1, len(step.sequences)), len(step.sequences))
            for sequence, added in zip(step.sequences, counts or each, strict=True):
                sequence.length += added

        repeats = request_id is not None
        response = await self._send("commit_ahead", request, timeout_s, correct=grow, repeats=repeats)
        grow()
        return self._step(step.sequences, response, ahead=True) if response.step_id else None

    def _step(self, sequences: Batch[Sequence], response: blocks_pb2.StepResponse, *, ahead: bool = False) -> StepT:
        info = step_info(response, self.context.connection.num_restarts, self.token, ahead=ahead)
        return self._make_step(self.calls, tuple(sequences), info)

    def _own_step(self, step: HasStepInfo) -> int:
        """Return the id of a step of this session. Those of other sessions may have the same ids."""
        try:
            info = step.info
        except AttributeError:
            raise InvalidArgumentError(f"is {type(step).__name__}, not a step", field="step") from None
        if info.session_token not in (b"", self.token):
            raise InvalidArgumentError(f"step {info.step_id} is of another session", field="step")
        return info.step_id

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
        parent_ids = growing_ids_of(parents, "parents")
        if sequence_ids is None:
            child_ids = list(itertools.islice(self._sequence_ids, len(parent_ids)))
        else:
            child_ids = int_list(sequence_ids, "child_ids")
        request = build(
            blocks_pb2.ForkRequest,
            request_id=next(self._request_ids),
            parent_ids=parent_ids,
            child_ids=child_ids,
        )
        await self._send("fork", request, timeout_s)
        return [
            Sequence(child_id, parent.length, extra_keys=parent.extra_keys)
            for child_id, parent in zip(child_ids, parents, strict=True)
        ]

    async def truncate(self, sequence: Sequence, length: int, *, timeout_s: float | None = None) -> None:
        """Remove the tokens past `length` and free their slots."""
        length = whole(length, "lengths")
        request = build(
            blocks_pb2.TruncateRequest,
            request_id=next(self._request_ids),
            sequence_ids=growing_ids_of([sequence], "sequences"),
            lengths=[length],
        )

        def shorten(*_: object) -> None:
            sequence.length = length

        await self._send("truncate", request, timeout_s, correct=shorten)
        shorten()

    async def swap_out(self, sequences: Batch[Sequence], *, tier: str = "host", timeout_s: float | None = None) -> int:
        """Move sequences to the swap tier, or with the tier "disk" to the daemon's disk, where they take no memory.
        Returns the number of blocks moved. Raises SavedSessionsOffError without a disk, and the errors of `detach`."""
        request = build(
            blocks_pb2.SwapOutRequest,
            request_id=next(self._request_ids),
            sequence_ids=ids_of(sequences),
            tier=_SWAP_TIERS[choice(tier, _SWAP_TIERS, "tier")],
        )
        return int((await self._send("swap_out", request, timeout_s)).moved_blocks)

    async def swap_in(self, sequences: Batch[Sequence], *, timeout_s: float | None = None) -> int:
        """Move sequences back to the device tier. Returns the number of blocks moved, without the blocks that the
        prefix cache still had. Sequences on the disk need a call of their own; SessionNotRestoredError says that the
        file of one is damaged."""
        request = build(blocks_pb2.SwapInRequest, request_id=next(self._request_ids), sequence_ids=ids_of(sequences))
        return int((await self._send("swap_in", request, timeout_s)).moved_blocks)

    async def free(self, sequences: Batch[Sequence], *, timeout_s: float | None = None) -> None:
        """Free sequences. Their full computed blocks stay in the prefix cache. A batch above the limit of one request
        is split into several requests, each of which frees all of its sequences or none."""
        for ids in list(id_batches(ids_of(sequences), self.info)) or [[]]:
            request = build(blocks_pb2.FreeRequest, request_id=next(self._request_ids), sequence_ids=ids)
            await self._send("free", request, timeout_s)

    def free_later(self, sequences: Iterable[Sequence]) -> None:
        """Free sequences before the session's next allocation or append. Sequences that are already freed by then are
        ignored. This method makes no call and takes no lock, so finalizers may use it."""
        dropped = listed(sequences, "sequences")
        ids_of(dropped)  # an error now, and not in an allocation
        self._dropped.extend(dropped)

    async def _free_dropped(self, timeout_s: float | None) -> None:
        """Free the sequences of `free_later`, after the calls that were cut short are settled: they may change the
        lengths of sequences."""
        if self.context.cut.pending:
            await self.context.cut.settled(self.context.connection.deadline(timeout_s))
        while self._dropped:
            sequence = self._dropped.popleft()
            try:
                with contextlib.suppress(UnknownSequenceError):
                    await self.free([sequence], timeout_s=timeout_s)
            except BaseException:
                self._dropped.append(sequence)
                raise

    # ---- scheduler

    async def open_scheduler(
        self, *, timeout_s: float | None = None, **settings: Unpack[SchedulerArguments]
    ) -> SchedulerT:
        """Open the session's scheduler, which decides what each step computes; see SchedulerArguments. A session that
        has one already, for example a resumed one, returns it if the settings are the same. Raises
        FailedPreconditionError otherwise, and QuotaExceededError for a setting above a limit of the daemon."""
        opened = await open_scheduler(self.calls, settings, timeout_s)
        return self._make_scheduler(self.calls, self._make_step, opened)

    # ---- contents and prefix cache

    async def describe(
        self,
        sequences: Batch[Sequence] | None = None,
        *,
        token_ids: bool = False,
        block_ids: bool = False,
        timeout_s: float | None = None,
    ) -> list[SequenceInfo]:
        """Return the daemon's state of sequences; of all sequences of the session if None."""
        with_tokens, with_blocks = flag(token_ids, "token_ids"), flag(block_ids, "block_ids")
        if sequences is None:
            found: list[SequenceInfo] = []
            while True:
                request = build(blocks_pb2.DescribeRequest, first=len(found))
                response = await self._send("describe", request, timeout_s)
                found += [from_message(SequenceInfo, one) for one in response.sequences]
                if not response.sequences or len(found) >= response.num_sequences:
                    break
        else:
            found = await self._describe(id_batches(ids_of(sequences), self.info), timeout_s)
        if not (with_tokens or with_blocks):
            return found
        batches = describable_batches(found, self.info)
        return await self._describe(batches, timeout_s, return_token_ids=with_tokens, return_block_ids=with_blocks)

    async def _describe(
        self, batches: Iterable[list[int]], timeout_s: float | None, **details: bool
    ) -> list[SequenceInfo]:
        found: list[SequenceInfo] = []
        for ids in batches:
            request = build(blocks_pb2.DescribeRequest, sequence_ids=ids, **details)
            response = await self._send("describe", request, timeout_s)
            found += [from_message(SequenceInfo, one) for one in response.sequences]
        return found

    async def lost_sequences(self, *, timeout_s: float | None = None) -> list[int]:
        """Return the ids of the session's sequences that restarts of the daemon have lost, in ascending order. Calls
        that name one raise SequenceLostError. Freeing it, or a new sequence with its id, ends this state."""
        found: list[int] = []
        while True:
            request = build(blocks_pb2.DescribeRequest, first=len(found))
            response = await self._send("describe", request, timeout_s)
            found += response.lost_sequence_ids
            if not response.lost_sequence_ids or len(found) >= response.num_lost_sequences:
                return found

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
        info, sequence_id = self.info, id_of(sequence, "sequence")
        if not 0 <= start < stop <= info.max_sequence_tokens:  # the daemon refuses it, and its memory is not allocated
            first = max(start, stop - 1) if start >= 0 else start
            await self._send("read", _read_request(sequence_id, first, stop, layer), timeout_s)
        shape = (*((info.num_layers,) if layer is None else ()), stop - start, info.num_kv_heads, info.head_size)
        key, value = np.empty(shape, TENSOR_DTYPES[info.dtype]), np.empty(shape, TENSOR_DTYPES[info.dtype])
        num_layers = info.num_layers if layer is None else 1
        token_bytes = 2 * num_layers * info.num_kv_heads * info.head_size * key.itemsize
        parts = []
        for begin, end in token_parts(stop - start, token_bytes, self.context.remote.part_bytes(info)):
            request = _read_request(sequence_id, start + begin, start + end, layer)
            tokens = np.s_[..., begin:end, :, :]
            parts.append(_part(self._send, request, key[tokens], value[tokens], timeout_s))
        await transfer.read(self.context, parts)
        return key, value

    async def match_prefix(
        self, token_ids: Iterable[int], extra_keys: ExtraKeys = (), *, timeout_s: float | None = None
    ) -> int:
        """Return the number of leading tokens that are in the prefix cache."""
        request = build(
            blocks_pb2.MatchPrefixRequest,
            token_ids=token_list(token_ids, self.info),
            extra_keys=extra_key_messages(extra_keys),
        )
        return int((await self._send("match_prefix", request, timeout_s)).num_cached_tokens)

    async def pin(
        self, token_ids: Iterable[int], ttl_s: float, extra_keys: ExtraKeys = (), *, timeout_s: float | None = None
    ) -> Pin:
        """Protect a prefix's cached blocks from eviction for `ttl_s` seconds. Raises NotComputedError if none is
        cached."""
        request = build(
            blocks_pb2.PinRequest,
            request_id=next(self._request_ids),
            token_ids=token_list(token_ids, self.info),
            extra_keys=extra_key_messages(extra_keys),
            ttl_s=ttl_s,
        )
        return from_message(Pin, await self._send("pin", request, timeout_s))

    async def unpin(self, pin: Pin, *, timeout_s: float | None = None) -> None:
        if not isinstance(pin, Pin):
            raise InvalidArgumentError(f"is {type(pin).__name__}, not a Pin", field="pin")
        request = build(blocks_pb2.UnpinRequest, request_id=next(self._request_ids), pin_id=pin.pin_id)
        num_restarts = self.num_restarts
        try:
            await self._send("unpin", request, timeout_s)
        except UnknownPinError:
            if self.num_restarts == num_restarts:
                raise
            # A process that was killed has ended the pin, and has not answered.

    async def reset_prefix_cache(self, *, timeout_s: float | None = None) -> None:
        """Clear the prefix cache of all sessions."""
        request = build(blocks_pb2.ResetPrefixCacheRequest, request_id=next(self._request_ids))
        await self._send("reset_prefix_cache", request, timeout_s)

    async def common_prefix(self, sequences: Batch[Sequence], *, timeout_s: float | None = None) -> int:
        """Return the number of leading blocks that all sequences share and that are full and computed in each."""
        request = build(blocks_pb2.CommonPrefixRequest, sequence_ids=ids_of(sequences))
        response = await self._send("common_prefix", request, timeout_s)
        return int(response.num_blocks)

    # ---- memory shared with the daemon

    async def create_region(
        self, num_bytes: int, *, device: int | None = None, timeout_s: float | None = None
    ) -> SharedRegion:
        """Create a shared-memory region that the daemon reads and writes in place.

        Without `device`, the daemon allocates host memory. With `device`, the number of the pool's GPU, this process
        allocates memory on that GPU, and its arrays are torch tensors; this needs torch and kvservice built with CUDA,
        or raises FailedPreconditionError. Only for clients on the unix socket of a daemon that allows regions; others
        get RegionsNotAllowedError.
        """
        await self.calls.ready()
        await self.context.connection.drain()
        return await self.context.regions.create(num_bytes, device=device, timeout_s=timeout_s)

    async def open_region(
        self, key: str, num_bytes: int, offset: int = 0, *, timeout_s: float | None = None
    ) -> HostRegion:
        """Register `num_bytes` of an existing POSIX shared-memory object, from byte `offset` on, as a region.

        `key` is the name of the object, as for shm_open. The user of this process must have read and write permission.
        The daemon copies tensors in such a region. Raises RegionNotOpenedError.
        """
        await self.calls.ready()
        await self.context.connection.drain()
        return await self.context.regions.open(key, num_bytes, offset, timeout_s=timeout_s)

    async def unregister_region(self, region: SharedRegion | None = None, *, timeout_s: float | None = None) -> None:
        """Unregister a region; None: all regions of the session, including those of a previous client. Arrays over the
        memory stay usable; calls send them in messages from now on."""
        await self.context.connection.drain()
        await self.context.regions.unregister(region, timeout_s=timeout_s)

    async def regions(self, *, timeout_s: float | None = None) -> list[RegionInfo]:
        """Return the daemon's list of the session's regions, in the order in which they were made."""
        return await self.context.regions.listed(timeout_s=timeout_s)

    async def map_pool(self, *, writable: bool = False, timeout_s: float | None = None) -> MappedPool:
        """Map the pool into this process, together with the tables of the steps opened from now on. Only for clients on
        the unix socket that the daemon trusts with the K/V of all sessions (--share-pool); others get
        PoolNotSharedError."""
        may_write = flag(writable, "writable")
        await self.calls.ready()
        await self.context.connection.drain()
        try:
            pool = await MappedPool.open(self.context, may_write, timeout_s)
        except BaseException:
            if not self._has_mapped and self.calls.transport.kernels is None:  # the daemon may have made the tables
                request = host_pb2.UnmapPoolRequest(request_id=next(self._request_ids))
                self.context.cut.add("unmap_pool", request)
            raise
        self._has_mapped = True
        return pool

    async def commit(self, step: HasStepInfo, *, timeout_s: float | None = None) -> None:
        """Mark a step's tokens as computed, after every layer was written to the mapped pool. On a GPU, synchronize the
        stream first."""
        request = build(host_pb2.CommitRequest, request_id=next(self._request_ids), step_id=self._own_step(step))
        await self._send("commit", request, timeout_s)

    def next_request_id(self) -> int:
        """Return an id for a call that may have to be made again, such as `commit_ahead`."""
        return next(self._request_ids)


def _read_request(sequence_id: int, start: int, stop: int, layer: int | None) -> attention_pb2.ReadRequest:
    part = build(attention_pb2.SequenceRange, sequence_id=sequence_id, start=start, stop=stop)
    request: attention_pb2.ReadRequest = build(attention_pb2.ReadRequest, ranges=[part], layer=layer)
    return request


def _part(
    ask: Callable[..., Awaitable[Any]],
    request: attention_pb2.ReadRequest,
    key: Array,
    value: Array,
    timeout_s: float | None,
) -> transfer.KVPart:
    """Return a part that is read to these arrays."""

    async def send(places: Places | None) -> attention_pb2.ReadResponse:
        if places is None:
            response = await ask("read", request, timeout_s)
            np.copyto(key, to_array(response.key, "key"))
            np.copyto(value, to_array(response.value, "value"))
        else:
            placed = attention_pb2.ReadRequest(key_place=places[0], value_place=places[1])
            placed.MergeFrom(request)
            response = await ask("read", placed, timeout_s)
        answer: attention_pb2.ReadResponse = response
        return answer

    return transfer.KVPart(key, value, send)
