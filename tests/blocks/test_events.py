"""The event journal: which batches it keeps, and its consistency with the prefix index."""

from __future__ import annotations

import numpy as np
from each_row import each_row
from event_replica import EventReplica

from kvservice.blocks import (
    AllocationRequest,
    BlockManager,
    BlocksConfig,
    Cleared,
    EventJournal,
    RemovedBlocks,
    SessionNamespace,
    StoredBlock,
)
from kvservice.chain_hash import block_hash, root_hash


def block(name: bytes) -> StoredBlock:
    return name, None, b""


def test_batches_are_numbered_and_the_oldest_are_forgotten() -> None:
    journal = EventJournal(window=4, clock=lambda: 7.0)
    assert (journal.oldest, journal.newest, journal.since(1, 9)) == (1, 0, [])
    journal.stored([block(b"a"), block(b"b")])
    journal.removed([b"a"])
    journal.cleared()
    assert [batch.number for batch in journal.since(1, 9)] == [1, 2, 3]
    journal.stored([block(b"c")])
    assert (journal.oldest, journal.newest) == (2, 4)
    assert [batch.number for batch in journal.since(1, 2)] == [2, 3]
    assert [batch.number for batch in journal.since(4, 9)] == [4]
    assert journal.since(5, 9) == []
    assert {batch.time_s for batch in journal.since(1, 9)} == {7.0}
    assert (journal.num_stored, journal.num_removed, journal.num_cleared) == (3, 1, 1)


def test_the_newest_batch_is_remembered_however_large_it_is() -> None:
    journal = EventJournal(window=2)
    journal.stored([block(b"a")])
    journal.stored([block(b"b"), block(b"c"), block(b"d")])
    assert [batch.number for batch in journal.since(1, 9)] == [2]


def test_listeners_are_called() -> None:
    told = []
    journal = EventJournal(window=2, on_change=lambda: told.append(journal.newest))
    journal.cleared()
    journal.removed([b"a"])
    assert told == [1, 2]


class Pool:
    """Return a manager with blocks of two tokens, and its journal."""

    def __init__(self, num_blocks: int, *, with_tokens: bool = True) -> None:
        self.journal = EventJournal(window=1000, with_tokens=with_tokens)
        config = BlocksConfig(num_blocks=num_blocks, block_size=2, num_swap_blocks=num_blocks, watermark=0.0)
        self.manager = BlockManager(config, journal=self.journal)
        self.space: SessionNamespace = self.manager.open_namespace()

    def compute(self, sequence_id: int, tokens: list[int], salt: bytes = b"") -> None:
        keys = ((0, salt),) if salt else ()
        self.manager.allocate(self.space, [AllocationRequest(sequence_id, np.array(tokens, np.int32), keys)])
        step = self.manager.open_step(self.space, [sequence_id])
        self.manager.mark_all_layers(self.space, step.step_id)

    def changes(self) -> list[object]:
        return [batch.change for batch in self.journal.since(1, 1000)]


def little_endian(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def test_stored_blocks_are_chains_with_their_tokens() -> None:
    pool = Pool(8)
    pool.compute(1, [1, 2, 3, 4, 5])
    first = block_hash(root_hash(2), little_endian(1, 2))
    second = block_hash(first, little_endian(3, 4))
    stored = [(first, None, little_endian(1, 2)), (second, first, little_endian(3, 4))]
    assert pool.changes() == [stored]
    pool.compute(2, [1, 2, 3, 4, 6])  # hits both blocks; the last block of this sequence is not full
    assert pool.changes() == [stored]


def test_events_have_tokens_only_with_permission() -> None:
    pool = Pool(8, with_tokens=False)
    pool.compute(1, [1, 2, 3, 4])
    pool.manager.swap_out(pool.space, [1])
    pool.manager.reset_prefix_cache()
    pool.manager.swap_in(pool.space, [1])
    stored = [change for change in pool.changes() if isinstance(change, list)]
    assert len(stored) == 2
    assert {tokens for blocks in stored for _, _, tokens in blocks} == {b""}


def test_eviction_removes_and_reset_clears() -> None:
    pool = Pool(3)
    pool.compute(1, [1, 2, 3, 4])
    pool.manager.free(pool.space, [1])
    hashes = [block_hash for block_hash, _, _ in pool.changes()[0]]  # type: ignore[attr-defined]
    pool.compute(2, [9, 8, 7])  # one block is free, and the deepest one is evicted
    assert pool.changes()[1] == RemovedBlocks([hashes[1]])
    pool.manager.free(pool.space, [2])
    pool.manager.reset_prefix_cache()
    assert pool.changes()[-1] == Cleared()
    before = len(pool.changes())
    pool.manager.reset_prefix_cache()
    assert len(pool.changes()) == before, "there was nothing to clear"


def test_a_reset_that_pins_survive_removes_the_others() -> None:
    pool = Pool(8)
    pool.compute(1, [1, 2, 3, 4])
    pool.manager.pin(pool.space, [1, 2], ttl_s=60)
    hashes = [block_hash for block_hash, _, _ in pool.changes()[0]]  # type: ignore[attr-defined]
    pool.manager.reset_prefix_cache()
    assert pool.changes()[1] == RemovedBlocks([hashes[1]])


def test_what_comes_back_from_swap_is_stored_again_with_its_parents() -> None:
    with each_row() as row:
        for salt in (b"", b"tenant"):
            with row(salt):
                pool = Pool(4)
                replica = EventReplica(pool.journal)
                pool.compute(1, [1, 2, 3, 4], salt)
                replica.follow()
                before = dict(replica.blocks)
                pool.manager.swap_out(pool.space, [1])
                pool.compute(2, [9] * 8)
                pool.manager.free(pool.space, [2])
                replica.follow()
                assert not set(before) & set(replica.blocks)
                pool.manager.swap_in(pool.space, [1])
                replica.follow()
                assert {key: value for key, value in replica.blocks.items() if key in before} == before
