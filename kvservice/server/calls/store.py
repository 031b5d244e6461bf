"""The handlers of StoreService, and their codec: blocks by key in the store of the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np

from kvservice.blocks.slices import Slices, Waits
from kvservice.config import ServeConfig
from kvservice.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    QuotaExceededError,
    StoreNotSharedError,
    StoreOffError,
)
from kvservice.logs import LogBudget
from kvservice.server.calls.handlers import (
    AnyHandler,
    WhileDraining,
    in_session,
    max_response_bytes,
    response_too_large,
)
from kvservice.server.loop import Caller, despite_leaving, finished, to_the_end, waiting
from kvservice.server.memory.region import Places
from kvservice.server.sessions.session import ServerSession
from kvservice.server.tenants import ADMINS
from kvservice.server.tiering.store import SHORT_IN_MESSAGE_BYTES, ServerStore
from kvservice.store import BlockStore, EngineFigures, NamespaceIdentity, SessionStore, StoredNamespace
from kvservice.store.index import DONE, KEY_BYTES, WORD_BYTES
from kvservice.store.namespaces import POOL_KEYS
from kvservice.store.session import Reservation
from kvservice.store.store import Pinned, check_keys
from kvservice.store.store import chosen as chosen_items
from kvservice.tiers import TierChain
from kvservice.v1 import store_pb2
from kvservice.wire.tensors import Encoded

Bits: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_TEXT_LENGTH = 256
# The most that a client reports of one kind in a call.
MAX_REPORTED = 1 << 32
MAX_FIGURE = 1 << 53


class StoreCalls:
    def __init__(self, store: ServerStore | None) -> None:
        self._opened = store
        self._refused_log = LogBudget(logger)

    def handlers(self) -> tuple[AnyHandler, ...]:
        refused = WhileDraining.REFUSED
        return (
            in_session("store_open_namespace", store_pb2.OpenNamespaceRequest, self.open_namespace, refused),
            in_session("store_lookup", store_pb2.LookupRequest, self.lookup),
            in_session("store_acquire", store_pb2.AcquireRequest, self.acquire),
            in_session("store_renew", store_pb2.RenewRequest, self.renew),
            in_session("store_release", store_pb2.ReleaseRequest, self.release),
            in_session("store_reserve", store_pb2.ReserveRequest, self.reserve, refused),
            in_session("store_commit", store_pb2.StoreCommitRequest, self.commit),
            in_session("store_abort", store_pb2.AbortRequest, self.abort),
            in_session("store_touch", store_pb2.TouchRequest, self.touch),
            in_session("store_remove", store_pb2.RemoveRequest, self.remove),
            in_session("store_clear", store_pb2.ClearRequest, self.clear, roles=ADMINS),
            in_session("store_map_store", store_pb2.MapStoreRequest, self.map_store, refused),
        )

    @property
    def _store(self) -> ServerStore:
        return opened(self._opened)

    def open_namespace(
        self, session: ServerSession, request: store_pb2.OpenNamespaceRequest
    ) -> Slices[store_pb2.OpenNamespaceResponse]:
        own = own_store(session)
        opening, identity = own.opening, identity_of(request.namespace, own.tenant)
        try:
            yield from self._store.blocks.make_place(identity)
        except QuotaExceededError as error:
            self._refused_log.write(
                logging.WARNING, "a namespace of model %r was refused: %s", identity.model, error.message
            )
            raise
        if opening.ended:
            raise FailedPreconditionError("the session ended meanwhile")
        namespace_id, namespace = own.open(identity, request.quota_bytes)
        return store_pb2.OpenNamespaceResponse(
            namespace_id=namespace_id,
            num_blocks=self._store.blocks.stats(namespace).num_blocks,
            quota_bytes=namespace.quota_bytes,
            slab_bytes=self._store.blocks.config.slab_bytes,
            first_block=namespace.first_block,
            block_stride=namespace.block_stride,
            blocks_per_slab=namespace.blocks_per_slab,
            number=namespace.number,
            has_tiers=self._store.chain is not None,
        )

    async def lookup(self, session: ServerSession, request: store_pb2.LookupRequest) -> store_pb2.LookupResponse:
        namespace = namespace_of(session, request)
        check_max_wait(request)
        if (chain := self._chain_for(namespace, request.keys)) is not None:
            return await lookup_below(self._store.blocks, chain, namespace, request)
        num_leading, found = self._store.blocks.lookup(
            namespace, request.keys, counted=not request.uncounted, explained=not request.unexplained
        )
        return store_pb2.LookupResponse(num_leading=num_leading, found=found, num_in_memory=num_leading)

    def acquire(self, session: ServerSession, request: store_pb2.AcquireRequest) -> Waits[store_pb2.AcquireResponse]:
        namespace = namespace_of(session, request)
        check_max_wait(request)
        if (chain := self._chain_for(namespace, request.keys)) is not None:
            return (yield from waiting(acquire_below(chain, own_store(session), namespace, request)))
        return acquire(own_store(session), namespace, request)

    def _chain_for(self, namespace: StoredNamespace, keys: bytes) -> TierChain | None:
        """Return the chain of tiers if one of the keys is not in memory."""
        chain = self._store.chain
        return None if chain is None or self._store.blocks.has_all(namespace, keys) else chain

    def renew(self, session: ServerSession, request: store_pb2.RenewRequest) -> store_pb2.RenewResponse:
        own_store(session).renew(request.lease_id, request.ttl_s)
        return store_pb2.RenewResponse()

    def release(self, session: ServerSession, request: store_pb2.ReleaseRequest) -> store_pb2.ReleaseResponse:
        own = own_store(session)
        for lease_id in request.lease_ids:
            own.release(lease_id)
        return store_pb2.ReleaseResponse()

    def reserve(self, session: ServerSession, request: store_pb2.ReserveRequest) -> store_pb2.ReserveResponse:
        """Only a client that can write may reserve: others would publish what another namespace left there."""
        namespace = namespace_of(session, request)
        own = own_store(session)
        if not own.opening.writers:
            raise StoreNotSharedError("the session has not mapped the store for writing")
        reservation_id, reserved = own.reserve(namespace, request.keys)
        return store_pb2.ReserveResponse(
            reservation_id=reservation_id, statuses=reserved.statuses, offsets=reserved.offsets
        )

    def commit(
        self, session: ServerSession, request: store_pb2.StoreCommitRequest
    ) -> Waits[store_pb2.StoreCommitResponse]:
        own = own_store(session)
        reservation = own.reservation(request.reservation_id)
        num_bytes = -(-reservation.num_blocks // 8)
        if request.written and len(request.written) != num_bytes:
            raise InvalidArgumentError(f"has {len(request.written)} bytes, not {num_bytes}", field="written")
        written, others = reservation.split(request.written)
        if request.checksums and len(request.checksums) != len(written.slots):
            raise InvalidArgumentError(
                f"has {len(request.checksums)} bytes, not {len(written.slots)}", field="checksums"
            )
        own.begin_commit(request.reservation_id)
        if not request.checksums:
            return (yield from waiting(self._publish(own, request.reservation_id, written, others)))
        own.commit(request.reservation_id, written, others, request.checksums)
        return store_pb2.StoreCommitResponse(num_blocks=written.num_blocks)

    async def _publish(
        self, own: SessionStore, reservation_id: int, written: Reservation, others: Reservation
    ) -> store_pb2.StoreCommitResponse:
        """Compute the checksums of blocks, then publish them."""
        try:
            checksums = await self._store.copies.checksums(written.offsets, written.namespace.block_bytes)
        except BaseException:
            own.fail(reservation_id)
            raise
        own.commit(reservation_id, written, others, checksums)
        return store_pb2.StoreCommitResponse(num_blocks=written.num_blocks)

    def abort(self, session: ServerSession, request: store_pb2.AbortRequest) -> store_pb2.AbortResponse:
        own_store(session).abort(request.reservation_id)
        return store_pb2.AbortResponse()

    def touch(self, session: ServerSession, request: store_pb2.TouchRequest) -> store_pb2.TouchResponse:
        namespace = namespace_of(session, request)
        for field in ("num_hits", "num_misses", "num_read", "num_not_whole"):
            if getattr(request, field) > MAX_REPORTED:
                raise InvalidArgumentError(f"{getattr(request, field)} is more than {MAX_REPORTED}", field=field)
        engine = EngineFigures(*(getattr(request.engine, name) for name in EngineFigures._fields))
        for field, number in zip(engine._fields, engine, strict=True):
            if number > MAX_FIGURE:
                raise InvalidArgumentError(f"{number} is more than {MAX_FIGURE}", field=f"engine.{field}")
        check_keys(request.missing, "missing")
        self._store.blocks.count(
            namespace,
            request.num_hits,
            request.num_misses,
            request.num_read,
            request.missing,
            request.num_not_whole,
        )
        if request.HasField("engine"):
            own_store(session).engine = engine
        return store_pb2.TouchResponse(num_blocks=self._store.blocks.touch(namespace, request.keys))

    def remove(self, session: ServerSession, request: store_pb2.RemoveRequest) -> Waits[store_pb2.RemoveResponse]:
        namespace = namespace_of(session, request)
        if self._store.chain is not None:
            return (yield from waiting(remove_below(self._store.chain, namespace, request.keys)))
        return store_pb2.RemoveResponse(num_blocks=self._store.blocks.remove(namespace, request.keys))

    def clear(self, session: ServerSession, request: store_pb2.ClearRequest) -> Waits[store_pb2.ClearResponse]:
        namespace = own_store(session).namespace(request.namespace_id)
        cleared = clear_memory(self._store.blocks, namespace)
        if self._store.chain is not None:
            return (yield from waiting(clear_below(self._store.chain, namespace, cleared)))
        return (yield from cleared)

    def map_store(self, session: ServerSession, request: store_pb2.MapStoreRequest) -> store_pb2.MapStoreResponse:
        if not session.tenancy.map_store:
            raise StoreNotSharedError(f"not for tenant {session.tenant}: its memory has the blocks of all tenants")
        token = self._store.share(own_store(session), session.shared, request.writable)
        growing = not self._store.growth.is_complete
        return store_pb2.MapStoreResponse(handover_token=token, num_bytes=self._store.memory.num_bytes, growing=growing)


def opened(store: T | None) -> T:
    """Return the store of the daemon, or of a session. Raises StoreOffError if the daemon has none."""
    if store is None:
        raise StoreOffError("the daemon runs with store_gib 0")
    return store


def own_store(session: ServerSession) -> SessionStore:
    """Return the session's side of the store. Raises StoreOffError."""
    return opened(session.store)


