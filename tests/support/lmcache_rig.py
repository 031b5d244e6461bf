"""LMCache's storage manager with the plugin, without an engine. Imports LMCache."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.storage_manager import StorageManager

CHUNK_SIZE = 16
NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 2, 8
BACKEND = "RemoteBackend-kvservice"
PREFIX = "remote_storage_plugin.kvservice."


class Cache:
    """A storage manager whose only store of chunks is the plugin."""

    def __init__(self, manager: StorageManager) -> None:
        self.manager = manager
        self.metadata = manager.metadata
        self.remote = manager.storage_backends[BACKEND]

    @property
    def connector(self) -> Any:
        return self.remote.connection.getWrappedConnector()

    def key(self, number: int, **tags: str) -> CacheEngineKey:
        configs = {f"lmcache.tag.{name}": value for name, value in tags.items()}
        metadata = self.metadata
        return CacheEngineKey(
            metadata.model_name, metadata.world_size, metadata.worker_id, number, metadata.kv_dtype, configs or None
        )

    def chunk(self, num_tokens: int = CHUNK_SIZE) -> MemoryObj:
        """Return a chunk with random contents."""
        chunk = self.manager.allocate(
            self.metadata.get_shapes(num_tokens), self.metadata.get_dtypes(), self.connector.meta_fmt
        )
        chunk.tensor.copy_(torch.randn(chunk.tensor.shape))
        return chunk

    def put(self, keys: list[CacheEngineKey], chunks: list[MemoryObj]) -> list[torch.Tensor]:
        """Store chunks and wait until that is done. Returns their contents."""
        contents = [chunk.tensor.clone() for chunk in chunks]
        done: list[CacheEngineKey] = []
        self.remote.batched_submit_put_task(keys, chunks, on_complete_callback=done.append)
        with contextlib.suppress(TimeoutError):
            self.run(_until(lambda: len(done) == len(keys)))
        assert len(done) == len(keys)
        return contents

    def get(self, keys: list[CacheEngineKey]) -> list[torch.Tensor]:
        """Return the contents of the chunks that the store has."""
        chunks = [chunk for chunk in self.remote.batched_get_blocking(keys) if chunk is not None]
        contents = [chunk.tensor.clone() for chunk in chunks]
        for chunk in chunks:
            chunk.ref_count_down()
        return contents

    def run(self, work: Any) -> Any:
        """Run a coroutine on the loop of the storage manager."""
        return asyncio.run_coroutine_threadsafe(work, self.manager.loop).result(60)


async def _until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@contextlib.contextmanager
def cache(
    address: str,
    *,
    model: str = "model",
    weights: str = "some",
    dtype: torch.dtype = torch.bfloat16,
    chunk_size: int = CHUNK_SIZE,
    worker: tuple[int, int] = (0, 1),
    heads: int = NUM_HEADS,
    mla: bool = False,
    **config: Any,
) -> Iterator[Cache]:
    options = {
        "module_path": "kvservice.integrations.lmcache",
        "class_name": "KVServiceAdapter",
        "address": address,
        "weights": weights,
    }
    made = LMCacheEngineConfig.from_defaults(
        chunk_size=chunk_size,
        local_cpu=False,
        max_local_cpu_size=0.01,
        remote_storage_plugins=["kvservice"],
        extra_config={PREFIX + name: value for name, value in options.items()},
        **config,
    )
    kv_shape = (NUM_LAYERS, 1, chunk_size, 1, HEAD_DIM) if mla else (NUM_LAYERS, 2, chunk_size, heads, HEAD_DIM)
    metadata = LMCacheMetadata(
        model_name=model,
        world_size=worker[1],
        local_world_size=worker[1],
        worker_id=worker[0],
        local_worker_id=worker[0],
        kv_dtype=dtype,
        kv_shape=kv_shape,
        use_mla=mla,
        chunk_size=chunk_size,
    )
    manager = StorageManager(made, metadata, EventManager())
    try:
        yield Cache(manager)
    finally:
        manager.close()
        manager.thread.join()
        manager.loop.close()
