"""The handlers of StoreService that copy blocks: BatchGet and BatchPut.

    get: bring up, pin ─▶ copy, in threads ─▶ unpin, reply
    put: reserve       ─▶ copy, in threads ─▶ commit, or abort if the caller has gone; reply

The blocks and the region stay in use until the copy has ended, even if the call or the session ends before that.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import numpy as np

from kvservice.config import ServeConfig
from kvservice.errors import FailedPreconditionError, InvalidArgumentError
from kvservice.server import codec
from kvservice.server.handlers import Handler, SessionHandler, WhileDraining
from kvservice.server.loop import Caller, despite_leaving, to_the_end
from kvservice.server.memory.region import REMOTE, Places, places_of
from kvservice.server.sessions.session import ServerSession
from kvservice.server.store_calls import Bits, bits_of, check_max_wait, namespace_of, opened, own_store
from kvservice.server.tiering.store import ServerStore
from kvservice.store import StoredNamespace
from kvservice.store.index import DONE, KEY_BYTES, WORD_BYTES
from kvservice.store.store import Pinned
from kvservice.store.store import chosen as chosen_items
from kvservice.v1 import store_pb2
from kvservice.wire.encoded import Encoded

_FOUND, _DATA = store_pb2.BatchGetResponse.FOUND_FIELD_NUMBER, store_pb2.BatchGetResponse.DATA_FIELD_NUMBER
_CHECKSUMS = store_pb2.BatchGetResponse.CHECKSUMS_FIELD_NUMBER


class StoreCopyCalls:
    def __init__(self, config: ServeConfig, store: ServerStore | None) -> None:
        self._opened = store
        self._max_response_bytes = codec.max_response_bytes(config)

    def handlers(self) -> tuple[Handler, ...]:
        return (
            SessionHandler("store_batch_get", store_pb2.BatchGetRequest, self.batch_get),
            SessionHandler("store_batch_put", store_pb2.BatchPutRequest, self.batch_put, WhileDraining.REFUSED),
        )

    @property
    def _store(self) -> ServerStore:
        return opened(self._opened)

    # ---- put

    async def batch_put(self, session: ServerSession, request: store_pb2.BatchPutRequest) -> store_pb2.BatchPutResponse:
        return await despite_leaving(functools.partial(self._put, session, request))

    async def _put(
        self, session: ServerSession, request: store_pb2.BatchPutRequest, caller: Caller
    ) -> store_pb2.BatchPutResponse:
        namespace = namespace_of(session, request)
        num_keys, block_bytes = len(request.keys) // KEY_BYTES, namespace.block_bytes
        if request.checksums and len(request.checksums) != WORD_BYTES * num_keys:
            raise InvalidArgumentError(f"{len(request.checksums)} bytes for {num_keys} keys", field="checksums")
        copies = self._store.copies
        if request.HasField("region"):
            if request.data:
                raise InvalidArgumentError("there is a region, too", field="data")
            with session.regions.host_region(request.region.region, "region.region") as region:
                places = places_of(request.region, num_keys, block_bytes, region.reach)
                if region.kind == REMOTE and not request.checksums:
                    raise InvalidArgumentError("is empty, and the region is a remote one", field="checksums")
                with self._reserved(session, namespace, request, caller) as room:
                    chosen = places.of(room.chosen)
                    room.checksums = await copies.write_from(room.offsets, block_bytes, region, chosen)
                if region.kind == REMOTE:
                    session.access.transfers.arrived_damaged(room.statuses.count(store_pb2.PUT_STATUS_DAMAGED))
        else:
            session.access.transfers.travelled_in_messages(len(request.data))
            data = np.frombuffer(request.data, np.uint8)
            if len(data) != num_keys * block_bytes:
                raise InvalidArgumentError(
                    f"{len(data)} bytes, {num_keys} blocks have {num_keys * block_bytes}", field="data"
                )
            with self._reserved(session, namespace, request, caller) as room:
                chosen = Places.packed(num_keys, block_bytes).of(room.chosen)
                room.checksums = await copies.write(room.offsets, block_bytes, data, chosen)
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
        return await asyncio.shield(to_the_end(self._get(session, request)))

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
        num_keys, block_bytes = len(request.keys) // KEY_BYTES, namespace.block_bytes
        codec.check_response_size(num_keys * (block_bytes + 1), self._max_response_bytes, "keys")
        async with self._pinned(namespace, request) as (pinned, checksums):
            data = np.empty((pinned.num_blocks, block_bytes), np.uint8)
            places = Places.packed(pinned.num_blocks, block_bytes)
            good = await self._store.copies.read(pinned.offsets, block_bytes, data, places, checksums)
            found = self._without_corrupt(namespace, request.keys, pinned, good)
        whole = bits_of(good, pinned.num_blocks)
        if not whole.all():
            data = data[whole]
        session.access.transfers.travelled_in_messages(data.nbytes)
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
            self._store.blocks.remove_corrupt(namespace, wrong)
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
        """Which keys have room, bool `[num_keys]`."""
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
