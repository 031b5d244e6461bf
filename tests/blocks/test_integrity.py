"""check_integrity, at once and in slices, detects each kind of corruption, without false alarms between operations."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from constants import set_constants
from each_row import each_row
from todays_part import ENTRIES

from kvservice.blocks import (
    NAMESPACE,
    NUM_BLOCKS,
    SEQUENCE_ID,
    STEP,
    SWAPPED,
    AllocationRequest,
    BlockManager,
    BlocksConfig,
    SessionNamespace,
    Waits,
    finish,
)
from kvservice.chain_hash import block_hash
from kvservice.errors import (
    DuplicateSequenceError,
    InternalError,
    InvalidArgumentError,
    KVServiceError,
    OutOfBlocksError,
    QuotaExceededError,
    UnknownSessionError,
)

Make = Callable[..., tuple[BlockManager, SessionNamespace]]
Corruption = Callable[[Any, SessionNamespace], object]


def add(manager: BlockManager, space: SessionNamespace, sequence_id: int, tokens: Any, salt: Any = ()) -> None:
    """A sequence whose tokens are computed."""
    manager.allocate(space, [AllocationRequest(sequence_id, tokens, salt)])
    manager.mark_all_layers(space, manager.open_step(space, [sequence_id]).step_id)


def corruptible(make: Make) -> tuple[BlockManager, SessionNamespace]:
    """Rows 0 and 1 share a block, row 2 has a live step, row 3 is swapped out; one sequence is cached, one pinned."""
    manager, space = make()
    add(manager, space, 1, range(10), [(0, b"salt")])
    add(manager, space, 2, [*range(4), 50, 51], [(0, b"salt")])
    manager.allocate(space, [AllocationRequest(3, range(20, 30))])
    manager.open_step(space, [3])
    add(manager, space, 4, range(60, 70))
    manager.swap_out(space, [4])
    add(manager, space, 5, range(90, 100))
    manager.free(space, [5])
    add(manager, space, 6, range(110, 118))
    manager.pin(space, range(110, 118), ttl_s=1e9)
    manager.free(space, [6])
    finish(manager.check_integrity_in_slices())
    return manager, space


def table(state: Any, row: int) -> list[int]:
    return state.sequences.block_tables[row, : state.sequences.states[row, NUM_BLOCKS]].tolist()


def other_place(state: Any, _: SessionNamespace) -> None:
    """Put one block at two entries of a table, with a matching reference count."""
    first, second = table(state, 0)[:2]
    state.sequences.block_tables[0, 1] = first
    state.device.ref_count[[first, second]] += [1, -1]
    state.device.free_unused(np.array([second]))
    state.device.num_active -= 1


def own_block_given_to_another(state: Any, space: SessionNamespace) -> None:
    """Let two sequences write to one block, with a matching reference count."""
    mine, free = table(state, 2)[0], state.sequences.free_rows.pop()
    space.rows[77] = free
    state.sequences.block_tables[free, 0] = mine
    state.sequences.states[free] = [4, 0, 1, 0, 0, 1, 77, 0]
    state.sequences.num_tokens += 4
    state.device.ref_count[mine] = 2
    state.device.num_shared += 1


def step_block_findable(state: Any, _: SessionNamespace) -> None:
    """Corrupt hash and index consistently, with a hash that matches no content."""
    block = table(state, 2)[0]
    state.device.hashes[block] = b"hash" * 8
    state.device.keep_hashes(np.array([block]), [b"hash" * 8])
    state.device.add_to_index(np.array([block]), [b"hash" * 8])


def two_hashes_swapped(state: Any, _: SessionNamespace) -> None:
    """Each block is found by its hash, but has the content of the other."""
    device, (one, other) = state.device, table(state, 0)[:2]
    device.hashes[one], device.hashes[other] = device.hashes[other], device.hashes[one]
    for block in (one, other):
        hashed = device.hashes[block]
        assert hashed is not None
        device.index.blocks[hashed] = block
        device.keep_hashes(np.array([block]), [hashed])


def retaken_hash(state: Any, _: SessionNamespace) -> None:
    device, block = state.device, table(state, 0)[0]
    device.index.blocks[b"other"] = device.index.blocks.pop(device.hashes[block])


def lose_free(pool: Any) -> None:
    pool.num_free -= 1


def replace_free(pool: Any, block: int) -> None:
    """Replace the free block that is taken next."""
    pool.num_free -= 1
    pool.free_unused(np.array([block]))


def cell(array: Any, index: Any, value: Any) -> None:
    array[index] = value


CORRUPTIONS: dict[str, Corruption] = {
    "ref count": lambda s, _: cell(s.device.ref_count, table(s, 0)[0], 1),
    "swap ref count": lambda s, _: cell(s.swap.ref_count, table(s, 3)[0], 2),
    "free twice": lambda s, _: s.device.free_unused(s.device.free_blocks()[:1]),
    "lost": lambda s, _: lose_free(s.device),
    "lost in swap": lambda s, _: lose_free(s.swap),
    "held and free": lambda s, _: s.device.free_unused(np.array(table(s, 0)[1:2])),
    "cached and free": lambda s, _: s.device.free_unused(s.device.evictable.blocks()[:1]),
    "free one replaced": lambda s, _: replace_free(s.device, s.device.free_blocks()[-2]),
    "no such free block": lambda s, _: replace_free(s.device, -1),
    "free count": lambda s, _: setattr(s.device, "num_free", 99),
    "tokens of a hashed block": lambda s, _: cell(s.device.token_ids, (table(s, 0)[0], 0), 999),
    "extra keys": lambda s, _: s.sequences.extra_keys.by_row[0].update({0: b"other"}),
    "extra keys of a free row": lambda s, _: s.sequences.extra_keys.by_row.update({s.sequences.free_rows[0]: {}}),
    "hashes of two blocks": two_hashes_swapped,
    "kept hash": lambda s, _: cell(s.device.kept_hashes, table(s, 0)[0], 0),
    "kept namespace": lambda s, _: cell(s.sequences.states, (0, NAMESPACE), 7),
    "kept id": lambda s, _: cell(s.sequences.states, (0, SEQUENCE_ID), 77),
    "no hash": lambda s, _: cell(s.device.hashes, table(s, 0)[0], None),
    "index": lambda s, _: s.device.index.blocks.popitem(),
    "index knows more": lambda s, _: s.device.index.blocks.update({b"more": 0}),
    "found by another hash": retaken_hash,
    "not indexed": lambda s, _: cell(s.device.indexed, table(s, 0)[0], False),
    "eviction queue": lambda s, _: s.device.evictable.pop(1),
    "eviction queue's length": lambda s, _: s.device.evictable.remove(np.array(table(s, 0)[:1])),
    "evictable while held": lambda s, _: s.device.evictable.add(np.array(table(s, 0)[:1])),
    "active count": lambda s, _: setattr(s.device, "num_active", 99),
    "shared count": lambda s, _: setattr(s.device, "num_shared", 99),
    "length": lambda s, _: cell(s.sequences.lengths, 0, 500),
    "token count": lambda s, _: setattr(s.sequences, "num_tokens", 1),
    "swapped": lambda s, _: cell(s.sequences.states, (0, SWAPPED), 1),
    "swapped count": lambda s, _: setattr(s.sequences, "num_swapped", 0),
    "computed": lambda s, _: cell(s.sequences.num_computed, 0, 11),
    "computed below 0": lambda s, _: cell(s.sequences.num_computed, 0, -1),
    "table's length": lambda s, _: cell(s.sequences.states, (0, NUM_BLOCKS), 1 << 20),
    "no such block in a table": lambda s, _: cell(s.sequences.block_tables, (0, 1), 32),
    "negative block in a table": lambda s, _: cell(s.sequences.block_tables, (0, 1), -1),
    "place in a table": other_place,
    "row free and named": lambda s, _: s.sequences.free_rows.append(0),
    "row free twice": lambda s, _: cell(s.sequences.free_rows, 0, s.sequences.free_rows[1]),
    "row lost": lambda s, _: s.sequences.free_rows.pop(),
    "row named twice": lambda _, space: space.rows.update({99: 0}),
    "row ending": lambda s, _: s.sequences.ending.add(0),
    "pin": lambda s, _: cell(s.device.pinned, table(s, 0)[0], True),
    "pin lost": lambda s, _: cell(s.device.pinned, s.device.pinned.argmax(), False),
    "pin's count": lambda s, _: cell(s.pins.counts, table(s, 0)[0], 1),
    "pinned count": lambda s, _: setattr(s.pins, "num_pinned", 0),
    "pinned cached count": lambda s, _: setattr(s.device, "num_pinned_cached", 0),
    "step is not the newest": lambda s, _: cell(s.sequences.states, (2, STEP), 1000),
    "step of computed tokens": lambda s, _: cell(s.sequences.num_computed, 2, 1),
    "step of another's name": lambda _, space: space.rows.update({1: 2, 3: 0}),
    "step's slots are another's": own_block_given_to_another,
    "step's block can be found": step_block_findable,
}


def test_each_corruption_is_found_in_slices_of_any_size(make: Make) -> None:
    with each_row() as row:
        for what, corrupt in CORRUPTIONS.items():
            for size in (1, 3, 8192):
                with row((what, size)):
                    manager, space = corruptible(make)
                    corrupt(manager, space)
                    with pytest.raises(InternalError, match=r"^integrity: "):
                        finish(manager.check_integrity_in_slices(size))


def test_the_whole_check_is_all_slices(make: Make) -> None:
    manager, _ = corruptible(make)
    manager.check_integrity()
    manager.device.num_shared = 99
    with pytest.raises(InternalError, match="shared blocks"):
        manager.check_integrity()


def test_slices_are_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits hold for the elements that NumPy goes through in a slice, and for those that Python does."""
    manager, space = make(num_blocks=700, max_sequence_tokens=4096)
    for sequence_id in range(4):
        add(manager, space, sequence_id, range(1000 * sequence_id, 1000 * sequence_id + 600))
    manager.allocate(space, [AllocationRequest(9, range(9000, 9300))])
    manager.open_step(space, [9])
    hashed: list[int] = []
    looked_up: list[bytes] = []
    added: list[int] = []

    class Index(dict[bytes, int]):
        def get(self, key: bytes, default: Any = None) -> Any:
            looked_up.append(key)
            return super().get(key, default)

    def counted_hash(*content: Any) -> bytes:
        hashed.append(1)
        return block_hash(*content)

    def counted_range(numbers: Any, stop: int, _: str) -> None:
        added.append(len(numbers))
        assert ((numbers >= 0) & (numbers < stop)).all()

    set_constants(monkeypatch, "kvservice.blocks", block_hash=counted_hash, require_range=counted_range)
    manager.device.index.blocks = Index(manager.device.index.blocks)
    total_hashed = total_looked_up = total_added = 0
    for _ in manager.check_integrity_in_slices(64):
        assert len(hashed) <= 64 // 32
        assert len(looked_up) <= 64 // 8
        assert sum(added) <= 2 * 64
        total_hashed, total_looked_up = total_hashed + len(hashed), total_looked_up + len(looked_up)
        total_added += sum(added)
        del hashed[:], looked_up[:], added[:]
    assert total_hashed == total_looked_up == 4 * 150
    assert total_added > 4 * 150 + 75


