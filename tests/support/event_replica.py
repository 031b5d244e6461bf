"""A router's replica of the prefix cache, built from the event journal: block hashes with their parents and tokens."""

from __future__ import annotations

from kvservice.blocks import Cleared, EventJournal, RemovedBlocks, StoreChange


class EventReplica:
    def __init__(self, journal: EventJournal) -> None:
        self._journal = journal
        self._next = 1
        self.blocks: dict[bytes, tuple[bytes | None, bytes]] = {}

    def follow(self) -> None:
        """Apply new events. Checks that no stored hash is stored again and no unknown hash is removed."""
        for batch in self._journal.since(self._next, 1 << 30):
            assert batch.number == self._next
            self._next += 1
            change = batch.change
            if isinstance(change, Cleared):
                assert self.blocks
                self.blocks.clear()
            elif isinstance(change, RemovedBlocks):
                for block_hash in change.block_hashes:
                    del self.blocks[block_hash]
            else:
                assert not isinstance(change, StoreChange)
                for block_hash, parent, tokens in change:
                    assert block_hash not in self.blocks
                    self.blocks[block_hash] = parent, tokens
