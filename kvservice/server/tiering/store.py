"""The daemon's block store: its memory, its index, its copies, and the tiers below it."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import functools
import logging
import mmap
import os
import secrets
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from kvservice import _ext
from kvservice.blocks import EventJournal
from kvservice.config import GIB, ServeConfig
from kvservice.errors import InvalidArgumentError, RegionShrunkError, ResourceExhaustedError, StoreNotSharedError
from kvservice.keeper.private_paths import private_folder, why_unusable
from kvservice.kept import Facts, KeptState, Section
from kvservice.mooncake import PRELOADED, MooncakeOptions, numeric_address
from kvservice.owned import OwnedProcess
from kvservice.pool.sealed import SAY_EVERY_S, SealedMemory, available_bytes, num_processors
from kvservice.server.loop import Clock, SystemClock
from kvservice.server.memory.budget import RESERVE_BYTES, Budget, descriptors_needed
from kvservice.server.memory.fd_passing import Writers
from kvservice.server.memory.host import SharedWithClient
from kvservice.server.memory.region import Array, Places, Region
from kvservice.server.memory.remote import RemoteMemory
from kvservice.store import (
    BlockStore,
    SessionStore,
    StoreConfig,
    StoreRecords,
    StoreRecovery,
    StoreSections,
    recover,
)
from kvservice.tiers import ChildrenPipe, DiskOptions, DiskTier, LateTier, LowerTier, TierChain, TierError, WritePolicy
from kvservice.tiers.mooncake import MooncakeTier

logger = logging.getLogger(__name__)

# Sizes of a slab without its records, powers of two: blocks of such a size fill a slab.
_SLAB_BYTES_MIN, _SLAB_BYTES_MAX, _NUM_SLABS = 4 << 20, 64 << 20, 64
# Share of a slab for records: they suffice for blocks of 64 KiB. Slabs of smaller blocks have a little less room.
_RECORDS_PART = 1024
# Seconds for the import of Mooncake's library.
_IMPORT_S: Final = 60.0


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
    """The store of a daemon. `shared` says how clients may map `memory`, as far as it is there, see `growth`. The index
    is in `index_memory`. `chain` has the tiers below; None: there are none."""

    blocks: BlockStore
    memory: SealedMemory
    index_memory: SealedMemory
    copies: StoreCopies
    writers: Writers
    shared: str
    growth: StoreGrowth
    chain: TierChain | None = None

    @property
    def ready_bytes(self) -> int:
        """The room for blocks whose memory is there."""
        return self.blocks.config.capacity_bytes * self.growth.ready_bytes // self.memory.num_bytes

    def recover(self, sessions: Mapping[int, SessionStore]) -> StoreRecovery:
        """Give the sessions of the process before, by id, what they had in the store. Called once, in the event loop,
        before the store is used."""
        try:
            return recover(self.blocks, sessions, self.writers.recover())
        except BaseException:  # corrupt state is dropped, with its memory
            self.writers.close()
            self.blocks.leases.close()
            raise

    def share(self, own: SessionStore, shared: SharedWithClient, writable: bool) -> bytes:
        """Let the session's client map the memory. Returns a handover token. Raises StoreNotSharedError,
        ResourceExhaustedError, QuotaExceededError.

        With "read", a seal of the memory keeps every process but the daemon from writing, with any descriptor.
        With "auto", and with "read" where a keeper keeps the memory, it has no seal: there the mode of the file keeps
        other users from opening their descriptor again for writing (kvservice.pool.sealed). With "write", a descriptor
        for reading only prevents accidents: its owner is trusted to write.
        """
        if self.shared == "off" or (writable and self.shared == "read"):
            raise StoreNotSharedError(f"the daemon runs with --share-store {self.shared}", field="writable")
        shared.user.check_may_map_store(writable=writable)
        mode = os.O_RDWR if writable else os.O_RDONLY
        with descriptors_needed():
            descriptor = os.open(f"/proc/self/fd/{self.memory.fd}", mode | os.O_CLOEXEC)
        if not writable:
            return shared.offer_store(descriptor, lambda _: None)
        return shared.offer_store(descriptor, lambda connection: own.add_writer(self.writers.add(connection)))


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
        # Mooncake's library registers all of the memory at once, for RDMA it pins it.
        grows = sizes.num_bytes > WHOLE_BYTES and not config.mooncake
        memory = kept.memory(
            "store",
            sizes.num_bytes,
            read_only=read_only,
            children_write=children_write,
            first_bytes=FIRST_BYTES if grows else None,
        )
        if grows and not kept.taken:
            StoreGrowth.begin(memory, sizes.slab_bytes, kept.facts)
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
    copies = StoreCopies(memory, config.store_copy_threads)
    growth = StoreGrowth(memory, blocks, kept.facts)
    chain = open_chain(config, blocks, memory, children, clock)
    writers = Writers("the block store", records.writers, blocks.quarantine.ended)
    return ServerStore(blocks, memory, index_memory, copies, writers, config.shares_store, growth, chain)


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


# ---- the memory of a large store, most of which comes while the daemon serves

# A larger store than WHOLE_BYTES has FIRST_BYTES of its memory when the daemon serves.
WHOLE_BYTES: Final = 2 << 30
FIRST_BYTES: Final = 1 << 30
# What is allocated between two looks at how much memory the host has, and the part of it that a thread takes.
ROUND_BYTES: Final = 512 << 20
PART_BYTES: Final = 32 << 20
# The time between two attempts when the host has no more memory.
AGAIN_S: Final = 10.0
# Kept as a fact of the state while the memory is not complete: the bytes that are there.
READY: Final = "store_ready_bytes"
_NICE: Final = 10


class StoreGrowth:
    """Allocates the rest of a store's memory in threads of lower priority, and gives it to the store round by round.
    `ready_bytes` are there. Nobody touches what is not, but for the first page of each slab, in which clients look for
    records: a process that touches a page for which there is no memory is killed."""

    def __init__(self, memory: SealedMemory, blocks: BlockStore, facts: Facts) -> None:
        """Limit the store to the memory that is there, of this process or of the one before."""
        self._memory, self._blocks, self._facts = memory, blocks, facts
        self.ready_bytes: int = facts.get(READY, memory.num_bytes)
        self._is_short = False
        if not self.is_complete:
            blocks.set_ready(self.ready_bytes)

    @staticmethod
    def begin(memory: SealedMemory, slab_bytes: int, facts: Facts) -> None:
        """Make new memory ready of which FIRST_BYTES are allocated. Raises OSError."""
        for slab in range(0, memory.num_bytes, slab_bytes):
            memory.allocate(slab, mmap.PAGESIZE)
        facts[READY] = FIRST_BYTES

    @property
    def is_complete(self) -> bool:
        return self.ready_bytes == self._memory.num_bytes

    @property
    def note(self) -> str:
        """Return what a health check says of the memory, or an empty string if it is complete."""
        if self.is_complete:
            return ""
        said = f"the block store has {self.ready_bytes / GIB:.1f} of {self._memory.num_bytes / GIB:.1f} GiB of memory"
        return f"{said}: the host has no more, which is tried again each {AGAIN_S:g} s" if self._is_short else said

    async def run(self, budget: Budget, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        """Allocate until the memory is complete. Other memory that sessions share with the daemon leaves room for
        it."""
        if self.is_complete:
            return
        threads = ThreadPoolExecutor(max(1, num_processors() // 2), "kvservice-growth", _be_nice)
        began_s = said_s = time.monotonic()
        try:
            while not self.is_complete:
                budget.reserve_bytes = RESERVE_BYTES + self._memory.num_bytes - self.ready_bytes
                end = min(self.ready_bytes + ROUND_BYTES, self._memory.num_bytes)
                try:
                    await self._allocate(end, threads)
                except OSError as error:
                    if not self._is_short:
                        self._is_short = True
                        logger.error("%s (%s)", self.note, error.strerror)
                    await sleep(AGAIN_S)
                    continue
                self._is_short = False
                self._set_ready(end)
                if time.monotonic() - said_s >= SAY_EVERY_S and not self.is_complete:
                    said_s = time.monotonic()
                    logger.info("%s", self.note)
            took_s = time.monotonic() - began_s
            if took_s >= SAY_EVERY_S:
                logger.info("the block store has all of its memory, %.1f s later", took_s)
        finally:
            budget.reserve_bytes = RESERVE_BYTES
            threads.shutdown(cancel_futures=True)  # they end within a part

    async def _allocate(self, end: int, threads: Executor) -> None:
        """Raises OSError."""
        if end - self.ready_bytes > available_bytes():
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        loop = asyncio.get_running_loop()
        parts = [(at, min(PART_BYTES, end - at)) for at in range(self.ready_bytes, end, PART_BYTES)]
        await asyncio.gather(*(loop.run_in_executor(threads, self._memory.allocate, *part) for part in parts))

    def _set_ready(self, num_bytes: int) -> None:
        self.ready_bytes = num_bytes
        if self.is_complete:
            self._facts.pop(READY, None)
        else:
            self._facts[READY] = num_bytes
        self._blocks.set_ready(num_bytes)


def _be_nice() -> None:
    """Lower the priority of this thread."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


