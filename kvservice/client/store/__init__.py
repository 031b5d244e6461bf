"""The client's side of the block store: blocks of K/V by key, for engines that have a pool of their own."""

from kvservice.client.store.access import StoreAccess
from kvservice.client.store.aio import AsyncStore, AsyncStoreLease, AsyncStoreReservation
from kvservice.client.store.blocking import Store, StoreLease, StoreReservation
from kvservice.client.store.link import Dialer, StoreOptions
from kvservice.client.store.pieces import Scatter
from kvservice.client.store.values import Lookup, PutStatus, StoreNamespace

__all__ = [
    "AsyncStore",
    "AsyncStoreLease",
    "AsyncStoreReservation",
    "Dialer",
    "Lookup",
    "PutStatus",
    "Scatter",
    "Store",
    "StoreAccess",
    "StoreLease",
    "StoreNamespace",
    "StoreOptions",
    "StoreReservation",
]
