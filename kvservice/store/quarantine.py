"""Reserved blocks of lost sessions whose clients can write to the memory of the store.

A client that was frozen may go on writing after its session has ended. Its reserved blocks are therefore not used again
while a process lives that fetched the memory for writing in that session.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass(eq=False)
class _Held:
    slots: bytes
    writers: set[Hashable]


class Quarantine:
    """Slots that are freed by `abort` after their writers have ended."""

    def __init__(self, abort: Callable[[bytes], None]) -> None:
        self._abort = abort
        self._held: list[_Held] = []

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, slots: bytes, writers: frozenset[Hashable]) -> None:
        """Free the slots after all of `writers` have ended: at once if there are none."""
        if not slots:
            return
        if not writers:
            self._abort(slots)
            return
        self._held.append(_Held(slots, set(writers)))

    def ended(self, writer: Hashable) -> None:
        """Free the slots that waited for this writer only."""
        for held in list(self._held):
            held.writers.discard(writer)
            if not held.writers:
                self._held.remove(held)
                self._abort(held.slots)
