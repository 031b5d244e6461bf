"""What follows from vLLM's settings: the options of the connector, what it refuses at the start, and which blocks are
kept apart.

Settings with which blocks would be wrong or never found are refused. The bytes of a block depend on a model and its
weights, which keep K/V of different models in different namespaces of the store, and on adapters (LoRA), which are part
of the keys.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvservice.client import StoreNamespace
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.common import MAX_TEXT, ConnectorOptions, digest, files_identity, short
from kvservice.integrations.vllm.copies import BlockLayout

logger = logging.getLogger(__name__)

# Settings of a multimodal model that change embeddings and are not in vLLM's hashes of inputs.
MULTIMODAL_SETTINGS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_hasher_algorithm",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "video_pruning_rate",
    "video_pruning_method",
)
# Algorithms of vLLM whose hashes have 32 bytes.
KEY_ALGORITHMS = ("sha256", "sha256_cbor")


@dataclass(frozen=True)
class VLLMOptions(ConnectorOptions):
    """`kv_connector_extra_config`."""

    LIMITS: ClassVar[dict[str, tuple[float, float]]] = ConnectorOptions.LIMITS | {
        "max_step_load_mib": (-1, 1 << 20),
        "max_beside_load_mib": (-1, 1 << 20),
        "max_held_percent": (0, 50),
    }

    lookup_timeout_s: float = 0.25
    """How long in seconds a step of the scheduler waits for a look-up. What is late is a miss, and the daemon is not
    asked again before it answers in time. When all look-ups of a step have taken as long, others wait for the next."""
    max_step_load_mib: float = 512.0
    """The most MiB of K/V that a step loads in itself. Larger loads are asynchronous. 0: all are."""
    max_beside_load_mib: float = 32.0
    """The same for a step that also computes for other requests, which would wait for the load."""
    max_held_percent: float = 10.0
    """The most blocks of vLLM's pool that no request uses any more and that wait to be saved, in percent. While it is
    reached, nothing more is saved."""
    save_decode: bool = False
    """Save the blocks of generated tokens, too."""


def check_supported(vllm_config: Any, *, fixed_seed: bool) -> None:
    """`fixed_seed`: the hashes of blocks do not depend on the process. Raises InvalidArgumentError with the remedy."""
    _check_keys(vllm_config.cache_config, fixed_seed)
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise InvalidArgumentError("context parallelism is not supported", field=name)
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise InvalidArgumentError(
            "scales computed from the first batch differ between processes; use a checkpoint that contains them",
            field="calculate_kv_scales",
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in ("ngram", "ngram_gpu", "suffix"):
        raise InvalidArgumentError(
            f"speculation by {speculative.method!r} has K/V of its own, which is not supported",
            field="speculative_config",
        )


def _check_keys(cache_config: Any, fixed_seed: bool) -> None:
    if not cache_config.enable_prefix_caching:
        raise InvalidArgumentError(
            "prefix caching is off; vLLM also turns it off for models whose blocks depend on later tokens",
            field="enable_prefix_caching",
        )
    unit = getattr(cache_config, "prefix_match_unit", None)
    if unit not in (None, cache_config.block_size):
        raise InvalidArgumentError(
            f"hashes of {unit} tokens, with blocks of {cache_config.block_size}, are not supported",
            field="prefix_match_unit",
        )
    algorithm = cache_config.prefix_caching_hash_algo
    if algorithm not in KEY_ALGORITHMS:
        raise InvalidArgumentError(
            f"the hashes of {algorithm!r} do not have 32 bytes; set --prefix-caching-hash-algo sha256_cbor",
            field="prefix_caching_hash_algo",
        )
    if not fixed_seed:
        raise InvalidArgumentError(
            "this vLLM seeds its block hashes at random, so no other process would find the blocks; "
            "set PYTHONHASHSEED to the same number for all of them",
            field="PYTHONHASHSEED",
        )


def worker_namespace(
    vllm_config: Any,
    layout: BlockLayout,
    *,
    engine: str,
    layers: Sequence[str],
    groups: str,
    weights: str,
    replicas: int,
    tensor_parallel: Any,
    pipeline_parallel: Any,
) -> StoreNamespace:
    """Return where a worker keeps its blocks. `engine`: everything outside of the configuration that decides how bytes
    are ordered; `layers`: the names of the worker's layers; `groups`: which of them share blocks, "" if all do;
    `weights`: their identity, "" to find it; `replicas`: how many ranks, one after the other, have the same blocks,
    which are those of the first; the groups of ranks are vLLM's. Raises InvalidArgumentError as `weights_identity`
    does."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return StoreNamespace(
        model=short(model.model),
        weights=short(weights or weights_identity(model, vllm_config.load_config)),
        dtype=f"{model.dtype} {cache.cache_dtype}",
        layout=short(
            f"{engine}, {cache.block_size} tokens, layers {digest(*layers, *[groups] * bool(groups))[:16]}: "
            f"{layout.description}",
        ),
        block_bytes=layout.block_bytes,
        tp_rank=tensor_parallel.rank_in_group // replicas * replicas,
        tp_size=tensor_parallel.world_size,
        pp_rank=pipeline_parallel.rank_in_group,
        pp_size=pipeline_parallel.world_size,
        key_algorithm=key_algorithm(cache.prefix_caching_hash_algo),
    )