def namespace_of(
    session: ServerSession,
    request: store_pb2.LookupRequest
    | store_pb2.AcquireRequest
    | store_pb2.ReserveRequest
    | store_pb2.BatchGetRequest
    | store_pb2.BatchPutRequest
    | store_pb2.TouchRequest
    | store_pb2.RemoveRequest,
) -> StoredNamespace:
    """Return the namespace of a request with keys, and check their length. Raises StoreOffError, UnknownNamespaceError,
    InvalidArgumentError naming keys."""
    namespace = own_store(session).namespace(request.namespace_id)
    check_keys(request.keys)
    return namespace


def check_max_wait(
    request: store_pb2.LookupRequest | store_pb2.AcquireRequest | store_pb2.BatchGetRequest,
) -> None:
    """Raises InvalidArgumentError naming max_wait_s if that is no time."""
    if not (math.isfinite(request.max_wait_s) and request.max_wait_s >= 0):
        raise InvalidArgumentError(f"{request.max_wait_s} is no number from 0 on", field="max_wait_s")


def identity_of(message: store_pb2.StoreNamespace, tenant: str) -> NamespaceIdentity:
    """Raises InvalidArgumentError naming a text that is too long or not printable, or a rank that is not below its
    size."""
    for name in ("model", "weights", "dtype", "layout", "key_algorithm"):
        text = getattr(message, name)
        if len(text) > MAX_TEXT_LENGTH or not text.isprintable():
            raise InvalidArgumentError(
                f"more than {MAX_TEXT_LENGTH} characters, or unprintable ones", field=f"namespace.{name}"
            )
    if message.key_algorithm == POOL_KEYS:
        raise InvalidArgumentError("is the daemon's own", field="namespace.key_algorithm")
    tp_size, pp_size = max(message.tp_size, 1), max(message.pp_size, 1)
    for name, rank, size in (("tp_rank", message.tp_rank, tp_size), ("pp_rank", message.pp_rank, pp_size)):
        if rank >= size:
            raise InvalidArgumentError(f"{rank} is not below the size, {size}", field=f"namespace.{name}")
    return NamespaceIdentity(
        message.model,
        message.weights,
        message.dtype,
        message.layout,
        message.block_bytes,
        message.tp_rank,
        tp_size,
        message.pp_rank,
        pp_size,
        message.key_algorithm,
        tenant,
    )


