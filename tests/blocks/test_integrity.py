"""check_integrity, at once and in slices, detects each kind of corruption, without false alarms between operations."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvservice.blocks import AllocationRequest, BlockManager, BlocksConfig, SessionNamespace
from kvservice.blocks import integrity as integrity_module
from kvservice.blocks.integrity import MAX_TRIES, check_in_slices
from kvservice.blocks.invariants import parts, pieces, windows
from kvservice.blocks.sequences import NAMESPACE, NUM_BLOCKS, SEQUENCE_ID, STEP, SWAPPED
from kvservice.blocks.slices import Waits, finish
from kvservice.blocks.state import BlockState
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
Corruption = Callable[[BlockState, SessionNamespace], object]


def add(manager: BlockManager, space: SessionNamespace, sequence_id: int, tokens: Any, salt: Any = ()) -> None:
    """A sequence whose tokens are computed."""
    manager.allocate(space, [AllocationRequest(sequence_id, tokens, salt)])
    manager.mark_all_layers(space, manager.open_step(space, [sequence_id]).step_id)


@pytest.fixture
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


def table(state: BlockState, row: int) -> list[int]:
    return state.sequences.block_tables[row, : state.sequences.states[row, NUM_BLOCKS]].tolist()


def other_place(state: BlockState, _: SessionNamespace) -> None:
    """Put one block at two entries of a table, with a matching reference count."""
    first, second = table(state, 0)[:2]
    state.sequences.block_tables[0, 1] = first
    state.device.ref_count[[first, second]] += [1, -1]
    state.device._push_free(np.array([second]))
    state.device.num_active -= 1


def own_block_given_to_another(state: BlockState, space: SessionNamespace) -> None:
    """Let two sequences write to one block, with a matching reference count."""
    mine, free = table(state, 2)[0], state.sequences.free_rows.pop()
    space.rows[77] = free
    state.sequences.block_tables[free, 0] = mine
    state.sequences.states[free] = [4, 0, 1, 0, 0, 1, 77, 0]
    state.sequences.num_tokens += 4
    state.device.ref_count[mine] = 2
    state.device.num_shared += 1


def step_block_findable(state: BlockState, _: SessionNamespace) -> None:
    """Corrupt hash and index consistently, with a hash that matches no content."""
    block = table(state, 2)[0]
    state.device.hashes[block] = b"hash" * 8
    state.device.keep_hashes(np.array([block]), [b"hash" * 8])
    state.device.add_to_index(np.array([block]), [b"hash" * 8])


def two_hashes_swapped(state: BlockState, _: SessionNamespace) -> None:
    """Each block is found by its hash, but has the content of the other."""
    device, (one, other) = state.device, table(state, 0)[:2]
    device.hashes[one], device.hashes[other] = device.hashes[other], device.hashes[one]
    for block in (one, other):
        hashed = device.hashes[block]
        assert hashed is not None
        device.index.blocks[hashed] = block
        device.keep_hashes(np.array([block]), [hashed])


def retaken_hash(state: BlockState, _: SessionNamespace) -> None:
    device, block = state.device, table(state, 0)[0]
    device.index.blocks[b"other"] = device.index.blocks.pop(device.hashes[block])  # type: ignore[arg-type]


def cell(array: Any, index: Any, value: Any) -> None:
    array[index] = value


CORRUPTIONS: dict[str, Corruption] = {
    "ref count": lambda s, _: cell(s.device.ref_count, table(s, 0)[0], 1),
    "swap ref count": lambda s, _: cell(s.swap.ref_count, table(s, 3)[0], 2),
    "free twice": lambda s, _: s.device._push_free(s.device.free_blocks()[:1]),
    "lost": lambda s, _: s.device._pop_free(1),
    "lost in swap": lambda s, _: s.swap._pop_free(1),
    "held and free": lambda s, _: s.device._push_free(np.array(table(s, 0)[1:2])),
    "cached and free": lambda s, _: s.device._push_free(s.device.evictable.blocks()[:1]),
    "free one replaced": lambda s, _: cell(s.device._free_stack, 0, s.device._free_stack[1]),
    "no such free block": lambda s, _: cell(s.device._free_stack, 0, -1),
    "free count": lambda s, _: setattr(s.device, "num_free", 99),
    "tokens of a hashed block": lambda s, _: cell(s.device.token_ids, (table(s, 0)[0], 0), 999),
    "extra keys": lambda s, _: s.sequences.extra_keys[0].update({0: b"other"}),
    "extra keys of a free row": lambda s, _: s.sequences.extra_keys.update({s.sequences.free_rows[0]: {}}),
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
    "eviction queue's length": lambda s, _: setattr(s.device.evictable, "_size", 1),
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


@pytest.mark.parametrize("size", [1, 3, integrity_module.SLICE_ENTRIES])
@pytest.mark.parametrize("what", CORRUPTIONS)
def test_a_corruption_is_found(corruptible: tuple[BlockManager, SessionNamespace], what: str, size: int) -> None:
    manager, space = corruptible
    CORRUPTIONS[what](manager.state, space)
    with pytest.raises(InternalError, match=r"^integrity: "):
        finish(check_in_slices(manager.state, size))


def test_the_whole_check_is_all_slices(corruptible: tuple[BlockManager, SessionNamespace]) -> None:
    manager, _ = corruptible
    manager.check_integrity()
    manager.state.device.num_shared = 99
    with pytest.raises(InternalError, match="shared blocks"):
        manager.check_integrity()


def test_cutting() -> None:
    assert [part.tolist() for part in parts(range(5), 2)] == [[0, 1], [2, 3], [4]]
    assert list(parts((), 2)) == []
    assert list(windows(5, 2)) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    rows, first, counts = np.array([7, 8, 9, 4]), np.array([1, 0, 2, 0]), np.array([2, 0, 5, 1])
    cut = [np.stack(piece).T.tolist() for piece in pieces(rows, first, counts, 3)]
    assert cut == [[[7, 1], [7, 2], [9, 2]], [[9, 3], [9, 4], [9, 5]], [[9, 6], [4, 0]]]
    assert list(pieces(rows[:0], first[:0], counts[:0], 3)) == []


def test_slices_are_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what NumPy goes through in them, and by what Python does."""
    manager, space = make(num_blocks=700, max_sequence_tokens=4096)
    for sequence_id in range(4):
        add(manager, space, sequence_id, range(1000 * sequence_id, 1000 * sequence_id + 600))
    manager.allocate(space, [AllocationRequest(9, range(9000, 9300))])
    manager.open_step(space, [9])
    hashed, looked_up, added = [], [], []
    module: Any = integrity_module
    block_hash, require_range = module.block_hash, module.require_range

    class Index(dict[bytes, int]):
        def get(self, key: bytes, default: Any = None) -> Any:
            looked_up.append(key)
            return super().get(key, default)

    def counted_range(numbers: Any, stop: int, what: str) -> None:
        added.append(len(numbers))
        require_range(numbers, stop, what)

    monkeypatch.setattr(integrity_module, "block_hash", lambda *rest: hashed.append(1) or block_hash(*rest))  # type: ignore[func-returns-value]
    for module in ("integrity", "sums"):
        monkeypatch.setattr(f"kvservice.blocks.{module}.require_range", counted_range)
    manager.state.device.index.blocks = Index(manager.state.device.index.blocks)
    total_hashed = total_looked_up = total_added = 0
    for _ in check_in_slices(manager.state, 64):
        assert len(hashed) <= 64 // 32
        assert len(looked_up) <= 64 // 8
        assert sum(added) <= 2 * 64
        total_hashed, total_looked_up = total_hashed + len(hashed), total_looked_up + len(looked_up)
        total_added += sum(added)
        del hashed[:], looked_up[:], added[:]
    assert total_hashed == total_looked_up == 4 * 150
    assert total_added > 4 * 150 + 75


