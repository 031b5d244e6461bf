"""The class that SGLang loads."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
)
from sglang.srt.runtime_context import get_server_args

from kvservice.errors import InvalidArgumentError
from kvservice.integrations.common import ConnectorOptions, EngineBlocks, hexadecimal_key
from kvservice.integrations.sglang.pages import HostPages, page_namespace, weights_identity

logger = logging.getLogger("sglang.kvservice")


@dataclasses.dataclass(frozen=True)
class SGLangOptions(ConnectorOptions):
    """`kvservice` of the extra config."""

    LIMITS: ClassVar[dict[str, tuple[float, float]]] = ConnectorOptions.LIMITS | {"switch_interval_s": (-1, 1)}

    switch_interval_s: float = 0.0005
    """How long SGLang's scheduler keeps Python's interpreter lock when other threads wait for it; 0: as Python has it,
    5 ms. The scheduler computes without a pause, and each request that is looked up and loaded passes from thread to
    thread several times."""


class KVServiceStorage(HiCacheStorage):  # type: ignore[misc]
    """See the package. SGLang calls the batches on threads of its own and takes a miss for every page that is not
    there, so a daemon that is away costs no more than the pages."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:  # noqa: ARG002
        """Raises InvalidArgumentError for a configuration whose pages would be wrong or never found."""
        extra = storage_config.extra_config or {}
        if not extra.get("interface_v1"):
            raise InvalidArgumentError('set "interface_v1": 1 in the extra config', field="interface_v1")
        self._options = SGLangOptions.of(extra.get("kvservice") or {})
        self._config = storage_config
        self._pages: HostPages | None = None
        self._blocks: EngineBlocks | None = None
        if self._options.switch_interval_s:
            sys.setswitchinterval(min(self._options.switch_interval_s, sys.getswitchinterval()))

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the namespace of the pool's pages."""
        super().register_mem_pool_host(mem_pool_host)
        self.close()
        self._pages = HostPages(mem_pool_host)
        weights = weights_identity(_server_args(), self._options.weights)
        namespace = page_namespace(self._config, self._pages, weights, mem_pool_host.dtype, sglang.__version__)
        self._blocks = EngineBlocks(self._options, namespace, "sglang", self._pages.page_size)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: PoolName) -> None:
        """Raises InvalidArgumentError for pools beside the one of K/V, which hybrid models and drafts have."""
        if host_pool_name != PoolName.KV:
            raise InvalidArgumentError(f"the pool {host_pool_name} is not supported", field="host_pool_name")
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:  # noqa: ARG002
        """Return how many pages before the first missing one are there."""
        return 0 if self._blocks is None else self._blocks.num_leading(_keys(keys))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002
    ) -> list[bool]:
        """Copy pages into the host pool. Returns which are right."""
        if self._blocks is None or self._pages is None or not keys:
            return [False] * len(keys)
        addresses = self._pages.addresses(len(keys), host_indices)
        found: list[bool] = self._blocks.load(_keys(keys), addresses, self._pages.piece_bytes).tolist()
        return found

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002
    ) -> list[bool]:
        """Copy pages out of the host pool. Returns which are stored."""
        if self._blocks is None or self._pages is None or not keys:
            return [False] * len(keys)
        addresses = self._pages.addresses(len(keys), host_indices)
        stored: list[bool] = self._blocks.save(_keys(keys), addresses, self._pages.piece_bytes).tolist()
        return stored

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:  # noqa: ARG002
        """Nothing is found: SGLang uses this method without `interface_v1` only, which is refused."""
        return

    def batch_get(
        self,
        keys: list[str],
        target_locations: Any = None,  # noqa: ARG002
        target_sizes: Any = None,  # noqa: ARG002
    ) -> list[torch.Tensor | None]:
        """See `get`."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:  # noqa: ARG002
        """Nothing is stored, see `get`."""
        return False

    def batch_set(
        self,
        keys: list[str],  # noqa: ARG002
        values: Any = None,  # noqa: ARG002
        target_locations: Any = None,  # noqa: ARG002
        target_sizes: Any = None,  # noqa: ARG002
    ) -> bool:
        """See `set`."""
        return False

    def clear(self) -> bool:
        """Remove all pages of the namespace, for every engine. Returns whether the daemon has done so."""
        return self._blocks is not None and self._blocks.clear()

    def close(self) -> None:
        if self._blocks is not None:
            self._blocks.close()
            self._blocks = None


def _keys(keys: Sequence[str]) -> list[bytes]:
    return [hexadecimal_key("sglang", key) for key in keys]


def _server_args() -> Any:
    """Return the arguments of the server, None outside of one."""
    try:
        return get_server_args()
    except ValueError:
        return None
