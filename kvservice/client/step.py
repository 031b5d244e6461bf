"""A step's operations, shared by the sync and async API, and the calls of a session, which its transport executes. Lost
shared memory is opened again here."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from typing import Any, TypedDict, Unpack

import numpy as np

from kvservice.attention_options import DEFAULT_OPTIONS, AttentionOptions, BlockSparse
from kvservice.client.messages import flag, listed, number, whole
from kvservice.client.remote import Context
from kvservice.client.tensors import Tensor
from kvservice.client.transport import AttentionCall, SharedMemoryLostError, Transport, WriteCall
from kvservice.client.values import Sequence, StepInfo
from kvservice.errors import FailedPreconditionError, InvalidArgumentError, UnknownRegionError

# ---- the operations of a step


class AttentionArguments(TypedDict, total=False):
    """Options of the attention scores and of the results.

    `scale` to `block_sparse`: see AttentionOptions; `alibi_slopes` has one slope for each query head. `return_lse`:
    return the log-sum-exp too. `out`, `lse_out`: arrays with the shapes of the output and the log-sum-exp, which are
    filled and returned instead of new ones. `timeout_s`: see SessionCore.
    """

    scale: float | None
    sliding_window: int
    logits_soft_cap: float
    alibi_slopes: Iterable[float] | None
    block_sparse: BlockSparse | None
    return_lse: bool
    out: Tensor | None
    lse_out: Tensor | None
    timeout_s: float | None


class OpenStep:
    """A step that the daemon has opened. The faces of both APIs add its calls."""

    def __init__(self, calls: SessionCalls, sequences: tuple[Sequence, ...], info: StepInfo) -> None:
        self._calls = calls
        self.sequences = sequences
        self.info = info
        self.step_id = info.step_id
        self.query_lens = info.query_lens
        self.context_lens = info.context_lens
        self.num_tokens = info.num_tokens
        self.cow_copies = info.cow_copies
        self.mapped = info.mapped

    def _attend(
        self,
        decode: bool,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        sliding_window: int = 0,
        logits_soft_cap: float = 0.0,
        alibi_slopes: Iterable[float] | None = None,
        block_sparse: BlockSparse | None = None,
        return_lse: bool = False,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
        timeout_s: float | None = None,
    ) -> Awaitable[Any]:
        options = attention_options(scale, sliding_window, logits_soft_cap, alibi_slopes, block_sparse)
        deadline = self._calls.context.connection.deadline(timeout_s)
        lse = return_lse is not False and flag(return_lse, "return_lse")
        call = AttentionCall(self.info, decode, layer, query, key, value, options, lse, out, lse_out, deadline)
        return self._calls.attend(call)


class StepCore(OpenStep):
    """One engine iteration over a batch, with one call for each layer.

    Token j of sequence i is at position context_lens[i] - query_lens[i] + j; both are int32[num_seqs]. Tensors are
    ragged: they hold the tokens of sequence after sequence, without padding.
    """

    async def decode(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionArguments]
    ) -> Any:
        """`extend` for steps with one token per sequence. Raises InvalidArgumentError for other steps."""
        return await self._attend(True, layer, query, key, value, **options)

    async def extend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionArguments]
    ) -> Any:
        """Write the K/V of the step's tokens for one layer, then compute causal attention over each sequence.

        query is `[num_tokens, num_heads, head_size]`, key and value are `[num_tokens, num_kv_heads, head_size]`, NumPy
        or torch, in the pool's dtype; options as in AttentionArguments. Returns the output with the shape of query, or
        with `return_lse` (output, log-sum-exp float32 `[num_tokens, num_heads]`). Call it once for each layer of a
        step. Raises KVServiceError.
        """
        return await self._attend(False, layer, query, key, value, **options)

    async def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionArguments]
    ) -> Any:
        """`decode` if every sequence has one token, else `extend`."""
        return await self._attend(self.num_tokens == len(self.sequences), layer, query, key, value, **options)

    async def write(
        self, key: Tensor, value: Tensor, layer: int | None = None, *, timeout_s: float | None = None
    ) -> None:
        """Write the step's K/V without attention. key and value are `[num_tokens, num_kv_heads, head_size]` for one
        layer, or `[num_layers, num_tokens, num_kv_heads, head_size]` for all layers (`layer` None)."""
        await self._calls.write(
            WriteCall(self.info, layer, key, value, self._calls.context.connection.deadline(timeout_s))
        )


def attention_options(
    scale: float | None,
    sliding_window: int,
    logits_soft_cap: float,
    alibi_slopes: Iterable[float] | None,
    block_sparse: BlockSparse | None,
) -> AttentionOptions:
    """Convert a caller's options. Raises InvalidArgumentError naming the option."""
    off = (type(sliding_window), type(logits_soft_cap)) == (int, float) and not sliding_window and not logits_soft_cap
    if off and scale is None and alibi_slopes is None and block_sparse is None:
        return DEFAULT_OPTIONS
    if block_sparse is not None and not isinstance(block_sparse, BlockSparse):
        raise InvalidArgumentError(f"is {type(block_sparse).__name__}, not a BlockSparse", field="options.block_sparse")
    factor = None if scale is None else number(scale, "options.scale")
    cap, window = number(logits_soft_cap, "options.logits_soft_cap"), whole(sliding_window, "options.sliding_window")
    slopes_field = "options.alibi_slopes"
    slopes = [
        number(slope, slopes_field) for slope in listed(() if alibi_slopes is None else alibi_slopes, slopes_field)
    ]
    with np.errstate(over="ignore"):  # numbers that become infinite are refused
        if factor is not None and np.float32(factor) == 0:
            raise InvalidArgumentError("0 makes all scores equal; None is the default scale", field="options.scale")
        slopes_array = np.array(slopes, np.float32) if slopes else None
    return AttentionOptions(factor, window, cap, slopes_array, block_sparse)


