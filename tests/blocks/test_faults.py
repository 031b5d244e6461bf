"""An exception at any line of an operation that changes tables, for example because memory is short."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeAlias

import pytest
from crash_rig import CONFIG, Views
from crashes import KeptManager, State, is_ours, views

from kvservice.blocks import NUM_COUNTERS, AllocationRequest, SessionNamespace, finish
from kvservice.errors import ResourceExhaustedError

Operation: TypeAlias = Callable[[KeptManager, SessionNamespace], object]
OPERATIONS: dict[str, Operation] = {
    "truncate one": lambda manager, space: manager.truncate(space, [1], [3]),
    "truncate": lambda manager, space: manager.truncate(space, [4, 1, 2], [3, 1, 0], unindex=True),
    "free one": lambda manager, space: manager.free(space, [4]),
    "free one of the swap tier": lambda manager, space: manager.free(space, [3]),
    "free": lambda manager, space: manager.free(space, [1, 3, 4, 5]),
    "rearrange one": lambda manager, space: manager.rearrange(space, [2], [5]),
    "rearrange": lambda manager, space: manager.rearrange(space, [1, 2, 4, 5], [4, 2, 1, 1]),
    "swap out": lambda manager, space: manager.swap_out(space, [1, 2, 4]),
    "swap in": lambda manager, space: manager.swap_in(space, [3], 3),
    "fork": lambda manager, space: manager.fork(space, [1, 4, 1], [10, 11, 12]),
    "allocate": lambda manager, space: manager.allocate(space, [AllocationRequest(10, list(range(7)))]),
    "move to the disk": lambda manager, space: finish(manager.move_to_disk_in_slices(space, [1, 4])),
    "close": lambda manager, space: manager.close_namespace(space),
    # These replace shared blocks with copies, which the device makes afterwards.
    "append": lambda manager, space: manager.append(space, [1, 2, 5], [7, 8, 9]),
    "advance": lambda manager, space: manager.advance(space, [1, 2, 5], [7, 8], [1, 1, 3]),
    "reopen": lambda manager, space: manager.reopen(space, [1, 4], [0, 1], [7, 4]),
}


def used_manager() -> tuple[KeptManager, SessionNamespace]:
    """Return a manager and a namespace with sequences that share blocks, lie in the swap tier, have extra keys, pending
    tokens and a live step."""
    manager = KeptManager(CONFIG, lambda: 0.0)
    space, other = manager.open_namespace(1), manager.open_namespace(2)
    for owner, name, tokens, keys in (
        (space, 1, range(7), ()),
        (space, 3, range(20, 25), ()),
        (space, 4, range(30, 35), [(0, b"tenant")]),
        (other, 9, range(7), ()),
    ):
        manager.allocate(owner, [AllocationRequest(name, list(tokens), extra_keys=keys)])
        manager.mark_all_layers(owner, manager.open_step(owner, [name]).step_id)
    manager.fork(space, [1], [2])
    manager.allocate(space, [AllocationRequest(5, [60, 61, 62])])
    manager.swap_out(space, [3])
    manager.open_step(space, [5])
    manager.append(space, [4], [35])
    manager.end_operation()
    manager.check_integrity()
    return manager, space


@contextlib.contextmanager
def fault_at(number: int) -> Iterator[Callable[[], bool]]:
    """Raise MemoryError before the line of this number that kvservice/blocks runs. Yields whether it was raised."""
    left = number

    def at_line(_frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if left < 0:
            raise MemoryError
        return at_line

    before = sys.gettrace()
    sys.settrace(lambda frame, _event, _argument: at_line if is_ours(frame) else None)
    try:
        yield lambda: left < 0
    finally:
        sys.settrace(before)


def check_tables(manager: KeptManager) -> None:
    """Check that each block has at least as many references as there are tables that name it, and is not free then."""
    for pool, swapped in ((manager.device, False), (manager.swap, True)):
        named = Counter[int]()
        for one in views(manager).values():
            if one.swapped == swapped:
                named.update(one.blocks)
        assert all(pool.ref_count[block] >= count for block, count in named.items())
        assert not named.keys() & set(pool.free_blocks().tolist())


def fill_pool(manager: KeptManager) -> None:
    """Let others overwrite all blocks that they can get."""
    (other,) = (space for space in manager.namespaces if space.number == 2)
    with contextlib.suppress(ResourceExhaustedError):
        for name in range(100, 200):
            manager.allocate(other, [AllocationRequest(name, [name, name])])


def recovered(state: State) -> Views:
    """Return the sequences of the next process, whose state is whole."""
    manager = KeptManager(CONFIG, lambda: 0.0, state)
    manager.recover({number: [0] * NUM_COUNTERS for number in (1, 2)})
    manager.check_integrity()
    return views(manager)


def faults(operation: Operation) -> Iterator[KeptManager]:
    """Yield managers in which the operation has raised at one line after the other."""
    for number in itertools.count():
        manager, space = used_manager()
        with fault_at(number) as raised, contextlib.suppress(MemoryError):
            operation(manager, space)
        if not raised():
            assert number > 10
            return
        yield manager


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_an_exception_gives_no_block_to_two_sequences_and_a_restart_repairs_the_rest(operation: Operation) -> None:
    """Every sequence is as before or as after the operation, or gone, also when others have got all free blocks."""
    manager, space = used_manager()
    before = views(manager)
    operation(manager, space)
    after = views(manager)

    def check(manager: KeptManager) -> Views:
        check_tables(manager)
        now = views(manager)
        for key, one in (*now.items(), *recovered(manager.kept_state()).items()):
            assert key not in before or one in (before[key], after.get(key))
        return now

    for manager in faults(operation):
        found = check(manager)
        fill_pool(manager)
        assert check(manager).items() >= found.items()
