"""The namespace of SGLang's pages: everything on which their bytes depend besides the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvservice.client import StoreNamespace
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.common.identity import digest, files_identity, short
from kvservice.integrations.sglang.pages import HostPages

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
