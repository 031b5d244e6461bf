"""The pages of SGLang's host pool: where they lie, and how their bytes are ordered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvservice.errors import InvalidArgumentError
from kvservice.integrations.common.blocks import Addresses

# Attributes of pools that decide what the bytes of a page mean.
_SHAPE = (
    "layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "head_group_num",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "dsa_kv_cache_store_fp8",
    "storage_format_tag",
)


class HostPages:
    """The pages of one host pool of SGLang. `piece_bytes` are the sizes of the pieces in which each page lies: one for
    K and V of each layer, or of all layers, as the pool's layout has it."""

    def __init__(self, pool: Any) -> None:
        """Raises InvalidArgumentError for a pool whose pages are not in host memory, or of unknown extent."""
        if getattr(pool, "kv_buffer", None) is None:
            raise InvalidArgumentError(
                f"{type(pool).__name__} has no pages of its own in host memory", field="mem_pool_host"
            )
        self._pool = pool
        self.page_size = int(pool.page_size)
        _, sizes = pool.get_page_buffer_meta(torch.arange(self.page_size))
        self.piece_bytes = tuple(int(size) for size in sizes)
        self.page_bytes = sum(self.piece_bytes)
        if self.page_bytes != self.page_size * pool.get_size_per_token():
            raise InvalidArgumentError(
                f"the pieces of a page have {self.page_bytes} bytes, {self.page_size} tokens "
                f"{self.page_size * pool.get_size_per_token()}",
                field="mem_pool_host",
            )

    @property
    def description(self) -> str:
        """Everything about the pool on which the bytes of a page depend."""
        shape = ", ".join(f"{name}={getattr(self._pool, name)}" for name in _SHAPE if hasattr(self._pool, name))
        pieces = f"{len(self.piece_bytes)} pieces of {sorted(set(self.piece_bytes))} bytes"
        return f"{type(self._pool).__name__} {self._pool.layout}, {self.page_size} tokens in {pieces}, {shape}"

    def addresses(self, num_pages: int, host_indices: torch.Tensor) -> Addresses:
        """Return the addresses of the pieces `[num_pages, num_pieces]` of pages by the indices of their tokens.

        Raises InvalidArgumentError if the indices are not those of `num_pages` whole pages.
        """
        starts = host_indices.reshape(-1)[:: self.page_size]
        if host_indices.numel() != num_pages * self.page_size or (starts % self.page_size).any():
            raise InvalidArgumentError(
                f"{host_indices.numel()} indices are not {num_pages} pages of {self.page_size} tokens",
                field="host_indices",
            )
        addresses, sizes = self._pool.get_page_buffer_meta(host_indices)
        self._check(sizes, num_pages)
        return np.array(addresses, np.int64).reshape(num_pages, len(self.piece_bytes))

    def _check(self, sizes: Sequence[int], num_pages: int) -> None:
        if tuple(sizes) != self.piece_bytes * num_pages:
            raise InvalidArgumentError("the pieces of the pages have other sizes than at the start", field="host_pool")
