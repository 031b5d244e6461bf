"""Requests for leases and reservations, of batches of any size."""

from __future__ import annotations

from kvservice.client.store.leases import Held
from kvservice.client.store.link import StoreLink
from kvservice.client.store.patience import Patience
from kvservice.client.store.splits import blocks_in_request, keys_in_request, parts
from kvservice.client.store.values import Flags, Statuses, flags_of, num_keys, some_keys, statuses_of
from kvservice.errors import StoreNotSharedError
from kvservice.v1 import store_pb2


async def acquire(
    link: StoreLink,
    keys: bytes,
    found: Flags,
    held: list[Held],
    *,
    ttl_s: float,
    leading_only: bool,
    counted: bool,
    patience: Patience,
    timeout_s: float | None,
) -> None:
    """Lease blocks. Adds to `held` and sets flags in `found`."""
    for part in parts(num_keys(keys), keys_in_request(link)):
        request = store_pb2.AcquireRequest(
            request_id=link.next_request_id(),
            namespace_id=link.namespace_id,
            keys=some_keys(keys, part),
            ttl_s=ttl_s,
            leading_only=leading_only,
            uncounted=not counted,
            max_wait_s=patience.left_s(link),
        )
        response = await link.hold("store_acquire", request, timeout_s)
        if response.lease_id:
            held.append(Held(response.lease_id, part, response.offsets, response.versions))
            found[part] = flags_of(response.found, part.stop - part.start)
        if leading_only and not found[part].all():
            return


async def reserve(
    link: StoreLink, keys: bytes, statuses: Statuses, held: list[Held], *, timeout_s: float | None
) -> None:
    """Reserve blocks. Adds to `held` and sets `statuses`. Raises StoreNotSharedError unless the store is mapped for
    writing."""
    if link.memory is None or not link.memory.writable:
        raise StoreNotSharedError("the store is not mapped for writing")
    for part in parts(num_keys(keys), blocks_in_request(link)):
        request = store_pb2.ReserveRequest(
            request_id=link.next_request_id(), namespace_id=link.namespace_id, keys=some_keys(keys, part)
        )
        response = await link.hold("store_reserve", request, timeout_s)
        statuses[part] = statuses_of(response.statuses, part.stop - part.start)
        if response.reservation_id:
            held.append(Held(response.reservation_id, part, response.offsets))
            link.reservations.add(response.reservation_id)