def test_sums_are_given_up_where_operations_never_end(corruptible: tuple[BlockManager, SessionNamespace]) -> None:
    """Local invariants are still checked."""
    manager, space = corruptible

    def disturbed() -> Iterator[bool]:
        slices = check_in_slices(manager.state, 3)
        for count in range(10_000):
            try:
                next(slices)
            except StopIteration as end:
                yield end.value
                return
            if count < MAX_TRIES:
                manager.can_open_step(space, [3])

    assert list(disturbed()) == [False]
    assert finish(check_in_slices(manager.state, 3)) is True
    manager.state.device.token_ids[table(manager.state, 0)[0], 0] = 999
    with pytest.raises(InternalError, match="not its content's"):
        list(disturbed())


def test_a_step_that_ends_meanwhile_is_left_alone(corruptible: tuple[BlockManager, SessionNamespace]) -> None:
    """The check fails with IntegrityError if it looks at a step that has ended."""
    manager, space = corruptible
    slices: Any = check_in_slices(manager.state, 1)
    for _ in slices:
        if slices.gi_yieldfrom.__name__ == "_check_step":
            break
    else:
        pytest.fail("no slice checks a step")
    manager.fork(space, [3], [30])
    for _ in slices:
        pass


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
        if self.manager.state.sequences.states[space.rows[names[0]], SWAPPED]:
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


@pytest.mark.parametrize("seed", range(3))
def test_operations_in_between_are_no_corruption(
    seed: int, monkeypatch: pytest.MonkeyPatch, snapshot: Callable[[BlockManager], dict[str, Any]]
) -> None:
    """No operation or slice changes the inputs of the sums without incrementing the generation."""
    for module in ("slices", "pins", "freeing"):
        monkeypatch.setattr(f"kvservice.blocks.{module}.SLICE_BLOCKS", 4)
    for module in ("slices", "allocation"):
        monkeypatch.setattr(f"kvservice.blocks.{module}.SLICE_SEQUENCES", 1)
    operations = Operations(seed)
    manager, choose = operations.manager, random.Random(seed + 100)
    checking = check_in_slices(manager.state, 3)
    results: list[bool] = []
    for _ in range(1000):
        before, generation = snapshot(manager), manager.state.generation
        operations.one()
        if manager.state.generation == generation:
            # Deadlines of removed pins may disappear.
            assert snapshot(manager) | {"deadlines": before["deadlines"]} == before
        for _ in range(choose.choice([0, 1, 5, 400])):
            try:
                next(checking)
            except StopIteration as end:
                results.append(end.value)
                checking = check_in_slices(manager.state, choose.choice([1, 3, 100]))
    assert operations.done > 300
    assert {True, False} == set(results), "some passes are disturbed, and some are not"
    manager.check_integrity()
