"""The pages of SGLang's host pool: where they lie, how their bytes are ordered, and the namespace that keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvservice.client import StoreNamespace
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.common import Addresses, digest, files_identity, short

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


# ---- the namespace of SGLang's pages: everything on which their bytes depend besides the tokens


# Arguments of the server that change K/V, or the order of their bytes, for the same files of weights.
_ARGUMENTS = (
    "dtype",
    "quantization",
    "quantization_param_path",
    "kv_cache_dtype",
    "load_format",
    "json_model_override_args",
    "context_length",
    "model_impl",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
)


def weights_identity(server_args: Any, given: str) -> str:
    """Return a text that differs if the weights differ, or what the server makes of them. `server_args`: SGLang's, None
    if unknown; `given`: the option. Raises InvalidArgumentError if the weights have no identity."""
    if given:
        source = given
    elif server_args is not None and (path := Path(server_args.model_path)).is_dir():
        source = files_identity(path)
    elif server_args is not None and server_args.revision:
        source = server_args.revision
    else:
        raise InvalidArgumentError(
            "the model is neither a directory nor has it a revision; set the option to a text that changes with the "
            "weights",
            field="weights",
        )
    arguments = [f"{name}={getattr(server_args, name, None)}" for name in _ARGUMENTS]
    # Dummy weights are random numbers.
    seed = server_args.random_seed if getattr(server_args, "load_format", None) == "dummy" else ""
    return digest(source, *arguments, str(seed))


def page_namespace(config: Any, pages: HostPages, weights: str, dtype: object, version: str) -> StoreNamespace:
    """`config`: SGLang's HiCacheStorageConfig. Ranks that have the same bytes share a namespace: the tensor-parallel
    ranks of a model with MLA, and data-parallel replicas."""
    shared = config.is_mla_model
    context = (
        f"context {config.attn_cp_rank}/{config.attn_cp_size} {getattr(config, 'dcp_rank', 0)}/"
        f"{getattr(config, 'dcp_size', 1)}"
    )
    return StoreNamespace(
        model=short(str(config.model_name)),
        weights=weights,
        dtype=str(dtype),
        layout=short(f"SGLang {version}, MLA {shared}, {context}: {pages.description}"),
        block_bytes=pages.page_bytes,
        tp_rank=0 if shared else config.tp_rank,
        tp_size=1 if shared else config.tp_size,
        pp_rank=config.pp_rank,
        pp_size=config.pp_size,
        key_algorithm="sglang sha256",
    )
