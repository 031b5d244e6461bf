"""The disk of sessions: those that Detach saved, and their return; sequences of open sessions that are swapped out.

    Detach: end steps ─▶ write the file ─▶ reply ─▶ the stream ends ─▶ the session leaves memory
    attach: read the manifest ─▶ owner, model, tenant ─▶ restore tables ─▶ read blocks ─▶ index ─▶ show the session

While a session is written, its calls are refused. If it is closed or taken over meanwhile, the file is given up. While
a session is restored, nobody finds it. A restart before it is shown frees its sequences, and its file is still there.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final, NamedTuple

import numpy as np

from kvservice.auth import CALLER, Identity
from kvservice.blocks import AllocStatus, BlockManager, DiskSequence, SavedSequence, SavedSequences, SessionNamespace
from kvservice.blocks.plans import Int64Array
from kvservice.blocks.slices import Waits
from kvservice.blocks.state import NUM_COUNTERS
from kvservice.config import ServeConfig
from kvservice.engine import NUM_HIDDEN_NAMESPACES
from kvservice.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    KVServiceError,
    ResourceExhaustedError,
    SavedSessionsOffError,
    SequenceLostError,
    SessionNotRestoredError,
)
from kvservice.kept.table import MAX_VALUE_BYTES
from kvservice.logs import LogBudget
from kvservice.saved import OpenedSession, SessionFiles, SessionValues
from kvservice.saved.files import NEVER, swapped_name
from kvservice.server.loop import finished, to_the_end, waiting
from kvservice.server.sessions.registry import SessionRegistry
from kvservice.server.sessions.session import SaveInProgress, ServerSession
from kvservice.telemetry.tables import SavedStats

logger = logging.getLogger(__name__)

# How often expired files are removed.
EXPIRY_INTERVAL_S: Final = 30.0


class SavedSize(NamedTuple):
    """The number of sequences in the file that Detach has written, and its size."""

    num_sequences: int
    num_bytes: int


class DiskPlaces:
    """The places of transfers, each of which has the number of a namespace that no session has. Other transfers wait.

    If the daemon has tenants, one of them has one place at a time, and its next transfer queues behind those of the
    others.
    """

    def __init__(self, config: ServeConfig) -> None:
        first = config.max_sessions + 1
        self._numbers = list(range(first, first + NUM_HIDDEN_NAMESPACES))
        self._free = asyncio.Semaphore(NUM_HIDDEN_NAMESPACES)
        self._has_tenants = bool(config.tenants)
        self._of_tenants: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(1))

    async def take(self, tenant: str) -> int:
        """Wait for a place, until `leave`. Returns its number."""
        if self._has_tenants:
            await self._of_tenants[tenant].acquire()
        try:
            await self._free.acquire()
        except BaseException:
            if self._has_tenants:
                self._of_tenants[tenant].release()
            raise
        return self._numbers.pop()

    def leave(self, tenant: str, number: int) -> None:
        """Let the next transfer have a place, whose namespace is closed by now."""
        self._numbers.append(number)
        self._free.release()
        if self._has_tenants:
            self._of_tenants[tenant].release()

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Have a place for a transfer without a namespace of its own."""
        number = await self.take(tenant)
        try:
            yield
        finally:
            self.leave(tenant, number)


