"""The largest requests of the block store."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Final

import numpy as np

from kvservice.bench.sending import Sender
from kvservice.client import regions
from kvservice.v1 import store_pb2

# The length of the texts of a namespace.
TEXT_CHARACTERS: Final = 256
BLOCK_BYTES: Final = 64
KEY_BYTES: Final = 32
MAX_LEASE_IDS: Final = 4096


def store_requests(sender: Sender) -> Callable[[], Awaitable[None]]:
    """Requests with the largest number of keys, all found or all missing."""
    count = sender.info.max_request_blocks
    blocks = f"{count} blocks"
    random = np.random.default_rng(1)
    here, missing = random.bytes(count * KEY_BYTES), random.bytes(count * KEY_BYTES)
    data = random.bytes(count * BLOCK_BYTES)
    every_second = b"\x55" * -(-count // 8)
    text = "x" * TEXT_CHARACTERS
    identity = store_pb2.StoreNamespace(
        model=text, weights=text, dtype=text, layout=text, key_algorithm=text, block_bytes=BLOCK_BYTES
    )
    opening = store_pb2.OpenNamespaceRequest(namespace=identity)

    async def use(namespace: int) -> None:
        put = store_pb2.BatchPutRequest(namespace_id=namespace, keys=here, data=data)
        await sender.send("StoreBatchPut", blocks, put)
        await sender.send("StoreLookup", blocks, store_pb2.LookupRequest(namespace_id=namespace, keys=here))
        await sender.send("StoreTouch", blocks, store_pb2.TouchRequest(namespace_id=namespace, keys=here))
        await sender.send("StoreBatchGet", blocks, store_pb2.BatchGetRequest(namespace_id=namespace, keys=here))
        acquire = store_pb2.AcquireRequest(namespace_id=namespace, keys=here)
        leased = store_pb2.AcquireResponse.FromString(await sender.send("StoreAcquire", blocks, acquire))
        await sender.send("StoreRenew", "", store_pb2.RenewRequest(lease_id=leased.lease_id, ttl_s=1.0))
        unknown = range(1 << 40, (1 << 40) + MAX_LEASE_IDS - 1)
        release = store_pb2.ReleaseRequest(lease_ids=[leased.lease_id, *unknown])
        await sender.send("StoreRelease", f"{blocks}, {MAX_LEASE_IDS} leases", release)

    async def write(namespace: int) -> None:
        mapping = store_pb2.MapStoreRequest(writable=True)
        mapped = store_pb2.MapStoreResponse.FromString(await sender.send("StoreMapStore", "writable", mapping))
        path = regions.socket_path(sender.address)
        assert path is not None, "the daemon has a unix socket"
        for descriptor in await asyncio.to_thread(regions.fetch, path, mapped.handover_token, 1):
            os.close(descriptor)
        reserve = store_pb2.ReserveRequest(namespace_id=namespace, keys=missing)

        async def reservation() -> int:
            response = await sender.send("StoreReserve", blocks, reserve)
            return store_pb2.ReserveResponse.FromString(response).reservation_id

        await sender.send("StoreAbort", blocks, store_pb2.AbortRequest(reservation_id=await reservation()))
        commit = store_pb2.StoreCommitRequest(reservation_id=await reservation(), written=every_second)
        await sender.send("StoreCommit", f"every second of {blocks}", commit)
        commit = store_pb2.StoreCommitRequest(reservation_id=await reservation(), checksums=bytes(count // 2 * 8))
        await sender.send("StoreCommit", f"{count // 2} blocks, checksums", commit)

    async def cycle() -> None:
        opened = await sender.send("StoreOpenNamespace", "texts", opening)
        namespace = store_pb2.OpenNamespaceResponse.FromString(opened).namespace_id
        await use(namespace)
        await write(namespace)
        await sender.send("StoreRemove", blocks, store_pb2.RemoveRequest(namespace_id=namespace, keys=here))
        await sender.send("StoreClear", blocks, store_pb2.ClearRequest(namespace_id=namespace))

    return cycle
