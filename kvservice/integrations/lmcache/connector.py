"""The connector that LMCache loads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import lmcache
import numpy as np
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext, extract_plugin_type
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kvservice.client.store.values import num_leading
from kvservice.integrations.common import Addresses, EngineBlocks, digest_key
from kvservice.integrations.lmcache.checks import PLUGIN, check_supported, chunk_namespace, plugin_options

logger = logging.getLogger("lmcache.kvservice")

T = TypeVar("T")
Keys: TypeAlias = list[CacheEngineKey]
Chunks: TypeAlias = list[MemoryObj]
# Threads that look up, load and save chunks.
NUM_THREADS = 4


class KVServiceAdapter(ConnectorAdapter):  # type: ignore[misc]
    """Makes the connector of the plugin `kvservice`, or of its instance `kvservice.<name>`."""

    def __init__(self) -> None:
        super().__init__(f"plugin://{PLUGIN}")

    def can_parse(self, url: str) -> bool:
        return url.startswith("plugin://") and extract_plugin_type(url.removeprefix("plugin://")) == PLUGIN

    def create_connector(self, context: ConnectorContext) -> RemoteConnector:
        """Raises InvalidArgumentError for a configuration whose chunks would be wrong or never found."""
        return ChunkConnector(context)


class ChunkConnector(RemoteConnector):  # type: ignore[misc]
    """See the package. LMCache may cancel a call at any time: memory that is being copied is then kept until the copy
    has ended."""

    def __init__(self, context: ConnectorContext) -> None:
        config, metadata = context.config, context.metadata
        assert config is not None
        assert metadata is not None
        options = plugin_options(context.plugin_name or PLUGIN, config.extra_config)
        check_supported(config)
        super().__init__(config, metadata)
        self._memory = context.local_cpu_backend
        self._piece_bytes = (self.full_chunk_size_bytes,)
        shapes = [list(shape) for shape in self.meta_shapes]
        layout = f"LMCache {lmcache.__version__}, {shapes} {self.meta_dtypes} {self.meta_fmt.name}"
        namespace = chunk_namespace(config, metadata, options, layout, self.full_chunk_size_bytes)
        self._blocks = EngineBlocks(options, namespace, "lmcache", metadata.chunk_size)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kvservice-lmcache")
        if config.save_unfull_chunk:
            logger.warning("only full chunks of %d tokens are stored", metadata.chunk_size)

    async def exists(self, key: CacheEngineKey) -> bool:
        return await self.batched_async_contains("", [key]) == 1

    def exists_sync(self, key: CacheEngineKey) -> bool:
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Keys) -> int:
        return self._blocks.num_leading([_store_key(key) for key in keys])

    async def batched_async_contains(self, lookup_id: str, keys: Keys, pin: bool = False) -> int:  # noqa: ARG002
        return await asyncio.wrap_future(self._threads.submit(self.batched_contains, keys))

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: Keys) -> Sequence[MemoryObj | None]:
        """Return the chunks before the first that is missing or has no room in LMCache's memory, None for the rest."""
        loading = self._threads.submit(self._load, keys)
        chunks = await _uncancelled(loading, _release)
        return [*chunks, *[None] * (len(keys) - len(chunks))]

    async def batched_get_non_blocking(self, lookup_id: str, keys: Keys) -> Chunks:  # noqa: ARG002
        return [chunk for chunk in await self.batched_get(keys) if chunk is not None]

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: Keys, memory_objs: Chunks) -> None:
        """Store the full chunks. What is not stored is a miss later."""
        full = [(key, chunk) for key, chunk in zip(keys, memory_objs, strict=True) if self._is_full(chunk)]
        if not full:
            return
        for _, chunk in full:
            chunk.ref_count_up()
        saving = self._threads.submit(self._save, *zip(*full, strict=True))
        await _uncancelled(saving, lambda _: None)

    def remove_sync(self, key: CacheEngineKey) -> bool:
        return self._blocks.remove([_store_key(key)]) == 1

    async def list(self) -> Sequence[str]:
        raise NotImplementedError("the store has digests of keys, not the keys")

    async def close(self) -> None:
        """Wait for calls in progress, and close the store."""
        await asyncio.to_thread(self._threads.shutdown)
        await asyncio.to_thread(self._blocks.close)

    def _is_full(self, chunk: MemoryObj) -> bool:
        full: bool = (
            chunk.get_size() == self.full_chunk_size_bytes
            and chunk.get_memory_format() == self.meta_fmt
            and chunk.raw_data.device.type == "cpu"
            and chunk.get_shapes() == self.meta_shapes
            and chunk.get_dtypes() == self.meta_dtypes
        )
        return full

    def _load(self, keys: Sequence[CacheEngineKey]) -> Chunks:
        """Return the chunks before the first missing one. The caller owns them."""
        chunks: Chunks = []
        try:
            # LMCache has looked them up for the request.
            wanted = keys[: self._blocks.num_leading([_store_key(key) for key in keys], counted=False)]
            for _ in wanted:
                chunk = self._memory.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt, busy_loop=False)
                if chunk is None:
                    break
                chunks.append(chunk)
            num_right = self._fill(wanted[: len(chunks)], chunks)
        except BaseException:
            _release(chunks)
            raise
        _release(chunks[num_right:])
        return chunks[:num_right]

    def _fill(self, keys: Sequence[CacheEngineKey], chunks: Sequence[MemoryObj]) -> int:
        """Return how many leading chunks are right."""
        if not chunks:
            return 0
        return num_leading(self._blocks.load([_store_key(key) for key in keys], _addresses(chunks), self._piece_bytes))

    def _save(self, keys: Sequence[CacheEngineKey], chunks: Sequence[MemoryObj]) -> None:
        try:
            self._blocks.save([_store_key(key) for key in keys], _addresses(chunks), self._piece_bytes)
        finally:
            _release(chunks)


async def _uncancelled(work: Future[T], discard: Callable[[T], None]) -> T:
    """Await work on a thread. If the caller is cancelled, the work still ends, and `discard` takes its result."""
    try:
        return await asyncio.shield(asyncio.wrap_future(work))
    except asyncio.CancelledError:
        work.add_done_callback(lambda done: None if done.exception() else discard(done.result()))
        raise


def _store_key(key: CacheEngineKey) -> bytes:
    """The namespace has the model. With MLA it does not have the worker, so the key does."""
    tags = [part for tag in key.tags or () for part in tag]
    return digest_key("lmcache", type(key).__name__, key.world_size, key.worker_id, key.chunk_hash_hex, *tags)


def _addresses(chunks: Sequence[MemoryObj]) -> Addresses:
    return np.array([[chunk.raw_data.data_ptr()] for chunk in chunks], np.int64)


def _release(chunks: Sequence[Any]) -> None:
    for chunk in chunks:
        chunk.ref_count_down()
