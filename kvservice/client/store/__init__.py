"""The client's side of the block store: blocks of K/V by key, for engines that have a pool of their own."""

from kvservice.client.store.access import StoreAccess
from kvservice.client.store.link import Dialer, StoreOptions
from kvservice.client.store.values import Lookup, PutStatus, Scatter, StoreNamespace

__all__ = ["Dialer", "Lookup", "PutStatus", "Scatter", "StoreAccess", "StoreNamespace", "StoreOptions"]
