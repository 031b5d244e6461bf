"""The operations of a step, shared by the sync and async API; see `core.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np

from kvservice.client import tensors
from kvservice.client.requests import whole
from kvservice.client.tensors import Tensor
from kvservice.client.transports import Layer, Options, attend, check_out, check_same_device, write
from kvservice.client.values import BlockSparse, Sequence
from kvservice.errors import InvalidArgumentError
from kvservice.v1 import blocks_pb2
from kvservice.wire.tensors import to_ints

if TYPE_CHECKING:
    from kvservice.client.core import SessionCore


class AttentionOptions(TypedDict, total=False):
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

    def __init__(
        self, session: SessionCore[Any], sequences: tuple[Sequence, ...], response: blocks_pb2.StepResponse
    ) -> None:
        self.sequences = sequences
        self.step_id: int = response.step_id
        self.query_lens = to_ints(response.query_lens, np.int32)
        self.context_lens = to_ints(response.context_lens, np.int32)
        self.num_tokens = int(self.query_lens.sum())
        self.cow_copies: int = response.cow_copies
        self.written: set[int] = set()  # layers that this process has written to the mapped pool
        # Slot number and byte offset in the session's tables, if the session has mapped the pool.
        self.mapped = (response.mapped.slot, response.mapped.offset) if response.HasField("mapped") else None
        self.session = session

    async def decode(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionOptions]
    ) -> Any:
        """`extend` for steps with one token per sequence. Raises InvalidArgumentError for other steps."""
        return await self._attend("decode", layer, query, key, value, **options)

    async def extend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionOptions]
    ) -> Any:
        """Write the K/V of the step's tokens for one layer, then compute causal attention over each sequence.

        query is `[num_tokens, num_heads, head_size]`, key and value are `[num_tokens, num_kv_heads, head_size]`, NumPy
        or torch, in the pool's dtype; options as in AttentionOptions. Returns the output with the shape of query, or
        with `return_lse` (output, log-sum-exp float32 `[num_tokens, num_heads]`). Call it once for each layer of a
        step. Raises KVServiceError.
        """
        return await self._attend("extend", layer, query, key, value, **options)

    async def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionOptions]
    ) -> Any:
        """`decode` if every sequence has one token, else `extend`."""
        name = "decode" if self.num_tokens == len(self.sequences) else "extend"
        return await self._attend(name, layer, query, key, value, **options)

    async def _attend(
        self, name: str, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionOptions]
    ) -> Any:
        out = options.get("out")
        if out is not None and len(options) == 1:
            transport = self.session.attending
            if await transport.attend_in_place(self, name == "decode", layer, query, key, value, out):
                return out
        return await self._attend_checked(name, layer, query, key, value, **options)

    async def _attend_checked(
        self,
        name: str,
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
    ) -> Any:
        call = Layer(
            self,
            name == "decode",
            whole(layer, "layer"),
            tensors.as_tensor(query, "query"),
            tensors.as_tensor(key, "key"),
            tensors.as_tensor(value, "value"),
            Options.of(scale, sliding_window, logits_soft_cap, alibi_slopes, block_sparse),
            return_lse,
            None if out is None else tensors.as_result(out, "out"),
            None if lse_out is None else tensors.as_result(lse_out, "lse_out"),
            timeout_s,
        )
        self._check_results(call)
        check_same_device(call)
        output, lse = await attend(self.session.attending, call)
        result = tensors.like(output, query) if out is None else out
        if lse is None:
            return result
        return result, tensors.like(lse, query) if lse_out is None else lse_out

    def _check_results(self, call: Layer) -> None:
        if call.out is not None:
            check_out(call.out, call.query.shape, self.session.info.dtype, "out")
        if call.lse_out is not None:
            if not call.return_lse:
                raise InvalidArgumentError("there is no log-sum-exp without return_lse", field="lse_out")
            check_out(call.lse_out, call.lse_shape, "float32", "lse_out")

    async def write(
        self, key: Tensor, value: Tensor, layer: int | None = None, *, timeout_s: float | None = None
    ) -> None:
        """Write the step's K/V without attention. key and value are `[num_tokens, num_kv_heads, head_size]` for one
        layer, or `[num_layers, num_tokens, num_kv_heads, head_size]` for all layers (`layer` None)."""
        number = None if layer is None else whole(layer, "layer")
        arrays = tensors.as_tensor(key, "key"), tensors.as_tensor(value, "value")
        await write(self.session.attending, self, number, *arrays, timeout_s)
