"""The blocking API of the store. It runs the coroutines of `core.py`, which never suspend."""

from __future__ import annotations

from kvservice.client.store.access import StoreAccess
from kvservice.client.store.core import StoreCore
from kvservice.client.store.leases import Held, LeaseCore, ReservationCore
from kvservice.client.store.link import StoreLink
from kvservice.client.store.memory import MappedStore
from kvservice.client.store.pieces import Numbers
from kvservice.client.store.values import Flags, Statuses
from kvservice.client.threads import blocking
from kvservice.wire.tensors import Array


class StoreLease:
    """See LeaseCore. A context manager."""

    def __init__(self, core: LeaseCore) -> None:
        self._core = core
        self.found = core.found

    @property
    def views(self) -> list[Array | None]:
        return self._core.views

    @property
    def addresses(self) -> Numbers:
        return self._core.addresses

    @property
    def memory(self) -> MappedStore:
        return self._core.memory

    @property
    def alive(self) -> bool:
        return self._core.alive

    @property
    def offsets(self) -> bytes:
        return self._core.offsets

    @property
    def versions(self) -> bytes:
        return self._core.versions

    def check(self) -> Flags:
        """See LeaseCore.check."""
        return self._core.check()

    renew = blocking(LeaseCore.renew)
    release = blocking(LeaseCore.release)

    def __enter__(self) -> StoreLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class StoreReservation:
    """See ReservationCore. A context manager."""

    def __init__(self, core: ReservationCore) -> None:
        self._core = core
        self.statuses = core.statuses
        self.reserved = core.reserved

    @property
    def views(self) -> list[Array | None]:
        return self._core.views

    @property
    def addresses(self) -> Numbers:
        return self._core.addresses

    @property
    def memory(self) -> MappedStore:
        return self._core.memory

    commit = blocking(ReservationCore.commit)
    abort = blocking(ReservationCore.abort)

    def __enter__(self) -> StoreReservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


BlockingCore = StoreCore[StoreLease, StoreReservation]


class Store:
    """See StoreCore. A context manager; leaving it closes the store's session."""

    def __init__(self, core: BlockingCore) -> None:
        self._core = core
        self.namespace = core.namespace

    @property
    def reachable(self) -> bool:
        return self._core.reachable

    @property
    def transport(self) -> str:
        return self._core.transport

    @property
    def num_transfer_failures(self) -> int:
        return self._core.num_transfer_failures

    @property
    def memory(self) -> MappedStore | None:
        return self._core.memory

    lookup = blocking(BlockingCore.lookup)
    get = blocking(BlockingCore.get)
    put = blocking(BlockingCore.put)
    acquire = blocking(BlockingCore.acquire)
    reserve = blocking(BlockingCore.reserve)
    touch = blocking(BlockingCore.touch)
    remove = blocking(BlockingCore.remove)
    clear = blocking(BlockingCore.clear)
    create_region = blocking(BlockingCore.create_region)
    close = blocking(BlockingCore.close)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_lease(access: StoreAccess, link: StoreLink | None, held: list[Held], found: Flags) -> StoreLease:
    return StoreLease(LeaseCore(access, link, held, found))


def make_reservation(
    access: StoreAccess, link: StoreLink | None, held: list[Held], statuses: Statuses
) -> StoreReservation:
    return StoreReservation(ReservationCore(access, link, held, statuses))
