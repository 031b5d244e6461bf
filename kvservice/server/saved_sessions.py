"""Detach, and what follows: sessions on the disk, and their return.

    Detach: end steps ─▶ write the file ─▶ reply ─▶ the stream ends ─▶ the session leaves memory
    attach: read the manifest ─▶ owner, model ─▶ restore tables ─▶ read blocks ─▶ index ─▶ show the session

While a session is written, its calls are refused. If it is closed or taken over meanwhile, the file is given up. While
a session is restored, nobody finds it. A restart before it is shown frees its sequences, and its file is still there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Iterator
from typing import Final, NamedTuple

from kvservice.auth import CALLER, Identity
from kvservice.blocks import BlockManager
from kvservice.config import ServeConfig
from kvservice.engine import NUM_HIDDEN_NAMESPACES
from kvservice.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    KVServiceError,
    SavedSessionsOffError,
    SessionNotRestoredError,
    UnknownSessionError,
)
from kvservice.logs import LogBudget
from kvservice.saved import OpenedSession, SessionFiles, SessionValues
from kvservice.server.disk_swaps import DiskSwaps
from kvservice.server.handlers import Handler, SessionHandler
from kvservice.server.loop import finished, to_the_end
from kvservice.server.server_session import SaveInProgress, ServerSession
from kvservice.server.sessions import SessionRegistry
from kvservice.telemetry.figures import SavedStats
from kvservice.v1 import session_pb2

logger = logging.getLogger(__name__)

# How often expired files are removed.
EXPIRY_INTERVAL_S: Final = 30.0


class SavedSize(NamedTuple):
    """What Detach has written: the sequences in the file, and its size."""

    num_sequences: int
    num_bytes: int


class SavedSessions:
    """Writes sessions to the disk, and restores them."""

    def __init__(
        self, config: ServeConfig, manager: BlockManager, sessions: SessionRegistry, files: SessionFiles | None
    ) -> None:
        """`files` is None if sessions are not saved."""
        self.files = files
        self.num_saved = self.num_restored = self.num_expired = 0
        self._config, self._manager, self._sessions = config, manager, sessions
        # Limits the sessions that are written or restored at one time; others wait.
        self._transfers = asyncio.Semaphore(NUM_HIDDEN_NAMESPACES)
        self._restoring: dict[tuple[bytes, str], asyncio.Task[None]] = {}
        self._log = LogBudget(logger)
        hidden = range(config.max_sessions + 1, config.max_sessions + 1 + NUM_HIDDEN_NAMESPACES)
        self.swaps = DiskSwaps(manager, files, self._transfers, self._save_record, hidden)
        if files is not None:
            sessions.on_close = self._closed
            sessions.restoring = self.restoring

    def _save_record(self, session: ServerSession) -> None:
        self._sessions.save(session)

    # ---- Detach

    def handlers(self) -> tuple[Handler, ...]:
        return (SessionHandler("detach", session_pb2.DetachRequest, self.detach),)

    async def detach(self, session: ServerSession, request: session_pb2.DetachRequest) -> session_pb2.DetachResponse:
        limit = self._config.max_detach_ttl_s
        if not (math.isfinite(request.ttl_s) and 0 <= request.ttl_s <= limit):
            raise InvalidArgumentError(
                f"{request.ttl_s} is not between 0 and {limit}: see max_detach_ttl_s", field="ttl_s"
            )
        ttl_s = request.ttl_s or limit
        size = await self.save(session, ttl_s) if request.durable else SavedSize(0, 0)
        self._sessions.keep_for(session, ttl_s)
        return session_pb2.DetachResponse(num_sequences=size.num_sequences, num_bytes=size.num_bytes)

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
        session.saving = saving = SaveInProgress()
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
        async with self._transfers:
            saving.check()
            await finished(self._manager.end_steps_in_slices(session.namespace))
            tables = await finished(self._manager.save_in_slices(session.namespace))
            values = SessionValues(
                name=session.name,
                tenant=session.tenant,
                owner=session.owner.name,
                credential=session.owner.credential.hex(),
                wait_s=ttl_s,
                on_disk=session.record().on_disk,
            )
            num_bytes = await files.write(session.token, values, tables, ttl_s, saving.check)
            if saving.failure is not None:
                if session.namespace.closed:
                    await files.remove(session.token)
                raise saving.failure
            await files.keep_swapped(session.token, session.on_disk)
        self.num_saved += 1
        count = len(tables.saved.sequences) + len(session.namespace.on_disk)
        self._log.write(
            logging.INFO, "session %d saved: %d sequences, %d bytes", session.session_id, count, num_bytes,
            extra={"session_id": session.session_id},
        )  # fmt: skip
        return SavedSize(count, num_bytes)

    # ---- attach

    def restoring(self, token: bytes) -> Awaitable[None] | None:
        """Return what restores the session with this token, or None if it is in memory or not on the disk."""
        there = self.files is not None and self._sessions.find(token) is None and self.files.has(token)
        return self.restore(token) if there else None

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
        async with self._transfers:
            if self._sessions.find(token) is not None:
                return
            opened = await self.files.open(token)
            if opened is None:
                raise _unknown()
            try:
                await self._restore_from(self.files, opened, token)
            finally:
                opened.file.close()

    async def _restore_from(self, files: SessionFiles, opened: OpenedSession, token: bytes) -> None:
        values = opened.manifest.session
        if values.owner != CALLER.get().name:
            self._sessions.note_foreign("a saved session")
            raise _unknown()
        files.check_identity(opened)
        owner = Identity(values.owner, bytes.fromhex(values.credential))
        session = self._sessions.begin(token, values.name, values.tenant, owner, values.wait_s)
        try:
            with _fitting():
                restored = await finished(self._manager.restore_in_slices(session.namespace, opened.manifest.saved))
            num_loaded = await files.load(opened, restored)
            await finished(self._manager.index_restored_in_slices(session.namespace, restored))
        except BaseException as error:
            await finished(self._sessions.close_in_slices(session, f"refused: not restored, {type(error).__name__}"))
            raise
        session.recall(values.on_disk)
        session.asleep = True
        self.num_restored += 1
        found = len(opened.manifest.checksums) - num_loaded
        self._sessions.show(session, f"restored, {num_loaded} blocks read and {found} found in memory")
        to_the_end(self._drop_unsaved(files, token, frozenset(values.on_disk)))

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
            self.num_expired += await self.files.expire(self._owners)
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
        """Say that the disk failed when it was last used, or return an empty string."""
        fails = self.files is not None and self.files.files.fails
        return "the disk of the saved sessions fails or is full" if fails else ""

    def stats(self) -> SavedStats:
        """Return the figures of the sessions on the disk, which there must be."""
        assert self.files is not None, "somebody asks for it"
        files = self.files.files
        return SavedStats(
            num_sessions=files.num_sessions,
            used_bytes=files.used_bytes,
            capacity_bytes=files.capacity_bytes,
            saved=self.num_saved,
            restored=self.num_restored,
            expired=self.num_expired,
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


def _unknown() -> UnknownSessionError:
    return UnknownSessionError(
        "no such session: it was closed, was lost without a stream, or was never opened", field="session_token"
    )
