"""Recovery from the kept memory of a process that ended at any line of an operation, or of a recovery."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from types import CodeType

import pytest
from constants import set_constants
from crash_operations import Operations
from crashes import Seen

NUM_SEEDS, NUM_OPERATIONS = 44, 60
# Statements whose bodies these operations do not reach. test_next_process shows what a restart makes of steps and pins;
# the others store nothing before another line of their function does.
NOT_REACHED = {
    "if not len(covered)",
    "if before is not None and (event := before(namespace, plan.sequences)) is not None",
    "if self._tail + len(blocks) > len(self._log)",
    "if entry.follows and (not namespace.steps[entry.follows].committed)",
    "if pin_id not in namespace.pins",
    "if namespace.closed",
    "if expected_lengths is not None",
    "if np.count_nonzero(finished)",
    "if with_steps",
    "if not recovering",
    "if (owners := self.device.owners) is not None",  # nothing of a tenant's shares is kept
    "if state.device.owners is not None",
    "if namespace.quota is not None",
    "if self.owners is not None",
    "if self._owners is not None",
    "for number in [number for number in state.kept.lost if number not in open_namespaces]",
    "else of: if number in namespaces and fits and self._device.indexed[blocks].all()",
}


def operated(seeds: Iterable[int], num_operations: int) -> list[Operations]:
    """Perform random operations. After each, another manager recovers from every state of its kept memory. A few blocks
    are a slice, so that operations have several."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        set_constants(patch, "kvservice.blocks", SLICE_BLOCKS=4, _BLOCKS_PER_ROW=1)
        for seed in seeds:
            made.append(rig := Operations(seed, crash=seed % 4 * 0.15))
            try:
                for _ in range(num_operations):
                    rig.one()
            except BaseException as error:
                error.add_note(f"seed {seed}, after {rig.counts.total()} operations")
                raise
    return made


@pytest.mark.brief
def test_operations_ended_at_every_line() -> None:
    """Operations.one fails if a recovery from one of the lines is wrong."""
    rigs = operated(range(100, 108), 40)
    assert sum(rig.num_checked for rig in rigs) > 1500
    assert sum(rig.num_crashes for rig in rigs) > 8


@pytest.fixture(scope="module")
def rigs() -> list[Operations]:
    return operated(range(NUM_SEEDS), NUM_OPERATIONS)


@pytest.mark.slow
def test_every_operation_ended_at_every_line(rigs: list[Operations]) -> None:
    """All lines ran of the functions that change kept memory, but for those that refuse a request."""
    counts: Counter[str] = sum((rig.counts for rig in rigs), Counter())
    assert len(counts) == 29
    assert min(counts.values()) >= 2, counts
    assert sum(rig.num_checked for rig in rigs) > 3000
    seen = united(rig.seen for rig in rigs)
    assert len(seen.storing) > 50
    assert missed(seen, seen.storing) == []


@pytest.mark.slow
def test_recovery_ended_at_every_line(rigs: list[Operations]) -> None:
    """All lines ran of the functions that undo an operation, and derive what is not kept."""
    assert sum(rig.num_crashes for rig in rigs) > 50
    assert sum(rig.num_lost for rig in rigs) > 20
    seen = united(rig.seen_in_recovery for rig in rigs)
    assert len(seen.storing) > 5
    assert missed(seen, {code for code, _ in seen.lines}) == []


def united(parts: Iterable[Seen]) -> Seen:
    together = Seen()
    for part in parts:
        together.lines |= part.lines
        together.storing |= part.storing
    return together


def missed(seen: Seen, functions: set[CodeType]) -> list[str]:
    """Return the lines of functions that did not run, except those that refuse a request. Functions that only say
    whether an operation can be done are left out."""
    found = []
    for code in functions:
        if code.co_name.startswith("can_"):
            continue
        source = ast.parse(textwrap.dedent(inspect.getsource(code)))
        left_out = [node for statement in ast.walk(source) for node in left_out_in(statement)]
        own = {line for _, _, line in code.co_lines() if line and line > code.co_firstlineno}
        for node in left_out:
            own -= {line + code.co_firstlineno - 1 for line in range(node.lineno, (node.end_lineno or 0) + 1)}
        found += [f"{code.co_qualname}:{line}" for line in own if (code, line) not in seen.lines]
    return sorted(found)


def left_out_in(statement: ast.AST) -> Sequence[ast.stmt | ast.ExceptHandler]:
    """Return the statement if it refuses a request, and parts of it that are not reached."""
    if isinstance(statement, ast.Raise):
        return [statement]
    if isinstance(statement, ast.ExceptHandler) and "ResourceExhaustedError" in ast.unparse(statement):
        return [statement]  # what memory is left does not depend on the state
    if isinstance(statement, ast.Expr) and "refuse(" in ast.unparse(statement):
        return [statement]
    if isinstance(statement, ast.Assign) and ast.unparse(statement).startswith(("never =", "needed =")):
        return [statement]
    if not isinstance(statement, ast.If | ast.For):
        return []
    header = ast.unparse(statement).split("\n")[0].removesuffix(":")
    body = statement.body if header in NOT_REACHED else []
    return body + (statement.orelse if f"else of: {header}" in NOT_REACHED else [])
