"""The operations of a step, shared by the sync and async API; see `session.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from typing import Any, TypedDict, Unpack

from kvservice.attention_options import BlockSparse
from kvservice.client.calls import AttentionCall, WriteCall, attention_options
from kvservice.client.session_calls import SessionCalls
from kvservice.client.tensors import Tensor
from kvservice.client.values import Sequence, StepInfo


class AttentionArguments(TypedDict, total=False):
    """Options of the attention scores and of the results.

    `scale`: factor of the scores; None is 1/sqrt(head_size). `sliding_window`: number of latest positions that a token
    attends to, including its own; 0 is all. `logits_soft_cap`: cap * tanh(score / cap); 0 is off. `alibi_slopes`: one
    slope for each query head. `block_sparse`: the block-sparse pattern; None is dense. `out`, `lse_out`: arrays with
    the shapes of the output and the log-sum-exp, which are filled and returned instead of new ones. `timeout_s`: see
    SessionCore.
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


class StepCore:
    """One engine iteration over a batch, with one call for each layer.

    Token j of sequence i is at position context_lens[i] - query_lens[i] + j; both are int32[num_seqs]. Tensors are
    ragged: they hold the tokens of sequence after sequence, without padding.
    """

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
        deadline = self._calls.deadline(timeout_s)
        call = AttentionCall(self.info, decode, layer, query, key, value, options, return_lse, out, lse_out, deadline)
        return self._calls.attend(call)

    async def write(
        self, key: Tensor, value: Tensor, layer: int | None = None, *, timeout_s: float | None = None
    ) -> None:
        """Write the step's K/V without attention. key and value are `[num_tokens, num_kv_heads, head_size]` for one
        layer, or `[num_layers, num_tokens, num_kv_heads, head_size]` for all layers (`layer` None)."""
        await self._calls.write(WriteCall(self.info, layer, key, value, self._calls.deadline(timeout_s)))
