"""The handlers of StoreService, except those that copy blocks: see store_copy_calls."""

from __future__ import annotations

import logging
import math
from collections.abc import Coroutine
from typing import Any, TypeAlias, TypeVar

import numpy as np

from kvservice.blocks import Slices
from kvservice.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    QuotaExceededError,
    StoreNotSharedError,
    StoreOffError,
)
from kvservice.logs import LogBudget
from kvservice.server.handlers import Handler, SessionHandler, WhileDraining
from kvservice.server.loop import Answer, to_the_end
from kvservice.server.sessions.session import ServerSession
from kvservice.server.store_below import acquire, acquire_below, clear_below, clear_memory, lookup_below, remove_below
from kvservice.server.tiering.store import ServerStore
from kvservice.store import NamespaceIdentity, SessionStore, StoredNamespace
from kvservice.store.namespaces import POOL_KEYS
from kvservice.store.session import Reservation
from kvservice.store.store import check_keys
from kvservice.tiers import TierChain
from kvservice.v1 import store_pb2

Bits: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_TEXT_LENGTH = 256
# The most that a client reports of one kind in a call.
MAX_REPORTED = 1 << 32


class StoreCalls:
    def __init__(self, store: ServerStore | None) -> None:
        self._opened = store
        self._refused_log = LogBudget(logger)

    def handlers(self) -> tuple[Handler, ...]:
        refused = WhileDraining.REFUSED
        return (
            SessionHandler("store_open_namespace", store_pb2.OpenNamespaceRequest, self.open_namespace, refused),
            SessionHandler("store_lookup", store_pb2.LookupRequest, self.lookup),
            SessionHandler("store_acquire", store_pb2.AcquireRequest, self.acquire),
            SessionHandler("store_renew", store_pb2.RenewRequest, self.renew),
            SessionHandler("store_release", store_pb2.ReleaseRequest, self.release),
            SessionHandler("store_reserve", store_pb2.ReserveRequest, self.reserve, refused),
            SessionHandler("store_commit", store_pb2.StoreCommitRequest, self.commit),
            SessionHandler("store_abort", store_pb2.AbortRequest, self.abort),
            SessionHandler("store_touch", store_pb2.TouchRequest, self.touch),
            SessionHandler("store_remove", store_pb2.RemoveRequest, self.remove),
            SessionHandler("store_clear", store_pb2.ClearRequest, self.clear),
            SessionHandler("store_map_store", store_pb2.MapStoreRequest, self.map_store, refused),
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

    def lookup(
        self, session: ServerSession, request: store_pb2.LookupRequest
    ) -> store_pb2.LookupResponse | Coroutine[Any, Any, store_pb2.LookupResponse]:
        namespace = namespace_of(session, request)
        check_max_wait(request)
        if (chain := self._chain_for(namespace, request.keys)) is not None:
            return lookup_below(self._store.blocks, chain, namespace, request)
        num_leading, found = self._store.blocks.lookup(namespace, request.keys, counted=not request.uncounted)
        return store_pb2.LookupResponse(num_leading=num_leading, found=found, num_in_memory=num_leading)

    def acquire(self, session: ServerSession, request: store_pb2.AcquireRequest) -> Answer[store_pb2.AcquireResponse]:
        namespace = namespace_of(session, request)
        check_max_wait(request)
        if (chain := self._chain_for(namespace, request.keys)) is not None:
            return to_the_end(acquire_below(chain, own_store(session), namespace, request))
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
    ) -> Answer[store_pb2.StoreCommitResponse]:
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
            return to_the_end(self._publish(own, request.reservation_id, written, others))
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
        for field in ("num_hits", "num_misses", "num_read"):
            if getattr(request, field) > MAX_REPORTED:
                raise InvalidArgumentError(f"{getattr(request, field)} is more than {MAX_REPORTED}", field=field)
        self._store.blocks.count(namespace, request.num_hits, request.num_misses, request.num_read)
        return store_pb2.TouchResponse(num_blocks=self._store.blocks.touch(namespace, request.keys))

    def remove(self, session: ServerSession, request: store_pb2.RemoveRequest) -> Answer[store_pb2.RemoveResponse]:
        namespace = namespace_of(session, request)
        if self._store.chain is not None:
            return to_the_end(remove_below(self._store.chain, namespace, request.keys))
        return store_pb2.RemoveResponse(num_blocks=self._store.blocks.remove(namespace, request.keys))

    def clear(
        self, session: ServerSession, request: store_pb2.ClearRequest
    ) -> Slices[store_pb2.ClearResponse] | Answer[store_pb2.ClearResponse]:
        namespace = own_store(session).namespace(request.namespace_id)
        cleared = clear_memory(self._store.blocks, namespace)
        if self._store.chain is not None:
            return to_the_end(clear_below(self._store.chain, namespace, cleared))
        return cleared

    def map_store(self, session: ServerSession, request: store_pb2.MapStoreRequest) -> store_pb2.MapStoreResponse:
        token = self._store.share(own_store(session), session.access, request.writable)
        return store_pb2.MapStoreResponse(handover_token=token, num_bytes=self._store.memory.num_bytes)


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