def weights_identity(model_config: Any, load_config: Any) -> str:
    """Return a text that differs if weights or anything that changes their meaning differ: revision, configuration,
    quantization. Raises InvalidArgumentError if the source of the weights has no identity."""
    path = Path(model_config.model)
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    if path.is_dir():
        source = files_identity(path)
    elif commit or model_config.revision:
        source = str(commit or model_config.revision)
    else:
        raise InvalidArgumentError(
            f'{model_config.model} is neither a directory nor has it a known revision; set "weights" in '
            "kv_connector_extra_config to a text that changes with the weights",
            field="weights",
        )
    configuration = model_config.hf_config.to_json_string(use_diff=False)
    # Dummy weights are random numbers.
    seed = model_config.seed if load_config.load_format == "dummy" else ""
    # vLLM chooses the factors of longrope by the longest request that it allows.
    length = model_config.max_model_len if "longrope" in configuration else ""
    parts = (
        source,
        configuration,
        str(model_config.quantization),
        str(load_config.load_format),
        str(seed),
        str(length),
        *(repr(getattr(model_config.multimodal_config, name, None)) for name in MULTIMODAL_SETTINGS),
    )
    return digest(*parts)


def key_algorithm(algorithm: str) -> str:
    """Return the algorithm and seed of vLLM's block hashes."""
    return f"{algorithm} seed {os.environ.get('PYTHONHASHSEED', 'default')}"[:MAX_TEXT]


class AdapterIdentities:
    """The identities of the adapters of the requests that run. vLLM's hashes know adapters by name and path only. The
    files are looked at when a request begins.

    vLLM reads the files whenever it likes. So an adapter whose files have changed since its first request here has no
    identity: nobody knows which weights vLLM has in memory."""

    def __init__(self, *, by_name: bool = False) -> None:
        """`by_name`: vLLM's hashes do not even know the paths, so that it mixes adapters with the same name up."""
        self._by_name = by_name
        self._first: dict[str, bytes | None] = {}
        self._of_request: dict[str, bytes | None] = {}
        # The paths of each name. Blocks of a name with several are not shared.
        self._paths: dict[str, set[str]] = {}

    def of(self, request: Any) -> bytes | None:
        """Return what distinguishes the weights of a request's adapter, b"" without one; None: its blocks can not be
        shared."""
        adapter = getattr(request, "lora_request", None)
        if adapter is None:
            return b""
        if self._by_name:
            paths = self._paths.setdefault(adapter.lora_name, set())
            if adapter.lora_path not in paths and paths:
                logger.warning(
                    "adapters in several places are called %s: their blocks are not shared", adapter.lora_name
                )
            paths.add(adapter.lora_path)
            if len(paths) > 1:
                return None
        if request.request_id not in self._of_request:
            self._of_request[request.request_id] = self._look(adapter.lora_path)
        return self._of_request[request.request_id]

    def forget(self, request_id: str) -> None:
        self._of_request.pop(request_id, None)

    def _look(self, path: str) -> bytes | None:
        identity = _files_of(Path(path))
        first = self._first.setdefault(path, identity)
        if first is not None and first != identity:
            logger.warning("the files in %s have changed: blocks of this adapter are not shared until a restart", path)
            self._first[path] = None
        return self._first[path]


def _files_of(directory: Path) -> bytes | None:
    try:
        return files_identity(directory).encode() if directory.is_dir() else None
    except OSError:
        return None