def bits_of(bitmap: bytes, count: int) -> Bits:
    """Return the first `count` bits of a bitmap, the lowest bit of a byte first."""
    bits: Bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), count=count, bitorder="little").astype(np.bool_)
    return bits


# ---- where there are tiers below the memory: handlers wait for these


async def lookup_below(
    blocks: BlockStore, chain: TierChain, namespace: StoredNamespace, request: store_pb2.LookupRequest
) -> store_pb2.LookupResponse:
    counted = not request.uncounted
    num_in_memory, _ = blocks.lookup(namespace, request.keys, counted=False)
    flags = await chain.lookup(namespace, request.keys, max_wait_s=request.max_wait_s, counted=counted)
    found = np.packbits(flags, bitorder="little").tobytes()
    if counted:
        blocks.count_lookup(namespace, request.keys, found, explained=not request.unexplained)
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
        return await finished(cleared)
    finally:
        await chain.finish_clear(begun)


# ---- BatchGet and BatchPut, which copy blocks
#
#     get: bring up, pin ─▶ copy, in threads ─▶ unpin, reply
#     put: reserve       ─▶ copy, in threads ─▶ commit, or abort if the caller has gone; reply
#
# The blocks and the region stay in use until the copy has ended, even if the call or the session ends before that.
# Blocks in messages take the event loop at any rate, where gRPC copies them. So they are copied there, once: those of a
# put of usual size, and those of a get that are in memory and are not verified.

