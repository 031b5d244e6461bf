"""The options of the connector, and checks at the start of vLLM: the connector refuses settings with which blocks would
be wrong or never found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvservice.errors import InvalidArgumentError
from kvservice.integrations.common import ConnectorOptions

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
