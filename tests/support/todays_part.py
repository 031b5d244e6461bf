"""Lists that are too long for each run: a run tries every third entry, each day the next third.

TEST_PART=0, 1 or 2 chooses the third; TEST_PART=all takes all. Where TEST_PART is given, as in CI, the tests with the
marker `third` are such a list, too.
"""

from __future__ import annotations

import os
import time

NUM_PARTS = 3
PART = os.environ.get("TEST_PART", str(int(time.time() // 86400) % NUM_PARTS))
# The entries of a list that this run tries.
ENTRIES = slice(0, None, 1) if PART == "all" else slice(range(NUM_PARTS)[int(PART)], None, NUM_PARTS)
