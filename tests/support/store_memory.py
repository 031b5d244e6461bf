"""The memory of a daemon's store, from outside."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

# The geometry of a store of at most 256 MiB with blocks of 64 KiB: 63 records, then 63 blocks in each slab.
SLAB_BYTES = 4 << 20
FIRST_BLOCK = 4096


def zero_values(pid: int) -> int:
    """Overwrite the bytes of all blocks, not their records, in the store of a daemon. Returns how many were not zero
    before."""
    (path,) = [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if "memfd:kvservice-store" in os.readlink(fd)][:1]
    descriptor = os.open(path, os.O_RDWR)
    count = 0
    try:
        with mmap.mmap(descriptor, 0) as memory:
            for slab in range(0, len(memory) - SLAB_BYTES + 1, SLAB_BYTES):
                values = slice(slab + FIRST_BLOCK, slab + SLAB_BYTES)
                before = memory[values]
                if any(before):
                    count += len(before) - before.count(0)
                    memory[values] = bytes(len(before))
    finally:
        os.close(descriptor)
    return count