def test_sums_are_given_up_where_operations_never_end(make: Make) -> None:
    """Local invariants are still checked."""
    manager, space = corruptible(make)

    def disturbed() -> bool:
        """Check while other operations run after each slice, until the sums are given up."""
        slices = manager.check_integrity_in_slices(3)
        for count in range(10_000):
            try:
                next(slices)
            except StopIteration as end:
                return bool(end.value)
            if count < 4:
                manager.can_append(space, [3])
        pytest.fail("the check does not end")

    assert not disturbed()
    assert finish(manager.check_integrity_in_slices(3)) is True
    manager.device.token_ids[table(manager, 0)[0], 0] = 999
    with pytest.raises(InternalError, match="not its content's"):
        disturbed()


def test_a_step_that_ends_meanwhile_is_left_alone(make: Make) -> None:
    """The check fails if it looks at a step that has ended. The step ends after any number of slices."""
    manager, space = corruptible(make)
    num_slices = len(list(manager.check_integrity_in_slices(1)))
    assert num_slices > 50
    for count in range(num_slices):
        slices = manager.check_integrity_in_slices(1)
        for _ in range(count):
            next(slices)
        manager.fork(space, [3], [30])
        finish(slices)
        manager.free(space, [30])
        manager.open_step(space, [3])


class Operations:
    """Random operations of three clients; operations in slices run one slice at a time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.manager = BlockManager(
            BlocksConfig(
                num_blocks=48, block_size=2, num_layers=2, num_swap_blocks=24, watermark=0.0, max_sequences=20,
                max_sequence_tokens=40,
            ),
            clock=lambda: self.now,
        )  # fmt: skip
        self.spaces = [self.manager.open_namespace(n + 1) for n in range(3)]
        self.under_way: list[Waits[Any]] = []
        # Steps whose layers are all marked, as lanes do, but which are not committed yet.
        self.marked: list[tuple[SessionNamespace, int]] = []
        self.done = 0

    def one(self) -> None:
        self.now += self.random.random()
        if self.under_way and self.random.random() < 0.5:
            self.go_on(self.under_way.pop(self.random.randrange(len(self.under_way))))
            return
        operation = self.random.choice(
            [self.allocate] * 4
            + [self.write] * 4
            + [self.append, self.commit, self.pin, self.match] * 2
            + [self.fork, self.rearrange, self.truncate, self.free, self.swap, self.reset, self.close]
        )
        space = self.random.choice(self.spaces)
        try:
            operation(space)
        except InternalError:
            raise
        except KVServiceError:
            return  # out of blocks or rows, or swapped out
        self.done += 1

    def some(self, space: SessionNamespace) -> list[int]:
        names = space.sequence_ids()
        if not names:
            raise InvalidArgumentError("there is none")
        return self.random.sample(names, self.random.randint(1, min(3, len(names))))

    def go_on(self, slices: Waits[Any]) -> None:
        with contextlib.suppress(OutOfBlocksError, QuotaExceededError, DuplicateSequenceError, UnknownSessionError):
            if next(slices, self) is not self:
                self.under_way.append(slices)

    def allocate(self, space: SessionNamespace) -> None:
        requests = []
        for sequence_id in self.random.sample(range(100), self.random.randint(1, 3)):
            tokens = [self.random.randint(0, 1) for _ in range(self.random.randint(1, 16))]
            salt = [(0, b"salt")] if self.random.random() < 0.2 else []
            requests.append(AllocationRequest(sequence_id, tokens, salt))
        self.go_on(self.manager.allocate_in_slices(space, requests))

    def write(self, space: SessionNamespace) -> None:
        step_id = self.manager.open_step(space, self.some(space)).step_id
        if self.random.random() < 0.5:
            self.manager.mark_all_layers(space, step_id)
        elif self.random.random() < 0.5:
            written = self.manager.written_layers(space, step_id)
            assert written is not None
            written[:] = b"\1" * len(written)
            self.marked.append((space, step_id))

    def commit(self, _: SessionNamespace) -> None:
        if self.marked:
            self.manager.commit_written(*self.marked.pop())

    def append(self, space: SessionNamespace) -> None:
        names = self.some(space)
        self.manager.append(space, names, [self.random.randint(0, 1) for _ in names])

    def fork(self, space: SessionNamespace) -> None:
        parents = self.some(space)
        self.manager.fork(space, parents, [self.random.randint(0, 99) for _ in parents])

    def rearrange(self, space: SessionNamespace) -> None:
        names = self.some(space)
        self.manager.rearrange(space, names, [self.random.choice(names) for _ in names])

    def truncate(self, space: SessionNamespace) -> None:
        names = self.some(space)
        self.manager.truncate(space, names, [0 for _ in names])

    def free(self, space: SessionNamespace) -> None:
        self.go_on(self.manager.free_in_slices(space, self.some(space)))

    def swap(self, space: SessionNamespace) -> None:
        names = self.some(space)
        if self.manager.sequences.states[space.rows[names[0]], SWAPPED]:
            self.manager.swap_in(space, names)
        else:
            self.manager.swap_out(space, names)

    def pin(self, space: SessionNamespace) -> None:
        if space.pins and self.random.random() < 0.5:
            self.manager.unpin(space, next(iter(space.pins)))
        else:
            tokens = [self.random.randint(0, 1) for _ in range(4)]
            self.manager.pin(space, tokens, ttl_s=self.random.random() * 20)

    def match(self, _: SessionNamespace) -> None:
        self.manager.match_prefix([0, 0])

    def reset(self, _: SessionNamespace) -> None:
        self.go_on(self.manager.reset_prefix_cache_in_slices())

    def close(self, space: SessionNamespace) -> None:
        if self.random.random() < 0.2:
            self.go_on(self.manager.close_namespace_in_slices(space))
            self.spaces[self.spaces.index(space)] = self.manager.open_namespace()


def check_in_between(
    seed: int, num_operations: int, patch: pytest.MonkeyPatch, snapshot: Callable[[BlockManager], dict[str, Any]]
) -> None:
    """No operation or slice changes the inputs of the sums without incrementing the generation."""
    set_constants(patch, "kvservice.blocks", SLICE_BLOCKS=4, SLICE_SEQUENCES=1)
    operations = Operations(seed)
    manager, choose = operations.manager, random.Random(seed + 100)
    checking = manager.check_integrity_in_slices(3)
    results: list[bool] = []
    for _ in range(num_operations):
        before, generation = snapshot(manager), manager.generation
        operations.one()
        if manager.generation == generation:
            # Deadlines of removed pins may disappear.
            assert snapshot(manager) | {"deadlines": before["deadlines"]} == before
        for _ in range(choose.choice([0, 1, 5, 400])):
            try:
                next(checking)
            except StopIteration as end:
                results.append(end.value)
                checking = manager.check_integrity_in_slices(choose.choice([1, 3, 100]))
    assert operations.done > 0.3 * num_operations
    assert {True, False} == set(results), "some passes are disturbed, and some are not"
    manager.check_integrity()


def test_operations_in_between_are_no_corruption(
    monkeypatch: pytest.MonkeyPatch, snapshot: Callable[[BlockManager], dict[str, Any]]
) -> None:
    """check_in_between fails if the check takes an operation for a corruption."""
    check_in_between(3, 250, monkeypatch, snapshot)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3)[ENTRIES])
def test_many_operations_in_between_are_no_corruption(
    seed: int, monkeypatch: pytest.MonkeyPatch, snapshot: Callable[[BlockManager], dict[str, Any]]
) -> None:
    """check_in_between fails if the check takes an operation for a corruption."""
    check_in_between(seed, 1000, monkeypatch, snapshot)
