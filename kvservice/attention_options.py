"""Options of paged attention, and the one check of their values in Python.

`check_options` of csrc/attention_options.h is the same check for callers of the compiled extension and for lanes: it
raises errors with the same fields and texts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvservice.errors import InvalidArgumentError

FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class BlockSparse:
    """The block-sparse attention pattern of vLLM, in sparse blocks of `block_size` tokens from position 0.

    A head attends to the last `local_blocks` blocks, including the query's own, and to every block b with
    `(b + offset) % vert_stride == 0`. The offset depends on the head, counted from tensor-parallel rank 0: query
    head * head_sliding_step + 1, or, if that step is negative, KV head * -head_sliding_step + 1. A `vert_stride` of
    0 or 1 attends to all blocks. `block_size` is a multiple of the pool's block size.
    """

    vert_stride: int
    local_blocks: int
    block_size: int = 64
    head_sliding_step: int = 0
    tp_rank: int = 0

    @property
    def is_on(self) -> bool:
        return self.vert_stride > 1

    def check(self, block_size: int) -> None:
        """Check the values for a pool with blocks of `block_size` tokens. Raises InvalidArgumentError naming one."""
        field = "options.block_sparse"
        _require(self.vert_stride >= 0, f"{field}.vert_stride", "is negative")
        if not self.is_on:
            return
        _require(self.local_blocks >= 1, f"{field}.local_blocks", "is less than 1")
        _require(self.block_size >= 1, f"{field}.block_size", "is less than 1")
        _require(self.block_size % block_size == 0, f"{field}.block_size", "is not a multiple of the pool's block size")
        _require(self.tp_rank >= 0, f"{field}.tp_rank", "is negative")


@dataclass(frozen=True)
class AttentionOptions:
    """`scale` is the factor of the scores; None means 1/sqrt(head_size). `sliding_window` is the number of latest
    positions that a token attends to, including its own; 0 means all. `logits_soft_cap` turns a score into
    cap * tanh(score / cap); 0 means off. `alibi_slopes` float32 `[num_heads]`. `block_sparse` None means dense."""

    scale: float | None = None
    sliding_window: int = 0
    logits_soft_cap: float = 0.0
    alibi_slopes: npt.NDArray[np.float32] | None = None
    block_sparse: BlockSparse | None = None

    def check(self, num_heads: int, block_size: int) -> None:
        """Check the values for `num_heads` query heads and a pool with blocks of `block_size` tokens.
        Raises InvalidArgumentError naming an option."""
        _require(self.scale is None or _is_float32(self.scale), "options.scale", "is not finite")
        _require(self.sliding_window >= 0, "options.sliding_window", "is negative")
        _require(self.sliding_window < 1 << 31, "options.sliding_window", "is not less than 2^31")
        _require(_is_float32(self.logits_soft_cap), "options.logits_soft_cap", "is not finite")
        _require(self.logits_soft_cap >= 0, "options.logits_soft_cap", "is negative")
        if self.alibi_slopes is not None:
            slopes = self.alibi_slopes
            _require(len(slopes) == num_heads, "options.alibi_slopes", f"are {len(slopes)} for {num_heads} heads")
            _require(bool(np.isfinite(slopes).all()), "options.alibi_slopes", "are not all finite")
        if self.block_sparse is not None:
            self.block_sparse.check(block_size)


DEFAULT_OPTIONS = AttentionOptions()


def _is_float32(number: float) -> bool:
    """Return whether the number is finite as a float32. NaN is not."""
    return abs(number) <= FLOAT32_MAX


def _require(condition: bool, field: str, text: str) -> None:
    if not condition:
        raise InvalidArgumentError(text, field=field)
