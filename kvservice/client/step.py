"""What a step can do, written once; see `core.py`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np

from kvservice.client import tensors
from kvservice.client.requests import build, whole
from kvservice.client.tensors import Tensor
from kvservice.client.values import BlockSparse, Sequence
from kvservice.errors import InvalidArgumentError
from kvservice.v1 import attention_pb2, blocks_pb2
from kvservice.wire.tensors import to_ints

if TYPE_CHECKING:
    from kvservice.client.core import SessionCore


class AttentionOptions(TypedDict, total=False):
    """How scores are made, and what is returned besides the output.

    `scale`: None is 1/sqrt(head_size). `sliding_window`: a token sees that many latest positions, its own included; 0
    is all. `logits_soft_cap`: cap * tanh(score / cap), 0 is off. `alibi_slopes`: a number for each query head.
    `block_sparse`: which keys are left out, None is none. `out`, `lse_out`: arrays in a region of the session,
    shaped as the output and the log-sum-exp, that are filled and returned instead of new ones.
    """

    scale: float | None
    sliding_window: int
    logits_soft_cap: float
    alibi_slopes: Iterable[float] | None
    block_sparse: BlockSparse | None
    return_lse: bool
    out: Tensor | None
    lse_out: Tensor | None


class StepCore:
    """One engine iteration over a batch: one call for each layer.

    Token j of the i-th sequence stands at position context_lens[i] - query_lens[i] + j. Tensors are ragged: the tokens
    of the sequences one after the other, without padding.
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
        self._session = session

    async def decode(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionOptions]
    ) -> Any:
        """`extend` for steps in which every sequence has one token; others are refused."""
        return await self._attend("decode", layer, query, key, value, **options)

    async def extend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionOptions]
    ) -> Any:
        """Write the layer's K/V of the step's tokens, then attend, causally.

        query `[num_tokens, num_heads, head_size]`, key and value `[num_tokens, num_kv_heads, head_size]`, of the pool's
        dtype, NumPy or torch; options as in AttentionOptions. Returns the output, shaped as query, or with `return_lse`
        (output, log-sum-exp float32 `[num_tokens, num_heads]`). Each layer once in a step.
        """
        return await self._attend("extend", layer, query, key, value, **options)

    async def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionOptions]
    ) -> Any:
        """`decode` where every sequence has one token, else `extend`."""
        name = "decode" if self.num_tokens == len(self.sequences) else "extend"
        return await self._attend(name, layer, query, key, value, **options)

    async def _attend(
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
    ) -> Any:
        if scale is not None and np.float32(scale) == 0:
            raise InvalidArgumentError("0 makes all scores equal; None is the default scale", field="options.scale")
        request = build(
            attention_pb2.AttendRequest,
            step_id=self.step_id,
            layer=whole(layer, "layer"),
            options=build(
                attention_pb2.AttentionOptions,
                scale=scale or 0.0,
                sliding_window=whole(sliding_window, "options.sliding_window"),
                logits_soft_cap=logits_soft_cap,
                alibi_slopes=None if alibi_slopes is None else [float(slope) for slope in alibi_slopes],
                block_sparse=None if block_sparse is None else _sparse_message(block_sparse),
            ),
            return_lse=return_lse,
        )
        tensors.put(query, request.query, "query", self._session.find_place)
        self._put_kv(request, key, value)
        self._put_places(request, out, lse_out)
        response = await self._session.call(name, request)
        output = tensors.from_message(response.output, query, "output") if out is None else out
        if not return_lse:
            return output
        return output, tensors.from_message(response.lse, query, "lse") if lse_out is None else lse_out

    async def write(self, key: Tensor, value: Tensor, layer: int | None = None) -> None:
        """Write the step's K/V without attention: `[num_tokens, num_kv_heads, head_size]` of one layer, or
        `[num_layers, num_tokens, num_kv_heads, head_size]` of all."""
        number = None if layer is None else whole(layer, "layer")
        request = build(attention_pb2.WriteRequest, step_id=self.step_id, layer=number)
        self._put_kv(request, key, value)
        await self._session.call("write", request)

    def _put_kv(self, request: Any, key: Tensor, value: Tensor) -> None:
        tensors.put(key, request.key, "key", self._session.find_place)
        tensors.put(value, request.value, "value", self._session.find_place)
        names = ("query", "key", "value")
        num_bytes = sum(len(getattr(request, name).inline) for name in names if hasattr(request, name))
        self._session.check_size(num_bytes, "query, key, value")

    def _put_places(self, request: attention_pb2.AttendRequest, out: Tensor | None, lse_out: Tensor | None) -> None:
        shape, find = tuple(request.query.shape), self._session.find_place
        if out is not None:
            tensors.put_place(out, shape, self._session.info.dtype, request.output_place, "out", find)
        if lse_out is not None:
            if not request.return_lse:
                raise InvalidArgumentError("there is no log-sum-exp without return_lse", field="lse_out")
            tensors.put_place(lse_out, shape[:2], "float32", request.lse_place, "lse_out", find)


def _sparse_message(sparse: BlockSparse) -> attention_pb2.BlockSparse:
    fields = {name: whole(value, f"options.block_sparse.{name}") for name, value in asdict(sparse).items()}
    return build(attention_pb2.BlockSparse, **fields)
