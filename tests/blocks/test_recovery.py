"""Recovery from the kept memory of a process that ended at any line."""

from __future__ import annotations

import pytest
from crash_operations import Operations


@pytest.mark.parametrize("seed", range(4))
def test_an_operation_may_end_at_any_line(seed: int) -> None:
    rig = Operations(seed)
    for _ in range(60):
        rig.one()
    assert rig.num_checked > 200


@pytest.mark.parametrize("seed", range(6))
def test_operations_go_on_after_crashes(seed: int) -> None:
    rig = Operations(seed + 100, crash=0.3)
    for _ in range(60):
        rig.one()
    assert rig.num_crashes >= 3
