"""The daemon's block store: its memory, its index, its copies, and who may map it."""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass

from kvservice import _ext
from kvservice.blocks import EventJournal
from kvservice.config import GIB, ServeConfig
from kvservice.errors import ResourceExhaustedError, StoreNotSharedError
from kvservice.kept import KeptState, Section
from kvservice.pool.available import available_bytes
from kvservice.pool.sealed import SealedMemory
from kvservice.server import descriptors
from kvservice.server.clock import Clock, SystemClock
from kvservice.server.host_access import HostAccess
from kvservice.server.server_tiers import open_chain
from kvservice.server.store_copies import StoreCopies
from kvservice.server.store_writers import StoreWriters
from kvservice.store import (
    BlockStore,
    SessionStore,
    StoreConfig,
    StoreRecords,
    StoreRecovery,
    StoreSections,
    recover,
)
from kvservice.tiers import ChildrenPipe, TierChain

logger = logging.getLogger(__name__)

# Sizes of a slab without its records, powers of two: blocks of such a size fill a slab.
_SLAB_BYTES_MIN, _SLAB_BYTES_MAX, _NUM_SLABS = 4 << 20, 64 << 20, 64
# Share of a slab for records: they suffice for blocks of 64 KiB. Slabs of smaller blocks have a little less room.
_RECORDS_PART = 1024


def store_config(config: ServeConfig) -> StoreConfig:
    """Return the sizes of the store: whole slabs, with room for at most as many bytes of values as configured."""
    wanted = int(config.store_gib * GIB)
    room = min(_SLAB_BYTES_MAX, max(_SLAB_BYTES_MIN, 1 << (wanted // _NUM_SLABS).bit_length() - 1))
    slab_bytes = room + room // _RECORDS_PART
    num_slabs = wanted // room
    capacity_bytes = num_slabs * room
    return StoreConfig(
        num_slabs * slab_bytes,
        capacity_bytes,
        slab_bytes,
        config.max_store_namespaces,
        min(int(config.store_quota_gib * GIB), capacity_bytes) or capacity_bytes,
        config.max_lease_s,
        config.max_labels,
    )


@dataclass(frozen=True)
class ServerStore:
    """The store of a daemon. `shared` says how clients may map `memory`. The index is in `index_memory`. `chain` has
    the tiers below; None: there are none."""

    blocks: BlockStore
    memory: SealedMemory
    index_memory: SealedMemory
    copies: StoreCopies
    writers: StoreWriters
    shared: str
    chain: TierChain | None = None

    def recover(self, sessions: Mapping[int, SessionStore]) -> StoreRecovery:
        """Give the sessions of the process before, by id, what they had in the store. Called once, in the event loop,
        before the store is used."""
        try:
            return recover(self.blocks, sessions, self.writers.recover())
        except BaseException:  # corrupt state is dropped, with its memory
            self.writers.close()
            self.blocks.leases.close()
            raise

    def share(self, own: SessionStore, access: HostAccess, writable: bool) -> bytes:
        """Let the session's client map the memory. Returns a handover token. Raises StoreNotSharedError,
        ResourceExhaustedError, QuotaExceededError.

        With "read", a seal of the memory keeps every process but the daemon from writing, whatever descriptor it has.
        With "auto", and with "read" where a keeper keeps the memory, it has no seal: there the mode of the file keeps
        other users from opening their descriptor again for writing (kvservice.pool.sealed). With "write", a descriptor
        for reading only prevents accidents: its owner is trusted to write.
        """
        if self.shared == "off" or (writable and self.shared == "read"):
            raise StoreNotSharedError(f"the daemon runs with --share-store {self.shared}", field="writable")
        access.user.check_may_map_store(writable=writable)
        mode = os.O_RDWR if writable else os.O_RDONLY
        with descriptors.needed():
            descriptor = os.open(f"/proc/self/fd/{self.memory.fd}", mode | os.O_CLOEXEC)
        if not writable:
            return access.offer_store(descriptor, lambda _: None)
        return access.offer_store(descriptor, lambda connection: own.add_writer(self.writers.add(connection)))


def open_store(
    config: ServeConfig, journal: EventJournal | None, kept: KeptState, clock: Clock | None = None
) -> ServerStore | None:
    """Open the store, the one of the daemon's process before if that is kept, or return None if the daemon has none.
    Raises ResourceExhaustedError."""
    if not config.store_gib:
        return None
    sizes = store_config(config)
    children = _children(config, kept)
    try:
        read_only, children_write = config.shares_store in ("off", "read"), bool(config.mooncake)
        memory = kept.memory("store", sizes.num_bytes, read_only=read_only, children_write=children_write)
        if config.shares_store == "auto":
            os.fchmod(memory.fd, stat.S_IRUSR | stat.S_IWUSR)
        index_bytes = _ext.StoreIndex.kept_bytes(sizes.num_bytes, sizes.slab_bytes)
        index_memory = kept.memory("store-index", index_bytes, read_only=False, sparse=True)
    except OSError as error:
        raise ResourceExhaustedError(
            f"the block store takes {sizes.num_bytes / GIB:.2f} GiB, {available_bytes() / GIB:.2f} GiB are available: "
            f"{error.strerror}",
            field="store_gib",
        ) from None
    seed = secrets.randbits(64)
    index = _ext.StoreIndex(memory.address, sizes.num_bytes, sizes.slab_bytes, seed, index_memory.address)
    records = StoreRecords(_sections(kept))
    blocks = BlockStore(sizes, index, clock or SystemClock(), journal, records)
    copies = StoreCopies(memory.address, config.store_copy_threads)
    chain = open_chain(config, blocks, memory, children, clock)
    return ServerStore(blocks, memory, index_memory, copies, StoreWriters(blocks), config.shares_store, chain)


def _children(config: ServeConfig, kept: KeptState) -> ChildrenPipe:
    """Return the pipe of child processes that have the store's memory mapped. Those of the process before have ended
    then. Raises ResourceExhaustedError if they have not in time."""
    found = kept.descriptor("children")
    children = ChildrenPipe(found)
    if found is not None and not children.have_ended():
        reason = "child processes of the process before still use the store's memory"
        raise ResourceExhaustedError(reason, field="mooncake")
    if found is None and config.mooncake:
        kept.put_descriptor("children", os.dup(children.fd))
    return children


def _sections(kept: KeptState) -> StoreSections:
    section = kept.table.section
    return StoreSections(
        section(Section.STORE_NAMESPACES),
        section(Section.STORE_OPENINGS),
        section(Section.STORE_LEASES),
        section(Section.STORE_RESERVATIONS),
        section(Section.STORE_WRITERS),
        section(Section.STORE_SESSION_WRITERS),
    )
