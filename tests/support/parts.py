"""A third of a long list of cases, each day the next one.

KVSERVICE_PART=0, 1 or 2 takes that third, KVSERVICE_PART=all takes all cases.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TypeVar

NUM_PARTS = 3
# The variable is removed, because a daemon refuses unknown options.
CHOICE = os.environ.pop("KVSERVICE_PART", str(int(time.time() // 86400) % NUM_PARTS))
FIRST, STEP = (0, 1) if CHOICE == "all" else (int(CHOICE), NUM_PARTS)
assert 0 <= FIRST < NUM_PARTS, f"KVSERVICE_PART is {CHOICE}, must be all or less than {NUM_PARTS}"

T = TypeVar("T")


def of_this_part(cases: Sequence[T]) -> Sequence[T]:
    return cases[FIRST::STEP]