class SavedSessions:
    """Writes sessions to the disk, and restores them."""

    def __init__(
        self, config: ServeConfig, manager: BlockManager, sessions: SessionRegistry, files: SessionFiles | None
    ) -> None:
        """`files` is None if sessions are not saved."""
        self.files = files
        self._counted = SavedStats()
        self._config, self._manager, self._sessions = config, manager, sessions
        self._places = DiskPlaces(config)
        self._restoring: dict[tuple[bytes, str], asyncio.Task[None]] = {}
        self._log = LogBudget(logger)
        self.swaps = DiskSwaps(manager, files, self._places, self._save_record)
        if files is not None:
            sessions.on_close = self._closed
            sessions.restoring = self.restoring
            sessions.disk_bytes = files.files.bytes_by_tenant
            files.files.check_tenant = sessions.check_disk_bytes

    def _save_record(self, session: ServerSession) -> None:
        self._sessions.save(session)

    # ---- Detach

    async def save(self, session: ServerSession, ttl_s: float) -> SavedSize:
        """Write the file of a session. Raises SavedSessionsOffError, FailedPreconditionError if the session's scheduler
        has requests, and the errors of SessionFiles.write. If the caller is cancelled, the file is given up."""
        if self.files is None:
            raise SavedSessionsOffError("the daemon saves no sessions: see disk and disk_sessions_gib", field="durable")
        if session.scheduler is not None and len(session.scheduler):
            raise FailedPreconditionError(
                f"the session's scheduler has {len(session.scheduler)} unfinished requests, which cannot be saved",
                field="durable",
            )
        session.saving = saving = SaveInProgress(ttl_s)
        writing = to_the_end(self._write(self.files, session, saving, ttl_s))
        try:
            size = await asyncio.shield(writing)
        except asyncio.CancelledError:
            session.end_saving(FailedPreconditionError("the client of Detach has gone"))
            raise
        finally:
            if session.saving is saving:
                session.saving = None
        saving.check()  # another client may have taken the session over by now
        session.asleep = True
        return size

    async def _write(
        self, files: SessionFiles, session: ServerSession, saving: SaveInProgress, ttl_s: float
    ) -> SavedSize:
        async with self._places.place(session.tenant):
            saving.check()
            await finished(self._manager.end_steps_in_slices(session.namespace))
            tables = await finished(self._manager.save_in_slices(session.namespace))
            values = SessionValues(
                name=session.name,
                tenant=session.tenant,
                owner=session.owner.name,
                credential=session.owner.credential.hex(),
                wait_s=ttl_s,
                hashed_with=session.hashed_with,
                on_disk=session.record().on_disk,
            )
            num_bytes = await files.write(session.token, values, tables, ttl_s, saving.check)
            if saving.failure is not None:
                if session.namespace.closed:
                    await files.remove(session.token)
                raise saving.failure
            await files.keep_swapped(session.token, session.on_disk)
        self._counted.saved += 1
        count = len(tables.saved.sequences) + len(session.namespace.on_disk)
        self._log.write(
            logging.INFO, "session %d saved: %d sequences, %d bytes", session.session_id, count, num_bytes,
            extra={"session_id": session.session_id},
        )  # fmt: skip
        return SavedSize(count, num_bytes)

    # ---- attach

    def restoring(self, token: bytes) -> Awaitable[None] | None:
        """Return what restores the session with this token, or None if it is in memory or not on the disk."""
        return self.restore(token) if self._sessions.find(token) is None and self.has(token) else None

    def has(self, token: bytes) -> bool:
        """Return whether the session with this token is on the disk, or is being restored: its file may expire
        meanwhile."""
        return self.files is not None and (self.files.has(token) or any(token == one for one, _ in self._restoring))

    async def restore(self, token: bytes) -> None:
        """Restore a session for the caller, who is about to attach to it. Several callers may wait for it; it goes on
        when they are gone.

        Raises UnknownSessionError if there is none for this caller, SessionNotRestoredError, QuotaExceededError,
        OutOfBlocksError and DiskFailedError. The file stays then.
        """
        key = token, CALLER.get().name
        task = self._restoring.get(key)
        if task is None:
            task = self._restoring[key] = to_the_end(self._restore(token))
            task.add_done_callback(lambda _: self._restoring.pop(key))
        await asyncio.shield(task)

    async def _restore(self, token: bytes) -> None:
        assert self.files is not None, "the token has a file"
        async with self._places.place(self.files.tenant_of(token)):
            if self._sessions.find(token) is not None:
                return
            opened = await self.files.open(token)
            if opened is None:
                raise self._sessions.unknown()
            try:
                await self._restore_from(self.files, opened, token)
            finally:
                opened.file.close()

    async def _restore_from(self, files: SessionFiles, opened: OpenedSession, token: bytes) -> None:
        values = opened.manifest.session
        if values.owner != CALLER.get().name or not self._sessions.is_of_caller(values.tenant):
            self._sessions.note_foreign("a saved session")
            raise self._sessions.unknown()
        files.check_identity(opened)
        self._check_sharing(values)
        owner = Identity(values.owner, bytes.fromhex(values.credential))
        session = self._sessions.begin(token, values.name, values.tenant, owner, values.wait_s)
        try:
            with _fitting():
                restored = await finished(self._manager.restore_in_slices(session.namespace, opened.manifest.saved))
            num_loaded = await files.load(opened, restored)
            self._check_sharing(values)
            await finished(self._manager.index_restored_in_slices(session.namespace, restored))
            self._check_sharing(values)
            self._manager.enter(session.namespace)
            on_disk = session.recall(values.on_disk)
            self._manager.sequences.require_places(len(on_disk), "sequences", session.namespace)
            self._manager.add_on_disk(session.namespace, on_disk)
        except BaseException as error:
            await finished(self._sessions.close_in_slices(session, f"refused: not restored, {type(error).__name__}"))
            raise
        session.asleep = True
        self._counted.restored += 1
        found = len(opened.manifest.checksums) - num_loaded
        self._sessions.show(session, f"restored, {num_loaded} blocks read and {found} found in memory")
        to_the_end(self._drop_unsaved(files, token, frozenset(values.on_disk)))

    def _check_sharing(self, values: SessionValues) -> None:
        """Raise SessionNotRestoredError if the session's tenant shares with others than when the session was saved: it
        would find blocks of tenants that do not share with it any more, and they would find its own."""
        if self._sessions.hashes_otherwise(values):
            raise SessionNotRestoredError(
                f"tenant {values.tenant} shares with others than when the session was saved", cause="sharing"
            )

    async def _drop_unsaved(self, files: SessionFiles, token: bytes, names: frozenset[str]) -> None:
        """Remove what the session, before it was lost, swapped out after it was saved with these files."""
        try:
            await files.keep_swapped(token, names)
        except KVServiceError as error:
            self._log.write(logging.WARNING, "files of swapped sequences stay until the session ends: %s", error)

    # ---- the end of files

    def _closed(self, session: ServerSession) -> None:
        """Remove the files of a session that was closed."""
        if self.files is not None and (self.files.has(session.token) or session.on_disk):
            to_the_end(self._remove(self.files, session.token))

    async def _remove(self, files: SessionFiles, token: bytes) -> None:
        try:
            await files.remove(token)
        except KVServiceError as error:
            self._log.write(logging.WARNING, "the file of a closed session stays until it expires: %s", error)

    async def run(self) -> None:
        """Remove expired files, and those of sessions that an earlier process lost. Runs until cancelled."""
        while self.files is not None:
            await self.expire()
            await asyncio.sleep(EXPIRY_INTERVAL_S)

    async def expire(self) -> None:
        """Remove the files whose time is over."""
        assert self.files is not None, "somebody asks for it"
        try:
            self._counted.expired += await self.files.expire(self._owners)
        except KVServiceError as error:
            self._log.write(logging.WARNING, "expired sessions stay on the disk: %s", error)

    def _owners(self) -> Iterator[bytes]:
        """Yield the tokens of sessions that are open, or are being restored."""
        for session in self._sessions:
            yield session.token
        for token, _ in self._restoring:
            yield token

    @property
    def note(self) -> str:
        """Say why the disk failed when it was last used, or return an empty string."""
        fault = "" if self.files is None else self.files.files.fault
        return f"the disk of the saved sessions, {self._config.disk}, fails: {fault}" if fault else ""

    def stats(self) -> SavedStats:
        """Return the figures of the sessions on the disk, which there must be."""
        assert self.files is not None, "somebody asks for it"
        files = self.files.files
        return dataclasses.replace(
            self._counted,
            num_sessions=files.num_sessions,
            used_bytes=files.used_bytes,
            capacity_bytes=files.capacity_bytes,
            damaged=files.num_damaged,
            errors=files.num_errors,
        )

    def close(self) -> None:
        """End the threads after their work."""
        if self.files is not None:
            self.files.close()


