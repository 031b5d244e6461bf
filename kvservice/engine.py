"""The engine connects bookkeeping and bytes: it takes plans from the block manager and submits them to the device.

Bookkeeping runs immediately, on the event loop. The device executes plans that use the same blocks
in the order of their creation, so a block that moves from one sequence to another is never written before it has been
read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvservice.attention_options import DEFAULT_OPTIONS, AttentionOptions
from kvservice.blocks import BlockManager, BlocksConfig, EventJournal, KeptMaps, SessionNamespace, StepPlan, SwapPlan
from kvservice.blocks.plans import ArrayMemory, numpy_memory
from kvservice.config import ServeConfig
from kvservice.devices import Device
from kvservice.errors import InvalidArgumentError, ResourceExhaustedError
from kvservice.pool.layout import TENSOR_DTYPES
from kvservice.scheduler import EngineScheduler, ScheduledBatch, Scheduler

Array = np.ndarray[Any, Any]
# Namespaces besides those of the sessions, for sequences that are being read from the disk.
NUM_HIDDEN_NAMESPACES = 2
# The value of `part` that selects the whole step.
WHOLE = (0, 0)
# The assumed speed of copies between the tiers, until so many blocks were copied.
_COPY_BYTES_PER_S, _FEW_BLOCKS = 10e9, 16


class CacheEngine:
    """Owns the block tables and the device with the pools."""

    def __init__(
        self,
        config: ServeConfig,
        device: Device,
        memory: ArrayMemory = numpy_memory,
        kept: KeptMaps | None = None,
    ) -> None:
        self.layout = config.layout
        self.tensor_dtype = TENSOR_DTYPES[config.dtype]
        self.device = device
        self.journal = EventJournal(config.event_window, config.event_token_ids) if config.event_window else None
        self.manager = _make_manager(config, device, self.journal, memory, kept)
        self.schedulers = Scheduler(self.manager)

    @property
    def tensor_token_bytes(self) -> int:
        """Bytes of K/V of one token, over all layers, as tensors."""
        return self.layout.token_bytes // self.layout.numpy_dtype.itemsize * self.tensor_dtype.itemsize

    @property
    def swap_block_s(self) -> float:
        """Seconds to copy a block between the tiers: the average of all copies, or an estimate if there were few."""
        stats = self.manager.stats()
        num_blocks, busy_s = stats.swapped_out_blocks + stats.swapped_in_blocks, sum(self.device.swap_busy_s.values())
        if num_blocks < _FEW_BLOCKS or not busy_s:
            return self.layout.block_bytes / _COPY_BYTES_PER_S
        return busy_s / num_blocks

    def copy_on_write(self, step: StepPlan) -> None:
        """Submit the copies of a step that the block manager has just opened, before anything is written for it."""
        if len(step.copies.src):
            self.device.copy(step.copies.src, step.copies.dst)

    def schedule(
        self,
        scheduler: EngineScheduler,
        now_s: float,
        max_step_tokens: int | None,
        max_running: int | None,
        *,
        ahead: bool = False,
    ) -> ScheduledBatch:
        """Make the next batch of a scheduler, see EngineScheduler.schedule."""
        return self._submit(scheduler.schedule(now_s, max_step_tokens, max_running, ahead=ahead))

    def retry(self, scheduler: EngineScheduler) -> ScheduledBatch | None:
        """Open the batch in progress again, see EngineScheduler.retry."""
        batch = scheduler.retry()
        return None if batch is None else self._submit(batch)

    def _submit(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Submit the copies of a batch to the device."""
        for plan in batch.swapped_out:
            self._move_out(plan)
        for plan in batch.swapped_in:
            self._move_in(plan)
        if batch.step is not None:
            self.copy_on_write(batch.step)
        return batch

    def swap_out(self, namespace: SessionNamespace, sequence_ids: Array) -> SwapPlan:
        plan = self.manager.swap_out(namespace, sequence_ids)
        self._move_out(plan)
        return plan

    def swap_in(self, namespace: SessionNamespace, sequence_ids: Array) -> SwapPlan:
        plan = self.manager.swap_in(namespace, sequence_ids)
        self._move_in(plan)
        return plan

    def _move_out(self, plan: SwapPlan) -> None:
        if len(plan.src):  # sequences without tokens have no blocks, and there may be no swap tier
            self.device.swap_out(plan.src, plan.dst)

    def _move_in(self, plan: SwapPlan) -> None:
        if len(plan.src):
            self.device.swap_in(plan.src, plan.dst)
            self.manager.submitted(plan)

    async def attend(
        self,
        namespace: SessionNamespace,
        step_id: int,
        layer: int,
        query: Array,
        key: Array,
        value: Array,
        options: AttentionOptions,
        return_lse: bool,
        out: Array | None = None,
        part: tuple[int, int] = WHOLE,
    ) -> tuple[Array, Array | None]:
        """Write one layer's K/V of a step, then attend. `part` is (first token, number of tokens) within the step; a
        number of 0 means all remaining tokens. The tensors cover the tokens of the part.

        `query` `[num_tokens, num_heads, head_size]`, `key` and `value` `[num_tokens, num_kv_heads, head_size]`, of the
        tensor dtype. Returns the output, shaped as `query`, and the log-sum-exp, float32 `[num_tokens, num_heads]`, or
        None. The device may write the output to `out` and return it; `out` has the same shape and dtype and shares no
        memory with the inputs.
        """
        step = self.manager.check_part(namespace, step_id, layer, *part)
        num_tokens = len(step.slot_mapping)
        self._check_query(query, num_tokens)
        self._check_kv(key, value, (num_tokens,))
        if options is not DEFAULT_OPTIONS:
            self.check_options(options, query.shape[1])
        last = self.manager.completes(namespace, step_id, layer, step)
        completed = namespace.steps[step_id].plan if last else None
        done = self.device.attend(step, layer, query, key, value, options, out, completed=completed)
        self.manager.mark_part(namespace, step_id, layer, step)
        output, lse = await done
        return output, lse if return_lse else None

    async def write(
        self,
        namespace: SessionNamespace,
        step_id: int,
        layer: int | None,
        key: Array,
        value: Array,
        part: tuple[int, int] = WHOLE,
    ) -> None:
        """Write a step's K/V without attention: `[num_tokens, num_kv_heads, head_size]` for one layer,
        `[num_layers, num_tokens, num_kv_heads, head_size]` for all (`layer` None). `part` as in `attend`, for one
        layer."""
        if layer is None:
            if part != WHOLE:
                raise InvalidArgumentError("only one layer can be sent in parts", field="layer")
            step = self.manager.check_all_layers(namespace, step_id)
            self._check_kv(key, value, (self.layout.num_layers, len(step.slot_mapping)))
            done = self.device.write(step, range(self.layout.num_layers), key, value, completed=step)
            self.manager.mark_all_layers(namespace, step_id)
        else:
            step = self.manager.check_part(namespace, step_id, layer, *part)
            self._check_kv(key, value, (len(step.slot_mapping),))
            last = self.manager.completes(namespace, step_id, layer, step)
            completed = namespace.steps[step_id].plan if last else None
            done = self.device.write(step, (layer,), key[None], value[None], completed=completed)
            self.manager.mark_part(namespace, step_id, layer, step)
        await done

    async def read(
        self,
        namespace: SessionNamespace,
        ranges: Sequence[tuple[int, int, int]],
        layer: int | None,
        out: tuple[Array, Array] | None = None,
    ) -> tuple[Array, Array]:
        """Read back the computed K/V of `(sequence_id, start, stop)` ranges, concatenated.

        Returns key and value, `[num_tokens, num_kv_heads, head_size]`, or `[num_layers, num_tokens, num_kv_heads,
        head_size]` if `layer` is None. They are in `out` if given, uint8 arrays of exactly their sizes.
        """
        if layer is not None and not 0 <= layer < self.layout.num_layers:
            raise InvalidArgumentError(f"{layer} is not from 0 to {self.layout.num_layers - 1}", field="layer")
        slots = self.manager.read_slots(namespace, ranges)
        layers = range(self.layout.num_layers) if layer is None else (layer,)
        if out is not None:
            shape = (len(layers), len(slots), self.layout.num_kv_heads, self.layout.head_size)
            out = out[0].view(self.tensor_dtype).reshape(shape), out[1].view(self.tensor_dtype).reshape(shape)
        key, value = await self.device.read(layers, slots, out)
        return (key, value) if layer is None else (key[0], value[0])

    def _check_query(self, query: Array, num_tokens: int) -> None:
        layout = self.layout
        if query.dtype != self.tensor_dtype:
            raise self._wrong_dtype(query, "query")
        if (
            query.ndim != 3
            or query.shape[0] != num_tokens
            or query.shape[2] != layout.head_size
            or query.shape[1] == 0
            or query.shape[1] % layout.num_kv_heads
        ):
            expected = f"[{num_tokens}, a multiple of {layout.num_kv_heads}, {layout.head_size}]"
            raise InvalidArgumentError(f"shape is {list(query.shape)}, must be {expected}", field="query.shape")

    def _check_kv(self, key: Array, value: Array, leading: tuple[int, ...]) -> None:
        expected = (*leading, self.layout.num_kv_heads, self.layout.head_size)
        for name, array in (("key", key), ("value", value)):
            if array.dtype != self.tensor_dtype:
                raise self._wrong_dtype(array, name)
            if array.shape != expected:
                raise InvalidArgumentError(
                    f"shape is {list(array.shape)}, must be {list(expected)}", field=f"{name}.shape"
                )

    def _wrong_dtype(self, array: Array, name: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"is {array.dtype}, must be {self.tensor_dtype}", field=f"{name}.data_type")

    def check_options(self, options: AttentionOptions, num_heads: int) -> None:
        """Check attention options. Raises InvalidArgumentError naming an option that is invalid or that the device does
        not support."""
        options.check(num_heads, self.layout.block_size)
        self.device.check_options(options)


def _make_manager(
    config: ServeConfig, device: Device, journal: EventJournal | None, memory: ArrayMemory, kept: KeptMaps | None
) -> BlockManager:
    limits = config.request_limits
    try:
        return BlockManager(
            BlocksConfig(
                num_blocks=device.num_blocks,
                block_size=config.block_size,
                num_layers=config.num_layers,
                num_swap_blocks=device.num_swap_blocks,
                watermark=config.watermark,
                enable_prefix_caching=config.enable_prefix_caching,
                max_sequences=config.max_sequences,
                max_namespaces=config.max_sessions + NUM_HIDDEN_NAMESPACES,
                max_sequence_tokens=config.max_sequence_tokens,
                max_request_tokens=limits.max_request_tokens,
                max_request_blocks=limits.max_request_blocks,
                max_pinned_fraction=config.max_pinned_fraction,
            ),
            journal=journal,
            memory=memory,
            kept=kept,
        )
    except MemoryError as error:
        raise ResourceExhaustedError(
            f"no memory for the block tables of {config.max_sequences} sequences of up to "
            f"{config.max_sequence_tokens} tokens: {error}",
            field="max_sequences",
        ) from None
