"""The only place where bookkeeping meets bytes: takes a plan from blocks/ and applies it to pool/ through ops/.

Bookkeeping is done at once, on the event loop. The bytes of a plan are moved in the order in which the plans were made
(`ByteQueue`), so that a block which one sequence gives up and another gets is never written before it has been read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvservice import ops
from kvservice.blocks import BlockManager, BlocksConfig, SequenceSpace, Step, SwapPlan
from kvservice.bytequeue import ByteQueue
from kvservice.config import ServeConfig
from kvservice.errors import InvalidArgumentError, KVServiceError, ResourceExhaustedError
from kvservice.pool.cpu import CpuPool

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class AttentionOptions:
    """How scores are made. `scale` None: 1/sqrt(head_size). `sliding_window`, `logits_soft_cap` 0: off."""

    scale: float | None = None
    sliding_window: int = 0
    logits_soft_cap: float = 0.0
    alibi_slopes: Array | None = None


class Engine:
    """Owner of the block tables and of the pools that they speak of."""

    def __init__(self, config: ServeConfig) -> None:
        self.layout = config.layout
        self.manager = _make_manager(config)
        self.pool = CpuPool(self.layout, config.pool_blocks)
        self.swap_pool = CpuPool(self.layout, config.swap_blocks, "kvservice-swap")
        self.queue = ByteQueue()
        if config.num_threads:
            ops.set_num_threads(config.num_threads)

    def append(
        self,
        space: SequenceSpace,
        sequence_ids: Array,
        token_ids: Array,
        num_tokens: Array | None,
        expected_lengths: Array | None,
        lookahead: int,
    ) -> Step:
        step = self.manager.append(space, sequence_ids, token_ids, num_tokens, expected_lengths, lookahead)
        self._copy_on_write(step)
        return step

    def open_step(self, space: SequenceSpace, sequence_ids: Array, num_tokens: Array | None) -> Step:
        step = self.manager.open_step(space, sequence_ids, num_tokens)
        self._copy_on_write(step)
        return step

    def _copy_on_write(self, step: Step) -> None:
        if len(step.copies):
            self._copy(self.pool, self.pool, step.copies.src, step.copies.dst)

    def swap_out(self, space: SequenceSpace, sequence_ids: Array) -> SwapPlan:
        plan = self.manager.swap_out(space, sequence_ids)
        self._copy(self.pool, self.swap_pool, plan.src, plan.dst)
        return plan

    def swap_in(self, space: SequenceSpace, sequence_ids: Array) -> SwapPlan:
        plan = self.manager.swap_in(space, sequence_ids)
        self._copy(self.swap_pool, self.pool, plan.src, plan.dst)
        return plan

    def _copy(self, source: CpuPool, target: CpuPool, src_ids: Array, dst_ids: Array) -> None:
        self.queue.post(
            lambda: ops.copy_blocks(source.blocks, target.blocks, src_ids, dst_ids),
            num_bytes=len(src_ids) * self.layout.block_bytes,
        )

    async def attend(
        self,
        space: SequenceSpace,
        step_id: int,
        layer: int,
        query: Array,
        key: Array,
        value: Array,
        options: AttentionOptions,
        return_lse: bool,
    ) -> tuple[Array, Array | None]:
        """Write one layer's K/V of a step, then attend.

        `query` `[num_tokens, num_heads, head_size]`, `key` and `value` `[num_tokens, num_kv_heads, head_size]`, of the
        pool's dtype. Returns the output, shaped as `query`, and the log-sum-exp, float32
        `[num_tokens, num_heads]`, or None.
        """
        step = self.manager.check_layer(space, step_id, layer)
        num_tokens = len(step.slot_mapping)
        self._check_query(query, num_tokens)
        self._check_kv(key, value, (num_tokens,))
        check_options(options, query.shape[1])
        block_tables = step.block_tables
        self.manager.mark_layer(space, step_id, layer)

        def work() -> tuple[Array, Array | None]:
            ops.write_kv(self.pool.blocks, layer, step.slot_mapping, key, value)
            output, lse = ops.attention(
                self.pool.blocks,
                layer,
                query,
                step.query_lens,
                block_tables,
                step.context_lens,
                scale=options.scale,
                sliding_window=options.sliding_window,
                logits_soft_cap=options.logits_soft_cap,
                alibi_slopes=options.alibi_slopes,
                return_lse=True,
            )
            return output, lse if return_lse else None

        scores = int((step.query_lens.astype(np.int64) * step.context_lens).sum())
        return await self.queue.run(work, num_bytes=scores * query[0].nbytes)

    async def write(self, space: SequenceSpace, step_id: int, layer: int | None, key: Array, value: Array) -> None:
        """Write a step's K/V without attention: `[num_tokens, num_kv_heads, head_size]` for one layer,
        `[num_layers, num_tokens, num_kv_heads, head_size]` for all (`layer` None)."""
        if layer is None:
            step = self.manager.check_all_layers(space, step_id)
            self._check_kv(key, value, (self.layout.num_layers, len(step.slot_mapping)))
            self.manager.mark_all_layers(space, step_id)
        else:
            step = self.manager.check_layer(space, step_id, layer)
            self._check_kv(key, value, (len(step.slot_mapping),))
            self.manager.mark_layer(space, step_id, layer)
        layers = range(self.layout.num_layers) if layer is None else (layer,)
        keys, values = (key, value) if layer is None else (key[None], value[None])

        def work() -> None:
            for index, number in enumerate(layers):
                ops.write_kv(self.pool.blocks, number, step.slot_mapping, keys[index], values[index])

        await self.queue.run(work, num_bytes=key.nbytes * 2)

    async def read(
        self, space: SequenceSpace, ranges: Sequence[tuple[int, int, int]], layer: int | None
    ) -> tuple[Array, Array]:
        """Read computed K/V of `(sequence_id, start, stop)` ranges back, one after the other.

        Returns key and value, `[num_tokens, num_kv_heads, head_size]`, `[num_layers]` before it if `layer` is None.
        """
        if not ranges:
            raise InvalidArgumentError("no ranges", field="ranges")
        if layer is not None and not 0 <= layer < self.layout.num_layers:
            raise InvalidArgumentError(f"{layer} is not below {self.layout.num_layers}", field="layer")
        slots = np.concatenate([self._range_slots(space, i, token_range) for i, token_range in enumerate(ranges)])
        layers = range(self.layout.num_layers) if layer is None else (layer,)

        def work() -> tuple[Array, Array]:
            parts = [ops.read_kv(self.pool.blocks, n, slots, head_size=self.layout.head_size) for n in layers]
            if layer is not None:
                return parts[0]
            return np.stack([part[0] for part in parts]), np.stack([part[1] for part in parts])

        num_bytes = len(slots) * self.layout.token_bytes // self.layout.num_layers * len(layers)
        return await self.queue.run(work, num_bytes=num_bytes)

    def _range_slots(self, space: SequenceSpace, index: int, token_range: tuple[int, int, int]) -> Array:
        try:
            return self.manager.read_slots(space, *token_range)
        except KVServiceError as error:
            error.field = f"ranges[{index}].{error.field.removesuffix('[0]')}"
            raise

    def _check_query(self, query: Array, num_tokens: int) -> None:
        layout = self.layout
        self._check_dtype(query, "query")
        expected = f"[{num_tokens}, a multiple of {layout.num_kv_heads}, {layout.head_size}]"
        if (
            query.ndim != 3
            or query.shape[0] != num_tokens
            or query.shape[2] != layout.head_size
            or query.shape[1] == 0
            or query.shape[1] % layout.num_kv_heads
        ):
            raise InvalidArgumentError(f"shape is {list(query.shape)}, must be {expected}", field="query.shape")

    def _check_kv(self, key: Array, value: Array, leading: tuple[int, ...]) -> None:
        expected = (*leading, self.layout.num_kv_heads, self.layout.head_size)
        for name, array in (("key", key), ("value", value)):
            self._check_dtype(array, name)
            if array.shape != expected:
                raise InvalidArgumentError(
                    f"shape is {list(array.shape)}, must be {list(expected)}", field=f"{name}.shape"
                )

    def _check_dtype(self, array: Array, name: str) -> None:
        if array.dtype != self.layout.numpy_dtype:
            raise InvalidArgumentError(f"is {array.dtype}, the pool is {self.layout.dtype}", field=f"{name}.data_type")


def _make_manager(config: ServeConfig) -> BlockManager:
    try:
        return BlockManager(
            BlocksConfig(
                num_blocks=config.pool_blocks,
                block_size=config.block_size,
                num_layers=config.num_layers,
                num_swap_blocks=config.swap_blocks,
                watermark=config.watermark,
                enable_prefix_caching=config.enable_prefix_caching,
                max_sequences=config.max_sequences,
                max_sequence_tokens=config.max_sequence_tokens,
                max_pinned_fraction=config.max_pinned_fraction,
            )
        )
    except MemoryError as error:
        raise ResourceExhaustedError(
            f"no memory for the block tables of {config.max_sequences} sequences of up to "
            f"{config.max_sequence_tokens} tokens: {error}",
            field="max_sequences",
        ) from None


def check_options(options: AttentionOptions, num_heads: int | None) -> None:
    """Raise InvalidArgumentError naming the option that no attention can be computed with."""
    if options.scale is not None and not math.isfinite(options.scale):
        raise InvalidArgumentError(f"{options.scale} is not finite", field="options.scale")
    if options.sliding_window < 0:
        raise InvalidArgumentError(f"{options.sliding_window} is negative", field="options.sliding_window")
    if not (math.isfinite(options.logits_soft_cap) and options.logits_soft_cap >= 0):
        raise InvalidArgumentError(f"{options.logits_soft_cap} is no bound", field="options.logits_soft_cap")
    slopes = options.alibi_slopes
    if slopes is not None and num_heads is not None and len(slopes) != num_heads:
        raise InvalidArgumentError(f"{len(slopes)} slopes for {num_heads} heads", field="options.alibi_slopes")
    if slopes is not None and not np.isfinite(slopes).all():
        raise InvalidArgumentError("not finite", field="options.alibi_slopes")
