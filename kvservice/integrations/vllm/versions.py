"""All differences between the versions of vLLM, each with the version that brought it. What can be looked for is looked
for: builds from source may have other numbers.

| since | what | here |
|---|---|---|
| 0.24 | `has_pending_push_work`: an idle engine goes on until blocks are given back | the oldest version |
| 0.27 | `requires_kv_delivery` | not read before |
| 0.29 | `start_load_kv` comes before the computation only if the step itself loads | works with both |
| 0.29 | `DEFAULT_NONE_HASH_SEED`: without PYTHONHASHSEED the hashes of blocks have a fixed seed | `has_fixed_seed` |
| 0.30 | `has_pending_block_frees`: vLLM waits a step for held blocks instead of preempting | not called before |
| 0.30 | `bind_kv_cache_manager`, which calls `bind_gpu_block_pool` | works with both |
| 0.31 | hashes have the paths of adapters, before only their names | `hashes_have_paths` |
| 0.31 | with several groups of K/V caches, failed loads are reported by request | `groups_of_caches` |
| 0.31 | `kv_tp_replicas`: how many ranks of tensor parallelism have the same bytes | `num_replicas` |
| 0.32 | `CacheHitSource` | `cache_hit_source` |
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core import kv_cache_utils

logger = logging.getLogger("vllm.kvservice")

# The oldest version that works, and the newest one with which the connector was tested.
OLDEST, NEWEST = (0, 24), (0, 33)


def warn_of_version(version: str) -> None:
    """Warn once if vLLM is older or newer than those that are known to work."""
    found = re.match(r"(\d+)\.(\d+)", version)
    number = (int(found[1]), int(found[2])) if found else NEWEST
    if number > NEWEST:
        logger.warning("kvservice was tested with vLLM up to %d.%d, this is %s", *NEWEST, version)
    elif (0, 1) < number < OLDEST:  # below that are builds from source without a tag
        logger.warning("kvservice needs vLLM %d.%d or later, this is %s", *OLDEST, version)


def frees_at_once(transfer_config: Any) -> Callable[[], None]:
    """Let vLLM's scheduler, which is being made, give the blocks of ended and preempted requests back at once. It asks
    for the connector's role when it has made the connector; call what this returns afterwards.

    If vLLM schedules ahead and a connector loads, it keeps them until the step that runs has ended, because a load
    might be overwritten by that step. The loads of this connector begin after the computations that are queued. With a
    full pool the delay costs a twentieth of the steps; before 0.31, vLLM preempts one request after another meanwhile.
    """
    role = transfer_config.kv_role
    transfer_config.kv_role = "kv_producer"

    def restore() -> None:
        transfer_config.kv_role = role

    return restore


def schedules_ahead(vllm_config: Any) -> bool:
    """Whether vLLM schedules a step before it knows how the one before has ended. Then no version computes again what
    a step has computed with blocks that it had loaded wrongly: tokens of the next step would be wrong."""
    return bool(vllm_config.scheduler_config.async_scheduling) or vllm_config.parallel_config.pipeline_parallel_size > 1


def has_fixed_seed() -> bool:
    """Whether the hashes of blocks are the same in all processes."""
    return "PYTHONHASHSEED" in os.environ or hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")


def hashes_have_paths() -> bool:
    """Whether the hashes of blocks have the path of an adapter, and not its name alone."""
    extra_keys = getattr(kv_cache_utils, "_gen_lora_extra_hash_keys", None)
    one, other = (SimpleNamespace(lora_request=SimpleNamespace(lora_name="", lora_path=path)) for path in "ab")
    return extra_keys is None or bool(extra_keys(one) != extra_keys(other))


def cache_hit_source() -> Any:
    """Return how vLLM counts the tokens that the connector finds; None before 0.32."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.HOST


def groups_of_caches() -> tuple[type, ...]:
    """Return the bases of a connector that serves models with several groups of K/V caches; none before 0.31, where
    such a vLLM ends when a load fails. vLLM then makes one group of all layers that it can."""
    return (base.SupportsHMA,) if hasattr(base, "KVConnectorTransferResults") else ()


def num_replicas(kv_cache_config: Any) -> int:
    """Return how many ranks of tensor parallelism, one after the other, have the same bytes in all blocks, as with MLA.
    Before 0.31 each rank keeps its own."""
    return int(getattr(kv_cache_config, "kv_tp_replicas", 1))


def name_of_block(block_hash: Any, group: int) -> Any:
    """Return the hash of a cached block in vLLM's pool, which has the number of its group."""
    return kv_cache_utils.make_block_hash_with_group_id(block_hash, group)


def tells_events(vllm_config: Any) -> bool:
    """Whether vLLM publishes events of its K/V cache."""
    events = getattr(vllm_config, "kv_events_config", None)
    return events is not None and bool(events.enable_kv_cache_events)


def cache_events(gone: Sequence[bytes], come: Sequence[bytes], block_size: int) -> list[Any]:
    """Return vLLM's events of blocks in host memory that have gone and come, by their hashes."""
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    def names(hashes: Sequence[bytes]) -> list[Any]:
        return [kv_cache_utils.maybe_convert_block_hash(each) for each in hashes]

    events: list[Any] = []
    if gone:
        events.append(BlockRemoved(block_hashes=names(gone), medium="CPU"))
    if come:
        # vLLM's own connectors report blocks whose tokens they do not know in the same way.
        unknown: dict[str, Any] = {"parent_block_hash": None, "token_ids": [], "lora_id": None, "lora_name": None}
        events.append(BlockStored(block_hashes=names(come), block_size=block_size, medium="CPU", **unknown))
    return events


def is_batch_invariant() -> bool:
    """Whether the kernels are those of batch-invariant mode, whose K/V differ from others in their last bits."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")


def before_reset(pool: Any, callback: Callable[[], None]) -> None:
    """Call this before vLLM forgets its prefix cache, which fails while blocks are in use. No version tells a connector
    in time: `reset_cache` comes after it, and only if the caller asks for it."""
    reset = pool.reset_prefix_cache

    def reset_prefix_cache() -> bool:
        callback()
        return bool(reset())

    pool.reset_prefix_cache = reset_prefix_cache
