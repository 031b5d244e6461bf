"""The handlers of StoreService where there are tiers below the memory: they wait for these."""

from __future__ import annotations

import asyncio

import numpy as np

from kvservice.blocks import Slices
from kvservice.errors import FailedPreconditionError
from kvservice.server.loop import in_slices
from kvservice.store import BlockStore, SessionStore, StoredNamespace
from kvservice.tiers import TierChain
from kvservice.v1 import store_pb2


async def lookup_below(
    blocks: BlockStore, chain: TierChain, namespace: StoredNamespace, request: store_pb2.LookupRequest
) -> store_pb2.LookupResponse:
    counted = not request.uncounted
    num_in_memory, _ = blocks.lookup(namespace, request.keys, counted=False)
    flags = await chain.lookup(namespace, request.keys, max_wait_s=request.max_wait_s, counted=counted)
    found = np.packbits(flags, bitorder="little").tobytes()
    if counted:
        blocks.count_lookup(namespace, request.keys, found)
    num_leading = int(np.logical_and.accumulate(flags).sum())
    return store_pb2.LookupResponse(num_leading=num_leading, found=found, num_in_memory=num_in_memory)


async def acquire_below(
    chain: TierChain, own: SessionStore, namespace: StoredNamespace, request: store_pb2.AcquireRequest
) -> store_pb2.AcquireResponse:
    opening = own.opening
    async with chain.brought_up(
        namespace,
        request.keys,
        leading_only=request.leading_only,
        max_wait_s=request.max_wait_s,
        counted=not request.uncounted,
    ):
        if opening.ended:
            raise FailedPreconditionError("the session ended meanwhile")
        return acquire(own, namespace, request)


def acquire(
    own: SessionStore, namespace: StoredNamespace, request: store_pb2.AcquireRequest
) -> store_pb2.AcquireResponse:
    """Lease the blocks that are in memory."""
    lease_id, pinned = own.acquire(
        namespace, request.keys, request.leading_only, request.ttl_s, counted=not request.uncounted
    )
    return store_pb2.AcquireResponse(
        lease_id=lease_id, found=pinned.found, offsets=pinned.offsets, versions=pinned.versions
    )


async def remove_below(chain: TierChain, namespace: StoredNamespace, keys: bytes) -> store_pb2.RemoveResponse:
    return store_pb2.RemoveResponse(num_blocks=await chain.remove(namespace, keys))


def clear_memory(blocks: BlockStore, namespace: StoredNamespace) -> Slices[store_pb2.ClearResponse]:
    num_blocks = yield from blocks.clear_in_slices(namespace)
    return store_pb2.ClearResponse(num_blocks=num_blocks)


async def clear_below(
    chain: TierChain, namespace: StoredNamespace, cleared: Slices[store_pb2.ClearResponse]
) -> store_pb2.ClearResponse:
    begun = chain.begin_clear(namespace)
    try:
        answer = in_slices(cleared)
        return await answer if isinstance(answer, asyncio.Task) else answer
    finally:
        await chain.finish_clear(begun)
