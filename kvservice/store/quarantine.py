"""Reserved blocks of lost sessions whose clients can write to the memory of the store.

A client that was frozen may go on writing after its session has ended. The room of its reserved blocks is therefore
not used again while a process lives that fetched the memory for writing in that session. Others can store the keys at
once, in other places. A client that closes its session promises that it has stopped to write: nothing waits then.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from kvservice.store.index import WORD_BYTES
from kvservice.store.namespaces import StoredNamespace


@dataclass(eq=False)
class _Held:
    namespace: StoredNamespace
    slots: bytes
    writers: set[Hashable]


class Quarantine:
    """Reserved slots that are freed after their writers have ended. `abort` frees slots; `condemn` removes their keys,
    after which `release` frees them."""

    def __init__(
        self, abort: Callable[[bytes], None], condemn: Callable[[bytes], None], release: Callable[[bytes], None]
    ) -> None:
        self._abort, self._condemn, self._release = abort, condemn, release
        self._living: set[Hashable] = set()
        self._held: list[_Held] = []

    def __len__(self) -> int:
        return len(self._held)

    def began(self, writer: Hashable) -> None:
        """Note a process that can write from now on."""
        self._living.add(writer)

    def hold(self, namespace: StoredNamespace, slots: bytes, writers: frozenset[Hashable]) -> None:
        """Forget the keys of the slots, and free them after all of `writers` have ended: at once if none lives. A
        process that was killed has usually ended before its session is."""
        if not slots:
            return
        living = self._living & writers
        if not living:
            self._abort(slots)
            return
        self._condemn(slots)
        namespace.num_quarantined += len(slots) // WORD_BYTES
        self._held.append(_Held(namespace, slots, living))

    def ended(self, writer: Hashable) -> None:
        """Free the slots that waited for this writer only."""
        self._living.discard(writer)
        for held in list(self._held):
            held.writers.discard(writer)
            if not held.writers:
                self._held.remove(held)
                held.namespace.num_quarantined -= len(held.slots) // WORD_BYTES
                self._release(held.slots)