@contextlib.contextmanager
def _fitting() -> Iterator[None]:
    """Raise SessionNotRestoredError for sequences that the limits of this daemon do not allow."""
    try:
        yield
    except InvalidArgumentError as error:
        raise SessionNotRestoredError(f"a saved sequence does not fit: {error}", cause="limits") from None


# ---- sequences of open sessions that are swapped out to the disk
#
#     swap out: end steps ─▶ write the file ─▶ record it ─▶ free the rows
#     swap in:  read blocks into a hidden namespace ─▶ index ─▶ move the sequences to the session ─▶ forget the file
#
# The session's record says which files have which sequences. A sequence with a row is not on the disk, also if the
# record names it: it is recorded before its row goes, and forgotten after its row is back. So a restart at any point
# finds it once. While bytes move, other calls of the session are refused.


# Most bytes of a sequence in a record, `"id": [length, num_computed], `, and of the name of a file.
_SEQUENCE_BYTES: Final = 64
_FILE_BYTES: Final = 256


class DiskSwaps:
    """Swaps sequences out to the disk, and back."""

    def __init__(
        self,
        manager: BlockManager,
        files: SessionFiles | None,
        places: DiskPlaces,
        save_record: Callable[[ServerSession], None],
    ) -> None:
        """`files` is None if there is no disk."""
        self._manager, self._files, self._places = manager, files, places
        self._save_record = save_record
        self._log = LogBudget(logger)

    def swap_out(self, session: ServerSession, sequence_ids: Sequence[int]) -> Waits[int]:
        """Swap sequences out to the disk. Returns the number of blocks written, 0 if all sequences are there already.

        Raises SavedSessionsOffError, ResourceExhaustedError if the session would have more sequences on the disk than
        its record can name, the errors of SessionFiles.write and those of an operation on sequences; nothing has
        changed then.
        """
        on_disk = session.namespace.on_disk
        if sequence_ids and all(name in on_disk for name in sequence_ids):
            return 0
        if self._files is None:
            raise SavedSessionsOffError("the daemon has no disk for sequences: see disk_sessions_gib", field="tier")
        ids = np.array(sequence_ids, np.int64)
        _check_record(session, len(ids))
        with _busy(session) as saving:
            name, num_blocks, moved = yield from waiting(self._write(self._files, session, saving, ids))
        if saving.failure is not None:  # it was set after the file was whole
            to_the_end(self._remove(self._files, session.token, name))
            raise saving.failure
        session.on_disk[name] = moved
        try:
            self._save_record(session)
        except BaseException:
            del session.on_disk[name]
            to_the_end(self._remove(self._files, session.token, name))
            raise
        yield from self._manager.move_to_disk_in_slices(session.namespace, ids)
        return num_blocks

    async def _write(
        self,
        files: SessionFiles,
        session: ServerSession,
        saving: SaveInProgress,
        ids: Int64Array,
    ) -> tuple[str, int, dict[int, DiskSequence]]:
        async with self._places.place(session.tenant):
            saving.check()
            await finished(self._manager.end_steps_in_slices(session.namespace, ids))
            tables = await finished(self._manager.save_in_slices(session.namespace, ids))
            name = swapped_name(session.token)
            values = SessionValues(name="", tenant=session.tenant, owner="", credential="", wait_s=0.0)
            await files.write_as(name, values, tables, NEVER, saving.check)
            if saving.failure is not None:
                await files.remove_as(name)
                raise saving.failure
        moved = {one.sequence_id: DiskSequence(len(one.token_ids), one.num_computed) for one in tables.saved.sequences}
        return name, tables.saved.num_blocks, moved

    def can_swap_in(self, session: ServerSession, sequence_ids: Sequence[int]) -> AllocStatus:
        """Return OK if `swap_in` has enough blocks, even if its sequences share none. Raises InvalidArgumentError as it
        does."""
        _check_on_disk(session, sequence_ids)
        config, device = self._manager.config, self._manager.device
        on_disk = session.namespace.on_disk
        required = sum(-(-on_disk[name].length // config.block_size) for name in sequence_ids)
        self._manager.enter(session.namespace)
        # They count for the session and its tenant already.
        has_rows = len(sequence_ids) <= len(self._manager.sequences.free_rows)
        fits = device.room(config.watermark_blocks) >= required
        return AllocStatus.OK if fits and has_rows else AllocStatus.LATER

    def swap_in(self, session: ServerSession, sequence_ids: Sequence[int]) -> Waits[int]:
        """Swap sequences in, all of which are on the disk. Returns the number of blocks read.

        Raises InvalidArgumentError if they are not, OutOfBlocksError, QuotaExceededError, DiskFailedError,
        SessionNotRestoredError if a file is damaged, and SequenceLostError if it is gone; nothing has changed then.
        """
        _check_on_disk(session, sequence_ids)
        assert self._files is not None, "there are sequences on the disk"
        with _busy(session) as saving:
            hidden, num_blocks = yield from waiting(self._restore(self._files, session, saving, sequence_ids))
        if saving.failure is not None:  # it was set after the blocks were read
            to_the_end(self._give_up(session, hidden))
            raise saving.failure
        # After the reply is kept: until then, a restart finds the sequences on the disk.
        asyncio.get_running_loop().call_soon(self._end_swap_in, session, hidden)
        self._manager.adopt(session.namespace, hidden)
        return num_blocks

    def _end_swap_in(self, session: ServerSession, hidden: SessionNamespace) -> None:
        """End what a swap-in has left."""
        try:
            self._manager.close_namespace(hidden)
        finally:
            self._places.leave(session.tenant, hidden.number)
        self.forget(session)

    async def _restore(
        self, files: SessionFiles, session: ServerSession, saving: SaveInProgress, sequence_ids: Sequence[int]
    ) -> tuple[SessionNamespace, int]:
        """Restore sequences in a hidden namespace, which keeps its place."""
        place = await self._places.take(session.tenant)
        try:
            hidden = self._manager.open_namespace(place, [0] * NUM_COUNTERS)
        except BaseException:
            self._places.leave(session.tenant, place)
            raise
        hidden.quota, hidden.counts_elsewhere = session.namespace.quota, True
        try:
            saving.check()
            num_blocks = 0
            for name, on_disk in list(session.on_disk.items()):
                if wanted := {sequence_id for sequence_id in sequence_ids if sequence_id in on_disk}:
                    num_blocks += await self._restore_from(files, name, hidden, wanted)
            saving.check()
            slots, keyed = self._manager.sequences, list(hidden.rows.values())
            if num_bytes := slots.extra_keys.num_bytes(keyed):
                number = session.namespace.number
                slots.extra_keys.require(number, len(keyed), num_bytes, "sequence_ids", shared=True)
        except BaseException:
            await self._give_up(session, hidden)
            raise
        return hidden, num_blocks

    async def _give_up(self, session: ServerSession, hidden: SessionNamespace) -> None:
        """End a hidden namespace whose sequences nobody wants."""
        try:
            await finished(self._manager.close_namespace_in_slices(hidden))
        finally:
            self._places.leave(session.tenant, hidden.number)

    async def _restore_from(
        self, files: SessionFiles, name: str, hidden: SessionNamespace, sequence_ids: set[int]
    ) -> int:
        opened = await files.open_as(name)
        if opened is None:
            lost = min(sequence_ids)
            raise SequenceLostError(f"the file of sequence {lost} is gone", sequence_id=lost)
        try:
            files.check_identity(opened)
            saved = opened.manifest.saved
            chosen = [_resident(one) for one in saved.sequences if one.sequence_id in sequence_ids]
            part = SavedSequences(chosen, saved.num_blocks)
            restored = await finished(self._manager.restore_in_slices(hidden, part))
            num_blocks = await files.load(opened, restored)
            await finished(self._manager.index_restored_in_slices(hidden, restored))
        finally:
            opened.file.close()
        return num_blocks

    def forget(self, session: ServerSession) -> None:
        """Record which sequences are still on the disk. A file without any goes, unless the session's saved state needs
        it."""
        if session.namespace.closed:
            return
        on_disk = session.namespace.on_disk
        for name, sequences in list(session.on_disk.items()):
            left = {sequence_id: one for sequence_id, one in sequences.items() if sequence_id in on_disk}
            session.on_disk[name] = left
            if not left:
                del session.on_disk[name]
                if self._files is not None:
                    to_the_end(self._remove(self._files, session.token, name))
        self._save_record(session)

    async def _remove(self, files: SessionFiles, token: bytes, name: str) -> None:
        try:
            await files.remove_swapped(token, name)
        except KVServiceError as error:
            self._log.write(logging.WARNING, "the file of swapped sequences stays until the session ends: %s", error)


@contextmanager
def _busy(session: ServerSession) -> Iterator[SaveInProgress]:
    """Refuse other calls of the session in this context."""
    session.saving = saving = SaveInProgress()
    try:
        yield saving
    finally:
        if session.saving is saving:
            session.saving = None


def _check_record(session: ServerSession, num_more: int) -> None:
    """Raise ResourceExhaustedError unless the session's record can name so many more sequences on the disk."""
    num_bytes = len(session.record().to_bytes()) + num_more * _SEQUENCE_BYTES + _FILE_BYTES
    if num_bytes > MAX_VALUE_BYTES:
        count = len(session.namespace.on_disk)
        raise ResourceExhaustedError(
            f"the session has {count} sequences on the disk, and its record cannot name {num_more} more",
            field="sequence_ids",
        )


def _check_on_disk(session: ServerSession, sequence_ids: Sequence[int]) -> None:
    """Raise InvalidArgumentError unless these are distinct sequences on the disk."""
    on_disk = session.namespace.on_disk
    seen: set[int] = set()
    for i, name in enumerate(sequence_ids):
        if name not in on_disk or name in seen:
            where = "appears twice" if name in on_disk else "is not on the disk, others are: swap them in apart"
            raise InvalidArgumentError(f"sequence {name} {where}", field=f"sequence_ids[{i}]", sequence_id=name)
        seen.add(name)


def _resident(one: SavedSequence) -> SavedSequence:
    return dataclasses.replace(one, swapped=False)