# ---- copies between the memory of the store and requests, responses or regions

T = TypeVar("T")

# Copies of at most so many bytes run on the event loop: a thread would take longer to start.
SHORT_BYTES: Final = 256 << 10
# Blocks that came in a message are copied on the event loop up to this size: gRPC takes longer to receive them there.
SHORT_IN_MESSAGE_BYTES: Final = 4 << 20
# The size of the buffer for a region whose memory is not mapped, unless one block is larger.
BUFFER_BYTES: Final = 8 << 20


class StoreCopies:
    """Copies at the addresses of one store, natively and without the interpreter lock.

    Short ones run on the event loop, others in threads. At most `num_threads` run at once, others wait in order; a copy
    has all threads if no other one runs.
    """

    def __init__(self, memory: SealedMemory, num_threads: int) -> None:
        self._memory, self._num_threads = memory.address, num_threads
        self._view = memoryview((ctypes.c_ubyte * memory.num_bytes).from_address(memory.address)).cast("B")
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kvservice-store")
        self._num_running = 0

    def views(self, offsets: bytes, block_bytes: int) -> tuple[memoryview, ...]:
        """Return views of blocks in the store."""
        return tuple(self._view[at : at + block_bytes] for at in np.frombuffer(offsets, np.uint64).tolist())

    async def checksums(self, offsets: bytes, block_bytes: int) -> bytes:
        """Return the checksums of blocks in the store."""

        def compute(num_threads: int) -> bytes:
            return _ext.store_checksums(self._memory, offsets, block_bytes, num_threads)

        return await self._run(len(offsets) // 8 * block_bytes, compute)

    async def write(
        self, offsets: bytes, block_bytes: int, source: Array, places: Places, short_bytes: int = SHORT_BYTES
    ) -> bytes:
        """Copy blocks from `source`, uint8, into the store. Returns their checksums."""

        def copy(num_threads: int) -> bytes:
            return self._copy_in(offsets, block_bytes, source, places, num_threads)

        return await self._run(len(offsets) // 8 * block_bytes, copy, short_bytes)

    async def read(self, offsets: bytes, block_bytes: int, target: Array, places: Places, checksums: bytes) -> bytes:
        """Copy blocks of the store into `target`, uint8. Returns a bitmap of those with the expected checksum, or of
        all if `checksums` is empty."""

        def copy(num_threads: int) -> bytes:
            return self._copy_out(offsets, block_bytes, target, places, checksums, num_threads)

        return await self._run(len(offsets) // 8 * block_bytes, copy)

    async def write_from(self, offsets: bytes, block_bytes: int, region: Region, places: Places) -> bytes:
        """`write` from a region. Raises RegionShrunkError, TransferFailedError."""
        if isinstance(memory := region.memory, RemoteMemory):
            return b"".join(
                await memory.run(lambda: memory.pull(places, block_bytes, self._take(offsets, block_bytes)))
            )
        view = region.memory.view(0, region.byte_size)
        if view is not None:
            return await self.write(offsets, block_bytes, view, places)

        def copy(num_threads: int) -> bytes:
            checksums = []
            for first, part in _parts(places, block_bytes):
                rows = np.concatenate([_read(region, int(at), int(n)) for at, n in part.ranges()])
                some = offsets[8 * first : 8 * (first + len(part))]
                inside = Places.packed(len(part), block_bytes)
                checksums.append(self._copy_in(some, block_bytes, rows, inside, num_threads))
            return b"".join(checksums)

        return await self._run(len(offsets) // 8 * block_bytes, copy)

    async def read_into(
        self, offsets: bytes, block_bytes: int, region: Region, places: Places, checksums: bytes
    ) -> bytes:
        """`read` into a region. Raises RegionShrunkError, ResourceExhaustedError, TransferFailedError."""
        if isinstance(memory := region.memory, RemoteMemory):
            give = self._give(offsets, block_bytes, checksums)
            flags = await memory.run(lambda: memory.push(places, block_bytes, give))
            return np.packbits(np.concatenate([np.zeros(0, np.uint8), *flags]), bitorder="little").tobytes()
        view = region.memory.view(0, region.byte_size)
        if view is not None:
            return await self.read(offsets, block_bytes, view, places, checksums)

        def copy(num_threads: int) -> bytes:
            bits = []
            for first, part in _parts(places, block_bytes):
                rows = np.empty(len(part) * block_bytes, np.uint8)
                chosen = slice(8 * first, 8 * (first + len(part)))
                inside = Places.packed(len(part), block_bytes)
                good = self._copy_out(offsets[chosen], block_bytes, rows, inside, checksums[chosen], num_threads)
                begin = 0
                for at, n in part.ranges():
                    _write(region, int(at), rows[begin : begin + int(n)])
                    begin += int(n)
                bits.append(np.unpackbits(np.frombuffer(good, np.uint8), count=len(part), bitorder="little"))
            return np.packbits(np.concatenate(bits), bitorder="little").tobytes()

        return await self._run(len(offsets) // 8 * block_bytes, copy)

    def _take(self, offsets: bytes, block_bytes: int) -> Callable[[int, int, Array], bytes]:
        """Return a function that copies blocks of a slot into the store, and returns their checksums."""

        def take(first: int, count: int, slot: Array) -> bytes:
            inside = Places.packed(count, block_bytes)
            return self._copy_in(offsets[8 * first : 8 * (first + count)], block_bytes, slot, inside, self._num_threads)

        return take

    def _give(self, offsets: bytes, block_bytes: int, checksums: bytes) -> Callable[[int, int, Array], Array]:
        """Return a function that copies blocks of the store into a slot, and returns a bit for each: whether its
        checksum was right."""

        def give(first: int, count: int, slot: Array) -> Array:
            chosen, inside = slice(8 * first, 8 * (first + count)), Places.packed(count, block_bytes)
            good = self._copy_out(offsets[chosen], block_bytes, slot, inside, checksums[chosen], self._num_threads)
            return np.unpackbits(np.frombuffer(good, np.uint8), count=count, bitorder="little")

        return give

    def _copy_in(self, offsets: bytes, block_bytes: int, source: Array, places: Places, num_threads: int) -> bytes:
        return _ext.store_copy_in(
            self._memory,
            offsets,
            block_bytes,
            source.ctypes.data,
            places.offsets.tobytes(),
            places.piece_bytes.tobytes(),
            num_threads,
        )

    def _copy_out(
        self, offsets: bytes, block_bytes: int, target: Array, places: Places, checksums: bytes, num_threads: int
    ) -> bytes:
        return _ext.store_copy_out(
            self._memory,
            offsets,
            block_bytes,
            target.ctypes.data,
            places.offsets.tobytes(),
            places.piece_bytes.tobytes(),
            checksums,
            num_threads,
        )

    async def _run(self, num_bytes: int, copy: Callable[[int], T], short_bytes: int = SHORT_BYTES) -> T:
        """Run `copy` with a number of threads. The caller must not be cancelled meanwhile."""
        if num_bytes <= short_bytes:
            return copy(1)
        self._num_running += 1
        try:
            share = max(1, self._num_threads // self._num_running)
            return await asyncio.get_running_loop().run_in_executor(self._threads, copy, share)
        finally:
            self._num_running -= 1


def _parts(places: Places, block_bytes: int) -> Iterator[tuple[int, Places]]:
    """Split places into parts that fit the buffer. Yields the number of the first block, and the part."""
    most = max(1, BUFFER_BYTES // block_bytes)
    for first in range(0, len(places), most):
        yield first, Places(places.piece_bytes, places.offsets[first : first + most])


def _read(region: Region, begin: int, num_bytes: int) -> Array:
    try:
        return region.memory.read(begin, num_bytes)
    except RegionShrunkError as error:
        error.field = "region.region"
        raise


def _write(region: Region, begin: int, data: Array) -> None:
    try:
        region.memory.write(begin, data)
    except (RegionShrunkError, ResourceExhaustedError) as error:
        error.field = "region.region"
        raise


# ---- the tiers below the store that the configuration names


def open_chain(
    config: ServeConfig,
    blocks: BlockStore,
    memory: SealedMemory,
    children: ChildrenPipe,
    clock: Clock | None = None,
) -> TierChain | None:
    """Return the chain of tiers below the block store, or None if the configuration names none. Tiers open in the
    background: values in them are misses until then."""
    clock = clock or SystemClock()
    tiers = _named_tiers(config, memory, children, clock)
    # Other daemons find in the Mooncake Store at once what one has computed.
    policies = {"disk": WritePolicy(config.disk_admission), "mooncake": WritePolicy(soon=True)}
    return TierChain(blocks, tiers, clock, policies) if tiers else None


def _named_tiers(config: ServeConfig, memory: SealedMemory, children: ChildrenPipe, clock: Clock) -> list[LowerTier]:
    """Return the tiers in the order in which they are asked: the fastest first."""
    tiers: list[LowerTier] = []
    if config.disk_gib:
        tiers.append(LateTier("disk", functools.partial(_open_disk, config, memory), clock))
    if config.mooncake:
        tiers.append(open_mooncake(config, memory, children))
    return tiers


def _open_disk(config: ServeConfig, memory: SealedMemory) -> DiskTier:
    """Raises TierError, also while another process has the directory."""
    directory = Path(config.disk) / "values"
    try:
        private_folder(directory)
    except OSError as error:
        raise TierError(why_unusable(error, directory)) from None
    options = DiskOptions(directory, int(config.disk_gib * GIB), num_threads=config.disk_threads)
    return DiskTier(options, memory.address, memory.num_bytes)


def check_mooncake(config: ServeConfig) -> None:
    """Raise InvalidArgumentError if a Mooncake Store is configured, but its library cannot be used here, or the address
    is none of a host. The library is tried in another process."""
    if not config.mooncake:
        return
    _mooncake_options(config)
    if not PRELOADED.exists():
        raise InvalidArgumentError(f"{PRELOADED} is missing: build the native code again", field="mooncake")
    command = [sys.executable, "-P", "-c", "import mooncake.store"]
    with OwnedProcess(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as tried:
        try:
            errors = tried.communicate(timeout=_IMPORT_S)[1].decode(errors="replace").strip()
        except subprocess.TimeoutExpired:
            tried.kill()
            raise InvalidArgumentError(
                f"Mooncake's library is not imported within {_IMPORT_S:g} s", field="mooncake"
            ) from None
    if tried.returncode:
        reason = (errors or f"it ends with {tried.returncode}").splitlines()[-1]
        raise InvalidArgumentError(
            f"Mooncake's library cannot be used: {reason}: install kvservice[mooncake], and the libraries that "
            "deploy/README.md names",
            field="mooncake",
        )


def open_mooncake(config: ServeConfig, memory: SealedMemory, children: ChildrenPipe) -> LowerTier:
    """Return the tier. To be called in the event loop."""
    options = _mooncake_options(config)
    return MooncakeTier.open(options, memory.fd, memory.num_bytes, config.mooncake_segment_gib, children)


def _mooncake_options(config: ServeConfig) -> MooncakeOptions:
    """Raises InvalidArgumentError."""
    try:
        address = numeric_address(config.mooncake_address)
    except OSError as error:
        raise InvalidArgumentError(f"{config.mooncake_address}: {error}", field="mooncake_address") from None
    return MooncakeOptions(
        config.mooncake, address, config.mooncake_metadata, config.mooncake_protocol, config.mooncake_device
    )
