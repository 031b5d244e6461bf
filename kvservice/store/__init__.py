"""The bookkeeping of the block store: blocks of K/V by key, for engines that have a pool of their own. Plain Python.

`BlockStore` is the API for all sessions, `SessionStore` for one. The native index (csrc/store) finds keys and chooses
what to evict; it is passed in, and this package moves no bytes. Imports point down this list:

session      SessionStore: the namespaces, leases and reservations of one session, and what it had before a restart
store        BlockStore: all operations on blocks, and events
table        NamespaceTable: which namespaces there are, their quotas and counters, and which one gives way
leases       Leases: which end when their time is up
quarantine   Quarantine: reserved blocks of lost sessions, while their writers live
records      StoreRecords: what outlives the daemon's process beside the index
misses       GhostKeys, and the reasons why blocks are missing
namespaces   NamespaceIdentity, StoredNamespace; gauges and counters by model, and those that engines report
index        KeyIndex: what the native class does
"""

from kvservice.store.index import BEING_WRITTEN, DONE, KEY_BYTES, NO_ROOM, PRESENT, WORD_BYTES, KeyIndex
from kvservice.store.leases import LeaseClock
from kvservice.store.namespaces import EngineFigures, ModelFigures, NamespaceIdentity, StoredNamespace
from kvservice.store.records import Records, StoreRecords, StoreSections, WriterRecord
from kvservice.store.session import Reservation, SessionStore, StoreRecovery, recover
from kvservice.store.store import BlockStore, GhostKeys, Quarantine, check_keys
from kvservice.store.table import StoreConfig

__all__ = [
    "BEING_WRITTEN",
    "DONE",
    "KEY_BYTES",
    "NO_ROOM",
    "PRESENT",
    "WORD_BYTES",
    "BlockStore",
    "EngineFigures",
    "GhostKeys",
    "KeyIndex",
    "LeaseClock",
    "ModelFigures",
    "NamespaceIdentity",
    "Quarantine",
    "Records",
    "Reservation",
    "SessionStore",
    "StoreConfig",
    "StoreRecords",
    "StoreRecovery",
    "StoreSections",
    "StoredNamespace",
    "WriterRecord",
    "check_keys",
    "recover",
]