# ---- the calls of a session

# The daemon has removed what a session shares with it. The call was not executed.
_LOST = (SharedMemoryLostError, UnknownRegionError)


class SessionCalls:
    """The calls of one session and its steps."""

    def __init__(self, context: Context, transport: Transport) -> None:
        self.context = context
        self.transport = transport
        # The number of restarts of the daemon when the shared memory was opened, and how often it was opened again.
        self._num_restarts = context.connection.num_restarts
        self._num_opened = 0
        self._reopening = context.connection.lock()
        if transport.kernels is not None:
            context.connection.kernels.add(transport.kernels)

    async def ready(self, deadline: float | None = None) -> None:
        """Prepare a call that uses shared memory: wait for the connection, and open again what a new process of the
        daemon does not share yet. A mapped pool must not be written meanwhile: the process that comes may give the
        blocks of lost sequences to others."""
        connection = self.context.connection
        connection.process.check()
        if not connection.connected:
            await connection.ready(deadline)
        if self._num_restarts != connection.num_restarts:
            await self._reopen(self._num_opened)

    async def attend(self, call: AttentionCall) -> Tensor | tuple[Tensor, Tensor]:
        """Execute a call with the session's transport; see Transport. Returns the output, or with `return_lse` output
        and log-sum-exp."""
        if call.step.ahead:
            raise _has_no_layers(call.step)
        await self.ready(call.deadline)
        opened = self._num_opened
        try:
            output, lse = await self.transport.attend(call)
        except _LOST:
            await self._reopen(opened)
            output, lse = await self.transport.attend(call)
        return output if lse is None else (output, lse)

    async def write(self, call: WriteCall) -> None:
        """Execute a call with the session's transport; see Transport."""
        if call.step.ahead:
            raise _has_no_layers(call.step)
        await self.ready(call.deadline)
        opened = self._num_opened
        try:
            await self.transport.write(call)
        except _LOST:
            await self._reopen(opened)
            await self.transport.write(call)

    async def _reopen(self, opened: int) -> None:
        """Open the shared memory again, unless another caller has done that since it was opened for the `opened`-th
        time."""
        connection = self.context.connection
        async with self._reopening:
            if self._num_opened != opened:
                return
            num_restarts = connection.num_restarts
            self.context.regions.forget()
            await connection.drain()
            await connection.with_one_process(self.transport.reopen)
            self._num_restarts = num_restarts
            self._num_opened += 1

    async def release(self, rest: Transport) -> None:
        """Release the memory that the session shares with the daemon, so that the system can reclaim it when the
        session ends. `rest` executes calls from now on. Does nothing in a forked process."""
        if not self.context.connection.process.is_here:
            return
        await self.context.connection.drain()
        await self.transport.close()
        self.context.remote.close()
        self.transport = rest
        self.context.regions.forget()


def _has_no_layers(step: StepInfo) -> FailedPreconditionError:
    """Return the error for a step ahead, before a transport writes any of it."""
    return FailedPreconditionError(
        f"step {step.step_id} is ahead: write it in the mapped pool, and call commit_ahead", field="step_id"
    )
