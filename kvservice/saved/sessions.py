"""Saved sessions: a session's sequences are written to a file, and read back.

write: reserve room ─▶ blocks ─▶ manifest ─▶ header ─▶ rename          read: header ─▶ manifest ─▶ blocks
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np

from kvservice.blocks import RestoredBlocks, SavedTables
from kvservice.blocks.plans import BoolArray, Int64Array
from kvservice.devices import Device
from kvservice.devices.base import PoolName, UInt64
from kvservice.errors import DiskFailedError, DiskFullError, SessionNotRestoredError
from kvservice.saved.files import (
    DirectFile,
    FileEntry,
    NewFile,
    NotRegularError,
    SavedFiles,
    aligned_memory,
    name_of,
    read_header,
)
from kvservice.saved.format import (
    SECTOR_BYTES,
    DamagedFileError,
    FileHeader,
    Manifest,
    SessionValues,
    digest_of,
    rounded_up,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class OpenedSession:
    """A file of a session that is being read. The reader closes `file`."""

    name: str
    file: DirectFile
    manifest: Manifest


class SessionFiles:
    """Writes and reads the files of sessions. `identity` says which files this daemon can use: those with the same
    one."""

    def __init__(
        self,
        files: SavedFiles,
        device: Device,
        block_size: int,
        block_bytes: int,
        identity: Mapping[str, Any],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.files = files
        self._transfers = BlockTransfers(device, block_bytes)
        self._block_size, self._block_bytes = block_size, block_bytes
        self._identity = dict(identity)
        self._wall = wall
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def write(
        self, token: bytes, session: SessionValues, tables: SavedTables, ttl_s: float, check: Callable[[], None]
    ) -> int:
        """Write the file of a session, in place of an older one, as `write_as`. It expires after `ttl_s` seconds."""
        return await self.write_as(name_of(token), session, tables, ttl_s, check)

    async def write_as(
        self, name: str, session: SessionValues, tables: SavedTables, ttl_s: float, check: Callable[[], None]
    ) -> int:
        """Write a file, in place of an older one. Returns its size in bytes when it is on the disk. It expires after
        `ttl_s` seconds, or NEVER.

        `check` raises an error if others may use the blocks of `tables` by now. Must not be cancelled. Raises
        QuotaExceededError, DiskFullError, DiskFailedError, and the errors of `check`; an older file stays then.
        """
        computed = tables.saved.computed_blocks(self._block_size)
        count = int(np.count_nonzero(computed))
        places = FilePlaces(np.arange(count), tables.block_ids[computed], tables.in_swap[computed])
        manifest = self._manifest(name, session, tables, np.zeros(count, np.uint64))
        offset = self._transfers.offset(count)
        num_bytes = rounded_up(offset + len(manifest))
        self.files.reserve(num_bytes, session.tenant)
        try:
            with self._disk_errors():
                await self._transfers.run(self.files.check_folder)
                file = await self._transfers.run(NewFile, self.files.folder, name)
                try:
                    checksums = await self._transfers.save(file.file, places, check)
                    manifest = self._manifest(name, session, tables, checksums)
                    header = FileHeader(
                        self._wall() + ttl_s, offset, len(manifest), digest_of(manifest), session.tenant
                    )
                    async with self._lock_of(name):
                        await self._transfers.run(_commit, file, manifest, header)
                        ends_at = self.files.now() + ttl_s
                        entry = FileEntry(num_bytes, ends_at, frozenset(session.on_disk), session.tenant)
                        self.files.add(name, entry)
                except BaseException:
                    await self._transfers.run(file.discard)
                    raise
        finally:
            self.files.release(num_bytes, session.tenant)
        return num_bytes

    def _lock_of(self, name: str) -> asyncio.Lock:
        """Return what is held while the file of this name is put there or removed."""
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock

    def _manifest(self, name: str, session: SessionValues, tables: SavedTables, checksums: UInt64) -> bytes:
        saved, identity = tables.saved, self._identity
        return Manifest(name, identity, session, saved, self._block_size, self._block_bytes, checksums).to_bytes()

    def has(self, token: bytes) -> bool:
        """Return whether there is a file for the session with this token."""
        return self.files.find(name_of(token)) is not None

    def tenant_of(self, token: bytes) -> str:
        """Return the tenant of a session's file, or an empty string if it is unknown."""
        entry = self.files.entry(name_of(token))
        return "" if entry is None else entry.tenant

    async def open(self, token: bytes) -> OpenedSession | None:
        """Open the file of a session and read its manifest. Returns None if there is none. Raises
        SessionNotRestoredError and DiskFailedError."""
        return await self.open_as(name_of(token))

    async def open_as(self, name: str) -> OpenedSession | None:
        """Do as `open` for the file of this name."""
        path = self.files.find(name)
        if path is None:
            return None
        try:
            with self._disk_errors(), contextlib.suppress(FileNotFoundError):
                return OpenedSession(name, *await self._transfers.run(_open, path))
            with self._disk_errors():
                await self._transfers.run(self.files.check_folder)
        except DamagedFileError as error:
            raise self.refused(name, error) from None
        if name in self.files:
            raise self.refused(name, DamagedFileError("it is missing"))
        return None  # it was removed meanwhile

    def check_identity(self, opened: OpenedSession) -> None:
        """Raise SessionNotRestoredError if the bytes are of no use to this daemon."""
        theirs = opened.manifest.identity
        names = sorted(
            name for name in theirs.keys() | self._identity.keys() if theirs.get(name) != self._identity.get(name)
        )
        if names:
            differences = ", ".join(
                f"{name} was {theirs.get(name)!r}, is {self._identity.get(name)!r}" for name in names
            )
            raise SessionNotRestoredError(
                f"the session was saved for another model: {differences}", cause="another_model"
            )

    async def load(self, opened: OpenedSession, restored: RestoredBlocks) -> int:
        """Read the blocks that the restored sequences lack. Returns how many they are. Must not be cancelled. Raises
        SessionNotRestoredError and DiskFailedError; the blocks are of no use then."""
        manifest = opened.manifest
        computed = np.flatnonzero(manifest.saved.computed_blocks(manifest.block_size))
        slots = np.flatnonzero(~restored.found[computed] & (restored.block_ids[computed] >= 0))
        numbers = computed[slots]
        order = np.argsort(restored.in_swap[numbers], kind="stable")
        slots, numbers = slots[order], numbers[order]
        places = FilePlaces(slots, restored.block_ids[numbers], restored.in_swap[numbers])
        try:
            with self._disk_errors():
                await self._transfers.load(opened.file, places, manifest.checksums[slots])
        except DamagedFileError as error:
            raise self.refused(opened.name, error) from None
        return len(slots)

    def refused(self, name: str, error: DamagedFileError) -> SessionNotRestoredError:
        """Report a damaged file. Returns the error for the client."""
        self.files.report_damaged(name, error)
        return SessionNotRestoredError(f"the file of the saved session is damaged: {error}", cause="damaged")

    async def remove(self, token: bytes) -> None:
        """Remove the files of a session, if they are there. Raises DiskFailedError."""
        for name in (name_of(token), *self.files.swapped_of(token)):
            await self.remove_as(name)

    async def keep_swapped(self, token: bytes, names: Collection[str]) -> None:
        """Remove the files with swapped sequences of a session, except those with these names. Raises
        DiskFailedError."""
        for name in self.files.swapped_of(token):
            if name not in names:
                await self.remove_as(name)

    async def remove_swapped(self, token: bytes, name: str) -> None:
        """Remove a file with swapped sequences, unless the session's saved state needs it. Raises DiskFailedError."""
        if name not in await self._swapped_in(token):
            await self.remove_as(name)

    async def _swapped_in(self, token: bytes) -> frozenset[str]:
        """Return the names of the files with swapped sequences that the session's saved state needs."""
        saved = name_of(token)
        entry = self.files.entry(saved)
        if entry is None:
            return frozenset()
        if entry.swapped is not None:
            return entry.swapped
        swapped: frozenset[str] = frozenset()
        with contextlib.suppress(SessionNotRestoredError):  # a damaged state is never restored
            if (opened := await self.open_as(saved)) is not None:
                opened.file.close()
                swapped = frozenset(opened.manifest.session.on_disk)
        if self.files.entry(saved) is entry:
            self.files.add(saved, dataclasses.replace(entry, swapped=swapped))
        return swapped

    async def expire(self, open_sessions: Callable[[], Iterable[bytes]]) -> int:
        """Remove the files whose time is over, and those of sessions that have ended, and note which files others have
        removed. `open_sessions` returns the tokens of the sessions that have not ended. Returns how many have expired.
        Raises DiskFailedError, also if nothing has expired and the folder is gone."""
        with self._disk_errors():
            known = set(self.files)
            there = await self._transfers.run(self.files.names)
            self.files.note_missing({name for name in known - there if name in self.files})
        num_expired = 0
        for name in self.files.expired():
            if self.files.entry(name) is None:  # else it was written anew meanwhile
                await self.remove_as(name)
                num_expired += 1
        for name in self.files.orphans(open_sessions()):
            await self.remove_as(name)
        return num_expired

    async def remove_as(self, name: str) -> None:
        """Remove a file, if it is there. It is not found from now on. If this raises DiskFailedError, it is found
        again."""
        entry = self.files.forget(name)
        if entry is None:
            return
        async with self._lock_of(name):
            if name in self.files:  # written anew, in its place
                return
            try:
                with self._disk_errors():
                    await self._transfers.run(self.files.unlink, name)
            except BaseException:
                self.files.add(name, entry)
                raise

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Report an OSError, and raise DiskFullError or DiskFailedError for it."""
        try:
            yield
            self.files.fault = ""
        except OSError as error:
            self.files.report_failure(error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFullError(f"the disk has no room for the session: {error}") from None
            raise DiskFailedError(f"the disk with the saved sessions failed: {error}") from None

    def close(self) -> None:
        """End the threads after their work, and let other daemons use the folder."""
        self._transfers.close()
        self.files.close()
        logger.info("saved sessions in %s: %d are kept", self.files.folder, self.files.num_sessions)


def _commit(file: NewFile, manifest: bytes, header: FileHeader) -> None:
    memory = aligned_memory(len(manifest))
    memory[: len(manifest)] = manifest
    file.file.write(memoryview(memory)[: rounded_up(len(manifest))], header.manifest_offset)
    file.commit(header)


def _open(path: Path) -> tuple[DirectFile, Manifest]:
    """Raises DamagedFileError and OSError."""
    try:
        file = DirectFile(path, os.O_RDONLY)
    except NotRegularError as error:
        raise DamagedFileError(str(error.strerror)) from None
    try:
        manifest = _read_manifest(file)
        if manifest.file_name != path.name:
            raise DamagedFileError(f"it was written as {manifest.file_name}")
        return file, manifest
    except BaseException:
        file.close()
        raise


def _read_manifest(file: DirectFile) -> Manifest:
    header = read_header(file)
    memory = aligned_memory(header.manifest_bytes)
    file.read(memoryview(memory)[: rounded_up(header.manifest_bytes)], header.manifest_offset)
    data = memory[: header.manifest_bytes]
    if digest_of(data) != header.manifest_digest:
        raise DamagedFileError("its manifest is damaged")
    return Manifest.from_bytes(data)


# ---- blocks between the pools of a device and a file, in pieces of several blocks, some of which are in progress at
# once
#
# save:   device ──save_blocks──▶ piece ──thread──▶ file          load:   file ──thread──▶ piece ──load_blocks──▶ device


# The size of a piece, unless a block is larger, and how many pieces are in progress.
PIECE_BYTES: Final = 8 << 20
NUM_PIECES: Final = 4


@dataclass(frozen=True, eq=False)
class FilePlaces:
    """Blocks, each with its place in the file, int64[n] in ascending order, and in a pool: block_ids int64[n] of the
    swap tier where in_swap bool[n] is true."""

    slots: Int64Array
    block_ids: Int64Array
    in_swap: BoolArray


@dataclass(frozen=True, eq=False)
class Piece:
    """Part of the blocks of FilePlaces. They are in one pool."""

    part: slice
    slots: Int64Array
    block_ids: Int64Array
    pool: PoolName

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """Yield (first place in the piece, first slot, number of blocks) of each contiguous range of slots."""
        ends = [*(np.flatnonzero(np.diff(self.slots) != 1) + 1).tolist(), len(self.slots)]
        first = 0
        for end in ends:
            yield first, int(self.slots[first]), end - first
            first = end


class BlockTransfers:
    """Copies blocks between a device and files. All methods are for the event loop."""

    def __init__(self, device: Device, block_bytes: int) -> None:
        self.stride = rounded_up(block_bytes)
        self._device = device
        self._piece_blocks = max(1, PIECE_BYTES // self.stride)
        self._threads = ThreadPoolExecutor(NUM_PIECES, thread_name_prefix="saved")

    def run(self, call: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        """Run a function that blocks in a thread."""
        return asyncio.get_running_loop().run_in_executor(self._threads, call, *args)

    async def save(self, file: DirectFile, places: FilePlaces, check: Callable[[], None]) -> UInt64:
        """Write blocks into a file. Returns their checksums uint64[n]. `check` raises an error if others may use the
        blocks by now. Must not be cancelled. Raises OSError."""
        checksums = np.zeros(len(places.slots), np.uint64)

        async def save(piece: Piece, memory: memoryview, addresses: UInt64) -> None:
            check()
            blocks = piece.block_ids.astype(np.int32)
            checksums[piece.part] = await self._device.save_blocks(blocks, addresses, piece.pool)
            check()
            for first, slot, count in piece.ranges():
                data = memory[first * self.stride : (first + count) * self.stride]
                await self.run(file.write, data, self.offset(slot))

        await self._in_pieces(places, save)
        return checksums

    async def load(self, file: DirectFile, places: FilePlaces, checksums: UInt64) -> None:
        """Read blocks, of which nobody else uses one, and compare their checksums uint64[n]. Must not be cancelled.
        Raises DamagedFileError and OSError."""

        async def load(piece: Piece, memory: memoryview, addresses: UInt64) -> None:
            for first, slot, count in piece.ranges():
                data = memory[first * self.stride : (first + count) * self.stride]
                await self.run(file.read, data, self.offset(slot))
            blocks, expected = piece.block_ids.astype(np.int32), checksums[piece.part]
            right = await self._device.load_blocks(addresses, blocks, expected, piece.pool)
            if not right.all():
                raise DamagedFileError(f"block {piece.slots[int(right.argmin())]} has another checksum")

        await self._in_pieces(places, load)

    def offset(self, slot: int) -> int:
        """Return the offset of a block in a file. The block after the last one is where the manifest begins."""
        return SECTOR_BYTES + slot * self.stride

    async def _in_pieces(
        self, places: FilePlaces, work: Callable[[Piece, memoryview, UInt64], Coroutine[Any, Any, None]]
    ) -> None:
        """Run `work` for each piece, for NUM_PIECES at a time. If one fails, it waits for those in progress."""
        free: list[tuple[memoryview, UInt64]] = []
        running: deque[tuple[asyncio.Task[None], tuple[memoryview, UInt64]]] = deque()
        try:
            for piece in self._pieces(places):
                if len(running) == NUM_PIECES:
                    task, memory = running.popleft()
                    await task
                    free.append(memory)
                memory = free.pop() if free else self._memory()
                count = len(piece.slots)
                task = asyncio.create_task(work(piece, memory[0], memory[1][:count]))
                running.append((task, memory))
            while running:
                await running.popleft()[0]
        finally:
            await asyncio.gather(*(task for task, _ in running), return_exceptions=True)

    def _memory(self) -> tuple[memoryview, UInt64]:
        """Return memory for a piece, and the addresses of the blocks in it."""
        memory = memoryview(aligned_memory(self._piece_blocks * self.stride))
        first = np.frombuffer(memory, np.uint8).ctypes.data
        addresses = np.uint64(first) + np.arange(self._piece_blocks, dtype=np.uint64) * np.uint64(self.stride)
        return memory, addresses

    def _pieces(self, places: FilePlaces) -> Iterator[Piece]:
        switches = (np.flatnonzero(np.diff(places.in_swap)) + 1).tolist()
        for begin, end in zip([0, *switches], [*switches, len(places.slots)], strict=True):
            for first in range(begin, end, self._piece_blocks):
                part = slice(first, min(first + self._piece_blocks, end))
                pool: PoolName = "swap" if places.in_swap[first] else "pool"
                yield Piece(part, places.slots[part], places.block_ids[part], pool)

    def close(self) -> None:
        """End the threads after their work."""
        self._threads.shutdown(wait=True)
