"""The sequences of a cache, one per row of its batch."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass

from kvservice.client import Sequence, Session, Step
from kvservice.errors import StaleStepError
from kvservice.integrations.transformers.decode_graphs import DecodeRun
from kvservice.integrations.transformers.keys import ExtraKeys


@dataclass(frozen=True)
class Snapshot:
    """The state of the rows before a pass, for the rollback if it fails."""

    sequences: tuple[Sequence | None, ...]
    lengths: tuple[int, ...]


class Rows:
    """Sequences of a session by row, None while a row has only padding. The list is empty before the first pass.

    After this object is garbage-collected, the session frees the sequences before its next allocation.
    """

    def __init__(self, kv: Session) -> None:
        self.kv = kv
        # The finalizer references this list, so the list is modified in place.
        self.sequences: list[Sequence | None] = []
        # Passes of which the daemon may not know yet. `settle` ends it before any other change of the rows.
        self.run: DecodeRun | None = None
        finalizer = weakref.finalize(self, _abandon, kv, self.sequences)
        finalizer.atexit = False

    def settle(self) -> None:
        """End the run. The lengths of sequences say which tokens were committed: all, unless their step had ended."""
        run, self.run = self.run, None
        if run is None:
            return
        try:
            with contextlib.suppress(StaleStepError):
                run.end()
        except BaseException:
            # After an interrupted commit the daemon's sequences may be longer than the client's objects say.
            for sequence in self.held():
                self.kv.truncate(sequence, sequence.length)
            raise

    def held(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence is not None]

    def open_step(
        self, token_ids: list[list[int]], num_wanted: int, extra_keys: list[ExtraKeys]
    ) -> tuple[Step, list[int]]:
        """Add the new tokens of each row and open a step over those that must be computed. Returns the step, and the
        number of new tokens per row that the prefix cache already has.

        extra_keys: per row, the extra keys for the allocation of its sequence if it has none yet.

        Only allocated tokens can be found in the prefix cache; appended tokens are always pending. The last
        `num_wanted` tokens of a new row, whose outputs the caller needs, are therefore left to be computed.
        """
        self.sequences[:] = self.sequences or [None] * len(token_ids)
        active = [row for row, ids in enumerate(token_ids) if ids]
        prompts = {
            row: token_ids[row][: max(1, len(token_ids[row]) - num_wanted + 1)]
            for row in active
            if self.sequences[row] is None
        }
        if prompts:
            self._allocate(prompts, extra_keys)
        rest = {row: token_ids[row][len(prompts.get(row, ())) :] for row in active}
        appended = [row for row in active if rest[row]]
        if appended:
            step = self.kv.append(
                [self._sequence(row) for row in appended],
                [token_id for row in appended for token_id in rest[row]],
                num_tokens=[len(rest[row]) for row in appended],
            )
        if appended != active:
            step = self.kv.open_step([self._sequence(row) for row in active])
        pending = dict(zip(active, step.query_lens.tolist(), strict=True))
        return step, [len(ids) - pending.get(row, 0) for row, ids in enumerate(token_ids)]

    def _allocate(self, prompts: dict[int, list[int]], extra_keys: list[ExtraKeys]) -> None:
        keys = [extra_keys[row] for row in prompts]
        sequences = self.kv.allocate_batch(list(prompts.values()), extra_keys=keys)
        for row, sequence in zip(prompts, sequences, strict=True):
            self.sequences[row] = sequence

    def _sequence(self, row: int) -> Sequence:
        sequence = self.sequences[row]
        assert sequence is not None, f"row {row} has no tokens yet"
        return sequence

    def snapshot(self) -> Snapshot:
        lengths = tuple(sequence.length if sequence else 0 for sequence in self.sequences)
        return Snapshot(tuple(self.sequences), lengths)

    def roll_back(self, before: Snapshot) -> None:
        kept = {sequence.sequence_id for sequence in before.sequences if sequence}
        if created := [sequence for sequence in self.held() if sequence.sequence_id not in kept]:
            self.kv.free(created)
        for sequence, length in zip(before.sequences, before.lengths, strict=True):
            # After an interrupted append the daemon's sequence may be longer than the client's object says.
            if sequence:
                self.kv.truncate(sequence, length)
        self.sequences[:] = before.sequences

    def select(self, parents: list[int]) -> None:
        """Replace row i by the previous row `parents[i]`. Its first copy is the sequence itself, all others are
        forks."""
        rows: list[Sequence | None] = []
        forked: list[int] = []
        for row, parent in enumerate(parents):
            if parent in parents[:row] and self.sequences[parent]:
                forked.append(row)
            rows.append(self.sequences[parent])
        if forked:
            children = self.kv.fork_batch([self._sequence(parents[row]) for row in forked])
            for row, child in zip(forked, children, strict=True):
                rows[row] = child
        if dropped := [sequence for row, sequence in enumerate(self.sequences) if sequence and row not in parents]:
            self.kv.free(dropped)
        self.sequences[:] = rows

    def fork(self) -> Rows:
        """Return new rows that share every block with these."""
        copy = Rows(self.kv)
        children = iter(self.kv.fork_batch(held) if (held := self.held()) else [])
        copy.sequences[:] = [sequence and next(children) for sequence in self.sequences]
        return copy

    def take_back(self, num_tokens: list[int]) -> None:
        """Truncate each row by its last `num_tokens[row]` tokens."""
        for sequence, count in zip(self.sequences, num_tokens, strict=True):
            if sequence and count:
                self.kv.truncate(sequence, sequence.length - count)

    def free(self) -> None:
        if held := self.held():
            self.kv.free(held)
        self.sequences.clear()


def _abandon(kv: Session, sequences: list[Sequence | None]) -> None:
    """Schedule the sequences to be freed. The garbage collector may run this during a call of the session, so it makes
    no call itself."""
    kv.free_later(sequence for sequence in sequences if sequence is not None)