_FOUND, _DATA = store_pb2.BatchGetResponse.FOUND_FIELD_NUMBER, store_pb2.BatchGetResponse.DATA_FIELD_NUMBER
_CHECKSUMS = store_pb2.BatchGetResponse.CHECKSUMS_FIELD_NUMBER


class StoreCopyCalls:
    def __init__(self, config: ServeConfig, store: ServerStore | None) -> None:
        self._opened = store
        self._max_response_bytes = max_response_bytes(config)

    def handlers(self) -> tuple[AnyHandler, ...]:
        return (
            in_session("store_batch_get", store_pb2.BatchGetRequest, self.batch_get),
            in_session("store_batch_put", store_pb2.BatchPutRequest, self.batch_put, WhileDraining.REFUSED),
        )

    @property
    def _store(self) -> ServerStore:
        return opened(self._opened)

    # ---- put

    async def batch_put(self, session: ServerSession, request: store_pb2.BatchPutRequest) -> store_pb2.BatchPutResponse:
        data = request.data  # each look at the field of a message copies it
        put = functools.partial(self._put, session, request, data)
        if not request.HasField("region") and len(data) <= SHORT_IN_MESSAGE_BYTES:
            return await put(Caller())  # it waits for nothing
        return await despite_leaving(put)

    async def _put(
        self, session: ServerSession, request: store_pb2.BatchPutRequest, message: bytes, caller: Caller
    ) -> store_pb2.BatchPutResponse:
        namespace = namespace_of(session, request)
        num_keys, block_bytes = len(request.keys) // KEY_BYTES, namespace.block_bytes
        if request.checksums and len(request.checksums) != WORD_BYTES * num_keys:
            raise InvalidArgumentError(f"{len(request.checksums)} bytes for {num_keys} keys", field="checksums")
        copies = self._store.copies
        if request.HasField("region"):
            if message:
                raise InvalidArgumentError("there is a region, too", field="data")
            with session.regions.host_region(request.region.region, "region.region") as region:
                places = places_of(request.region, num_keys, block_bytes, region.reach)
                if region.is_remote and not request.checksums:
                    raise InvalidArgumentError("is empty, and the region is a remote one", field="checksums")
                with self._reserved(session, namespace, request, caller) as room:
                    chosen = places.of(room.chosen)
                    room.checksums = await copies.write_from(room.offsets, block_bytes, region, chosen)
                if region.is_remote:
                    session.shared.transfers.arrived_damaged(room.statuses.count(store_pb2.PUT_STATUS_DAMAGED))
        else:
            data = np.frombuffer(message, np.uint8)
            session.shared.transfers.travelled_in_messages(len(data))
            if len(data) != num_keys * block_bytes:
                raise InvalidArgumentError(
                    f"{len(data)} bytes, {num_keys} blocks have {num_keys * block_bytes}", field="data"
                )
            with self._reserved(session, namespace, request, caller) as room:
                chosen = Places.packed(num_keys, block_bytes).of(room.chosen)
                room.checksums = await copies.write(room.offsets, block_bytes, data, chosen, SHORT_IN_MESSAGE_BYTES)
        return store_pb2.BatchPutResponse(statuses=room.statuses)

    @contextlib.contextmanager
    def _reserved(
        self, session: ServerSession, namespace: StoredNamespace, request: store_pb2.BatchPutRequest, caller: Caller
    ) -> Iterator[Room]:
        """Reserve room for blocks; publish those with the right checksums at the end, or free it if the copy failed or
        nobody wants it."""
        blocks = self._store.blocks
        opening = own_store(session).opening
        reserved = blocks.reserve(namespace, request.keys)
        room = Room(reserved.statuses, reserved.offsets)
        try:
            yield room
            if caller.gone or opening.ended:
                raise FailedPreconditionError("the session ended meanwhile, and nothing was stored")
        except BaseException:
            blocks.abort(reserved.slots)
            raise
        slots, keys = reserved.slots, reserved.keys
        right = room.compare(request.checksums)
        if not right.all():
            blocks.abort(chosen_items(slots, WORD_BYTES, ~right))
            slots, keys = chosen_items(slots, WORD_BYTES, right), chosen_items(keys, KEY_BYTES, right)
            room.checksums = chosen_items(room.checksums, WORD_BYTES, right)
        blocks.commit(namespace, slots, keys, room.checksums)

    # ---- get

    async def batch_get(
        self, session: ServerSession, request: store_pb2.BatchGetRequest
    ) -> store_pb2.BatchGetResponse | Encoded:
        if not (request.HasField("region") or request.verify or request.return_checksums):
            namespace = namespace_of(session, request)
            check_max_wait(request)
            if self._store.chain is None or self._store.blocks.has_all(namespace, request.keys):
                return self._get_in_place(session, namespace, request)
        return await asyncio.shield(to_the_end(self._get(session, request)))

    def _get_in_place(
        self, session: ServerSession, namespace: StoredNamespace, request: store_pb2.BatchGetRequest
    ) -> Encoded:
        """Return a response with views of the blocks in the memory of the store, which are copied when it is
        serialized. That is before anything else runs on the event loop, so nobody takes their room before."""
        self._check_response(namespace, request)
        pinned = self._store.blocks.acquire(namespace, request.keys)
        blocks = Encoded(self._store.copies.views(pinned.offsets, namespace.block_bytes))
        self._store.blocks.release(pinned.slots)
        session.shared.transfers.travelled_in_messages(pinned.num_blocks * namespace.block_bytes)
        return Encoded((pinned.found,)).inside(_FOUND) + blocks.inside(_DATA)

    def _check_response(self, namespace: StoredNamespace, request: store_pb2.BatchGetRequest) -> None:
        """Raises InvalidArgumentError naming keys if their blocks do not fit into a message."""
        num_bytes = len(request.keys) // KEY_BYTES * (namespace.block_bytes + 1)
        if num_bytes > self._max_response_bytes:
            raise response_too_large(num_bytes, self._max_response_bytes, "keys")

    async def _get(
        self, session: ServerSession, request: store_pb2.BatchGetRequest
    ) -> store_pb2.BatchGetResponse | Encoded:
        namespace = namespace_of(session, request)
        check_max_wait(request)
        if not request.HasField("region"):
            return await self._get_inline(session, namespace, request)
        num_keys, block_bytes = len(request.keys) // KEY_BYTES, namespace.block_bytes
        with session.regions.host_region(request.region.region, "region.region") as region:
            places = places_of(request.region, num_keys, block_bytes, region.reach)
            async with self._pinned(namespace, request) as (pinned, checksums):
                chosen = places.of(bits_of(pinned.found, num_keys))
                good = await self._store.copies.read_into(pinned.offsets, block_bytes, region, chosen, checksums)
                found = self._without_corrupt(namespace, request.keys, pinned, good)
        response = store_pb2.BatchGetResponse(found=np.packbits(found, bitorder="little").tobytes())
        if request.return_checksums:
            response.checksums = chosen_items(checksums, WORD_BYTES, bits_of(good, pinned.num_blocks))
        return response

    async def _get_inline(
        self, session: ServerSession, namespace: StoredNamespace, request: store_pb2.BatchGetRequest
    ) -> Encoded:
        block_bytes = namespace.block_bytes
        self._check_response(namespace, request)
        async with self._pinned(namespace, request) as (pinned, checksums):
            data = np.empty((pinned.num_blocks, block_bytes), np.uint8)
            places = Places.packed(pinned.num_blocks, block_bytes)
            good = await self._store.copies.read(pinned.offsets, block_bytes, data, places, checksums)
            found = self._without_corrupt(namespace, request.keys, pinned, good)
        whole = bits_of(good, pinned.num_blocks)
        if not whole.all():
            data = data[whole]
        session.shared.transfers.travelled_in_messages(data.nbytes)
        encoded = Encoded((np.packbits(found, bitorder="little").tobytes(),)).inside(_FOUND)
        if request.return_checksums:
            encoded += Encoded((chosen_items(checksums, WORD_BYTES, whole),)).inside(_CHECKSUMS)
        return encoded + Encoded((data.reshape(-1).data,)).inside(_DATA)

    @contextlib.asynccontextmanager
    async def _pinned(
        self, namespace: StoredNamespace, request: store_pb2.BatchGetRequest
    ) -> AsyncIterator[tuple[Pinned, bytes]]:
        """Bring up what is below, and pin the blocks that are there. Yields them with the checksums to compare, none
        unless they are wanted."""
        blocks, chain = self._store.blocks, self._store.chain
        if chain is None or blocks.has_all(namespace, request.keys):
            pinned = blocks.acquire(namespace, request.keys)
        else:
            pinned = await chain.bring_up(namespace, request.keys, max_wait_s=request.max_wait_s)
        try:
            yield pinned, blocks.checksums(pinned.slots) if request.verify or request.return_checksums else b""
        finally:
            blocks.release(pinned.slots)

    def _without_corrupt(self, namespace: StoredNamespace, keys: bytes, pinned: Pinned, good: bytes) -> Bits:
        """Remove blocks that are not `good`. Returns which keys are left, bool `[num_keys]`."""
        found = bits_of(pinned.found, len(keys) // KEY_BYTES)
        whole = bits_of(good, pinned.num_blocks)
        if not whole.all():
            corrupt = np.flatnonzero(found)[~whole]
            wrong = b"".join(keys[KEY_BYTES * i : KEY_BYTES * (i + 1)] for i in corrupt)
            self._store.blocks.remove_corrupt(namespace, wrong, chosen_items(pinned.slots, WORD_BYTES, ~whole))
            found[corrupt] = False
        return found


@dataclass
class Room:
    """Room for blocks: a status per key, the offsets of the blocks to copy, and their checksums after the copy."""

    statuses: bytes
    offsets: bytes
    checksums: bytes = b""

    @property
    def chosen(self) -> Bits:
        """The keys that have room, bool `[num_keys]`."""
        chosen: Bits = np.frombuffer(self.statuses, np.uint8) == DONE
        return chosen

    def compare(self, expected: bytes) -> Bits:
        """Return which of the blocks copied have the expected checksums, one for each key, or all if there are none.
        The status of the others changes."""
        right = np.ones(len(self.offsets) // WORD_BYTES, np.bool_)
        if expected:
            wanted = np.frombuffer(expected, np.uint64)[self.chosen]
            right = np.frombuffer(self.checksums, np.uint64) == wanted
        if not right.all():
            statuses = np.frombuffer(self.statuses, np.uint8).copy()
            statuses[np.flatnonzero(self.chosen)[~right]] = store_pb2.PUT_STATUS_DAMAGED
            self.statuses = statuses.tobytes()
        return right


def places_of(message: store_pb2.Scatter, num_blocks: int, block_bytes: int, region_bytes: int) -> Places:
    """Return the places of all blocks inside a region of `region_bytes`. Raises InvalidArgumentError naming
    piece_bytes or offsets."""
    pieces = list(message.piece_bytes) or [block_bytes]
    if sum(pieces) != block_bytes or 0 in pieces:
        raise InvalidArgumentError(
            f"sum up to {sum(pieces)}, or one is 0; a block has {block_bytes} bytes", field="region.piece_bytes"
        )
    data = message.offsets
    if len(data) != 8 * num_blocks * len(pieces):
        raise InvalidArgumentError(
            f"{len(data)} bytes, {num_blocks} blocks of {len(pieces)} pieces need {8 * num_blocks * len(pieces)}",
            field="region.offsets",
        )
    piece_bytes = np.array(pieces, np.uint64)
    offsets = np.frombuffer(data, "<u8").reshape(num_blocks, len(pieces))
    # The last valid offset of each piece; -1 if the region is smaller than the piece.
    last = region_bytes - piece_bytes.astype(np.int64)
    if num_blocks and (last.min() < 0 or (offsets.max(axis=0) > last.astype(np.uint64)).any()):
        raise InvalidArgumentError(f"a piece ends outside the region of {region_bytes} bytes", field="region.offsets")
    return Places(piece_bytes, offsets)
