"""Recovery from the kept memory of a process that ended at any line of an operation, or of a recovery."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
from crash_operations import Operations
from crashes import Lines

from kvservice.blocks.ahead import AheadStepper
from kvservice.blocks.allocation import Allocator
from kvservice.blocks.block_pool import BlockPool, CachingBlockPool
from kvservice.blocks.freeing import Reclaimer
from kvservice.blocks.growth import GrowthPlanner
from kvservice.blocks.intents import Intents
from kvservice.blocks.layers import LayerTracker
from kvservice.blocks.loading import Loader
from kvservice.blocks.pins import PinTable
from kvservice.blocks.prefix_cache import PrefixCache
from kvservice.blocks.rearranging import Rearranger
from kvservice.blocks.recovery import Recoverer
from kvservice.blocks.reopening import Reopener
from kvservice.blocks.sequences import SequenceSlots
from kvservice.blocks.sharing import Forker
from kvservice.blocks.state import BlockState
from kvservice.blocks.steps import StepPlanner
from kvservice.blocks.swapping import Swapper

NUM_SEEDS, NUM_OPERATIONS = 36, 60
# The functions that change kept memory, or undo and derive it.
STORING: list[Callable[..., Any]] = [
    Allocator._execute, Allocator._create, BlockPool.keep_hashes, BlockPool.keep_hashes_of, CachingBlockPool.allocate,
    CachingBlockPool._take, Loader.begin_load, Loader.end_load,
    CachingBlockPool.decref, CachingBlockPool.add_to_index, CachingBlockPool._pop_from_index, CachingBlockPool.reset,
    GrowthPlanner.apply, GrowthPlanner.apply_decode, GrowthPlanner._copy, Intents.begin, Intents._save_row,
    Intents.begin_new, Intents.end, LayerTracker.set_tokens, LayerTracker.commit_rows, LayerTracker._hash_blocks,
    LayerTracker._index_blocks, LayerTracker.mark_part, LayerTracker.mark_all_layers, LayerTracker.commit_written,
    PinTable.add, PinTable.remove, PinTable.expire, PrefixCache.touch, PrefixCache.reset, Reclaimer.truncate,
    Reclaimer._unindex_cut_blocks, Reclaimer.free, Reclaimer._forget_lost, Reclaimer._free_parts, Reclaimer._free_rows,
    Rearranger._move, Reopener.reopen, SequenceSlots.set_extra_keys, SequenceSlots.drop_extra_keys,
    SequenceSlots.append_blocks, SequenceSlots.end_steps, Forker.fork, Forker._fork_row, BlockState.enter,
    BlockState.end_operation, BlockState.create_lost, BlockState.forget_lost, BlockState.keep_lost,
    BlockState.settle_lost,
    AheadStepper.open, AheadStepper.commit, AheadStepper._open, AheadStepper._compute,
    StepPlanner.open_step, StepPlanner.append_decode, StepPlanner.open, Swapper.swap_out, Swapper.swap_in,
]  # fmt: skip
RECOVERING: list[Callable[..., Any]] = [
    Recoverer.recover, Recoverer._end_operation, Recoverer._lose, Recoverer._tables, Recoverer._end_sequences,
    Recoverer._derive, Recoverer._namespace, CachingBlockPool.recover_cache, BlockPool.recover, SequenceSlots.recover,
]  # fmt: skip


def in_small_slices(patch: pytest.MonkeyPatch) -> None:
    """Let a few blocks be a slice, so that operations have several."""
    for module in ("slices", "pins", "freeing"):
        patch.setattr(f"kvservice.blocks.{module}.SLICE_BLOCKS", 4)
    patch.setattr("kvservice.blocks.slices._BLOCKS_PER_ROW", 1)


@pytest.fixture(scope="module")
def rigs() -> Iterator[list[Operations]]:
    """Random operations; after each, another manager has recovered from every state of its kept memory."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        in_small_slices(patch)
        for seed in range(NUM_SEEDS):
            made.append(rig := Operations(seed, crash=seed % 4 * 0.15))
            try:
                for _ in range(NUM_OPERATIONS):
                    rig.one()
            except BaseException as error:
                error.add_note(f"seed {seed}, after {rig.counts.total()} operations")
                raise
        yield made


def test_every_operation_ended_at_every_line(rigs: list[Operations]) -> None:
    counts: Counter[str] = sum((rig.counts for rig in rigs), Counter())
    assert len(counts) == 26
    assert min(counts.values()) >= 2, counts
    assert sum(rig.num_checked for rig in rigs) > 3000
    lines = set().union(*(rig.lines for rig in rigs))
    assert missed(STORING, lines) == []


def test_recovery_ended_at_every_line(rigs: list[Operations]) -> None:
    assert sum(rig.num_crashes for rig in rigs) > 50
    assert sum(rig.num_lost for rig in rigs) > 20
    assert missed(RECOVERING, set().union(*(rig.recovery_lines for rig in rigs))) == []


def missed(functions: list[Callable[..., Any]], lines: Lines) -> list[str]:
    """Return the lines of functions that did not run, except those that refuse a request."""
    ran = {(code.co_filename, line) for code, line in lines}
    found = []
    for function in functions:
        assert isinstance(function, FunctionType)
        code = function.__code__
        refusals = refusing(function)
        own = {line for _, _, line in code.co_lines() if line and line > code.co_firstlineno} - refusals
        found += [f"{function.__qualname__}:{line}" for line in own if (code.co_filename, line) not in ran]
    return found


def refusing(function: FunctionType) -> set[int]:
    """Return the lines of `raise` statements and of calls of `refuse`."""
    source, first = textwrap.dedent(inspect.getsource(function)), function.__code__.co_firstlineno
    nodes = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Raise)
        or (isinstance(node, ast.Expr) and "refuse(" in ast.unparse(node))
        or (isinstance(node, ast.Assign) and ast.unparse(node).startswith(("never =", "needed =")))
    ]
    return {line + first - 1 for node in nodes for line in range(node.lineno, (node.end_lineno or 0) + 1)}
