"""Sequences of open sessions that are swapped out to the disk.

    swap out: end steps ─▶ write the file ─▶ record it ─▶ free the rows
    swap in:  read blocks into a hidden namespace ─▶ index ─▶ move the sequences to the session ─▶ forget the file

The session's record says which files have which sequences. A sequence with a row is not on the disk, whatever the
record says: it is recorded before its row goes, and forgotten after its row is back. So a restart at any point finds it
once. While bytes move, other calls of the session are refused.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np

from kvservice.blocks import (
    AllocStatus,
    BlockManager,
    DiskSequence,
    SavedSequence,
    SavedSequences,
    SessionNamespace,
)
from kvservice.blocks.plans import Int64Array
from kvservice.blocks.slices import Waits
from kvservice.blocks.state import NUM_COUNTERS
from kvservice.errors import InvalidArgumentError, KVServiceError, SavedSessionsOffError, SequenceLostError
from kvservice.logs import LogBudget
from kvservice.saved import SessionFiles, SessionValues
from kvservice.saved.files import NEVER, swapped_name
from kvservice.server.server_session import SaveInProgress, ServerSession
from kvservice.server.slices import finished, to_the_end, waiting

logger = logging.getLogger(__name__)

_NO_VALUES: Final = SessionValues(name="", tenant="", owner="", credential="", wait_s=0.0)


class DiskSwaps:
    """Swaps sequences out to the disk, and back."""

    def __init__(
        self,
        manager: BlockManager,
        files: SessionFiles | None,
        transfers: asyncio.Semaphore,
        save_record: Callable[[ServerSession], None],
        hidden_numbers: Sequence[int],
    ) -> None:
        """`transfers` limits the transfers in progress to the number of `hidden_numbers`, which are the numbers of
        namespaces that no session has. `files` is None if there is no disk."""
        self._manager, self._files, self._transfers = manager, files, transfers
        self._save_record = save_record
        self._hidden_numbers = list(hidden_numbers)
        self._log = LogBudget(logger)

    def swap_out(self, session: ServerSession, sequence_ids: Sequence[int]) -> Waits[int]:
        """Swap sequences out to the disk. Returns the number of blocks written, 0 if all sequences are there already.

        Raises SavedSessionsOffError, the errors of SessionFiles.write and those of an operation on sequences; nothing
        has changed then.
        """
        on_disk = session.namespace.on_disk
        if sequence_ids and all(name in on_disk for name in sequence_ids):
            return 0
        if self._files is None:
            raise SavedSessionsOffError("the daemon has no disk for sequences: see disk_sessions_gib", field="tier")
        ids = np.array(sequence_ids, np.int64)
        with _busy(session) as saving:
            name, num_blocks, moved = yield from waiting(self._write(self._files, session, saving, ids))
        if saving.failure is not None:  # since the file was whole
            to_the_end(self._remove(self._files, session.token, name))
            raise saving.failure
        session.on_disk[name] = moved
        self._save_record(session)
        yield from self._manager.move_to_disk_in_slices(session.namespace, ids)
        return num_blocks

    async def _write(
        self,
        files: SessionFiles,
        session: ServerSession,
        saving: SaveInProgress,
        ids: Int64Array,
    ) -> tuple[str, int, dict[int, DiskSequence]]:
        async with self._transfers:
            saving.check()
            await finished(self._manager.end_steps_in_slices(session.namespace, ids))
            tables = await finished(self._manager.save_in_slices(session.namespace, ids))
            name = swapped_name(session.token)
            await files.write_as(name, _NO_VALUES, tables, NEVER, saving.check)
            if saving.failure is not None:
                await files.remove_as(name)
                raise saving.failure
        moved = {one.sequence_id: DiskSequence(len(one.token_ids), one.num_computed) for one in tables.saved.sequences}
        return name, tables.saved.num_blocks, moved

    def can_swap_in(self, session: ServerSession, sequence_ids: Sequence[int]) -> AllocStatus:
        """Return OK if `swap_in` has enough blocks, whatever its sequences share. Raises InvalidArgumentError as it
        does."""
        _check_on_disk(session, sequence_ids)
        config, device = self._manager.config, self._manager.device
        on_disk = session.namespace.on_disk
        required = sum(-(-on_disk[name].length // config.block_size) for name in sequence_ids)
        fits = device.num_available - required >= config.watermark_blocks
        return (
            AllocStatus.OK
            if fits and len(sequence_ids) <= len(self._manager.sequences.free_rows)
            else AllocStatus.LATER
        )

    def swap_in(self, session: ServerSession, sequence_ids: Sequence[int]) -> Waits[int]:
        """Swap sequences in, all of which are on the disk. Returns the number of blocks read.

        Raises InvalidArgumentError if they are not, OutOfBlocksError, QuotaExceededError, DiskFailedError,
        SessionNotRestoredError if a file is damaged, and SequenceLostError if it is gone; nothing has changed then.
        """
        _check_on_disk(session, sequence_ids)
        assert self._files is not None, "there are sequences on the disk"
        with _busy(session) as saving:
            hidden, num_blocks = yield from waiting(self._restore(self._files, session, saving, sequence_ids))
        # After the reply is kept: until then, a restart finds the sequences on the disk.
        asyncio.get_running_loop().call_soon(self._settle, session, hidden)
        self._manager.adopt(session.namespace, hidden)
        return num_blocks

    def _settle(self, session: ServerSession, hidden: SessionNamespace) -> None:
        """End what a swap-in has left."""
        self._manager.close_namespace(hidden)
        self._hidden_numbers.append(hidden.number)
        self.forget(session)

    async def _restore(
        self, files: SessionFiles, session: ServerSession, saving: SaveInProgress, sequence_ids: Sequence[int]
    ) -> tuple[SessionNamespace, int]:
        """Restore sequences in a hidden namespace."""
        async with self._transfers:
            saving.check()
            hidden = self._manager.open_namespace(self._hidden_numbers.pop(), [0] * NUM_COUNTERS)
            try:
                num_blocks = 0
                for name, on_disk in list(session.on_disk.items()):
                    if wanted := {sequence_id for sequence_id in sequence_ids if sequence_id in on_disk}:
                        num_blocks += await self._restore_from(files, name, hidden, wanted)
                saving.check()
            except BaseException:
                await finished(self._manager.close_namespace_in_slices(hidden))
                self._hidden_numbers.append(hidden.number)
                raise
        return hidden, num_blocks

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
