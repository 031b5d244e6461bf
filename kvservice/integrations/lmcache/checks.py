"""Checks at the start of the connector, and the namespace of LMCache's chunks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvservice.client import StoreNamespace
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.common import MAX_TEXT, ConnectorOptions, digest, files_identity, short

PLUGIN = "kvservice"
# Options that LMCache reads itself.
_LOADING = ("module_path", "class_name")


def plugin_options(plugin_name: str, extra_config: Mapping[str, Any] | None) -> ConnectorOptions:
    """Return the options `remote_storage_plugin.<plugin_name>.<option>`. Raises InvalidArgumentError naming one."""
    prefix = f"remote_storage_plugin.{plugin_name}."
    given = {
        name.removeprefix(prefix): value for name, value in (extra_config or {}).items() if name.startswith(prefix)
    }
    return ConnectorOptions.of({name: value for name, value in given.items() if name not in _LOADING})


def check_supported(config: Any) -> None:
    """Raises InvalidArgumentError with the remedy for a configuration whose values are not full chunks."""
    if config.use_layerwise:
        raise InvalidArgumentError("chunks of single layers are not supported", field="use_layerwise")
    if config.enable_blending:
        raise InvalidArgumentError("blended chunks are not supported", field="enable_blending")
    if config.remote_serde not in (None, "naive"):
        raise InvalidArgumentError(
            f'{config.remote_serde!r} makes values of different sizes; set it to "naive"', field="remote_serde"
        )


def chunk_namespace(
    config: Any, metadata: Any, options: ConnectorOptions, layout: str, num_bytes: int
) -> StoreNamespace:
    """`layout`: LMCache's version, and shapes, dtypes and format of a full chunk of `num_bytes`. Workers with MLA have
    the same bytes and share a namespace: LMCache's keys say which of them has stored a chunk."""
    return StoreNamespace(
        model=short(metadata.model_name),
        weights=_weights(metadata, options.weights),
        dtype=str(metadata.kv_dtype),
        layout=short(f"{layout}, K/V {list(metadata.kv_shape)}, MLA {metadata.use_mla}"),
        block_bytes=num_bytes,
        tp_rank=0 if metadata.use_mla else metadata.worker_id,
        tp_size=1 if metadata.use_mla else metadata.world_size,
        key_algorithm=f"lmcache {config.pre_caching_hash_algorithm}"[:MAX_TEXT],
    )


def _weights(metadata: Any, given: str) -> str:
    """LMCache tells connectors the model's name, not which weights it has."""
    path = Path(metadata.model_name)
    if not given and not path.is_dir():
        raise InvalidArgumentError(
            f"{metadata.model_name} is not a directory; set the option to a text that changes with the weights",
            field="weights",
        )
    if not given and str(metadata.kv_dtype) == "torch.uint8":
        raise InvalidArgumentError(
            "K/V of 8 bits may have several meanings; set the option to a text that changes with them and the weights",
            field="weights",
        )
    return digest(given, files_identity(path) if path.is_dir() else "")
