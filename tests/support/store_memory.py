"""The memory of a daemon's store, from outside."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The geometry of a store of at most 256 MiB with blocks of 64 KiB: 64 records, then 64 blocks in each slab.
FIRST_BLOCK = 4096
SLAB_BYTES = FIRST_BLOCK + (4 << 20)


BLOCK_BYTES = 64 << 10


def zero_values(pid: int) -> int:
    """Overwrite the bytes of all blocks, not their records, in the store of a daemon. Returns how many were not zero
    before."""
    count = 0
    with _store(pid) as memory:
        for slab in range(0, len(memory) - SLAB_BYTES + 1, SLAB_BYTES):
            values = slice(slab + FIRST_BLOCK, slab + SLAB_BYTES)
            before = memory[values]
            if any(before):
                count += len(before) - before.count(0)
                memory[values] = bytes(len(before))
    return count


def damage_values(pid: int) -> None:
    """Change one byte in the middle of each block: the exponent of a float32."""
    with _store(pid) as memory:
        for slab in range(0, len(memory) - SLAB_BYTES + 1, SLAB_BYTES):
            for place in range(slab + FIRST_BLOCK + BLOCK_BYTES // 2, slab + SLAB_BYTES, BLOCK_BYTES):
                memory[place + 3] ^= 0x40


@contextmanager
def _store(pid: int) -> Iterator[mmap.mmap]:
    """Map the store of a daemon."""
    (path,) = [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if "memfd:kvservice-store" in os.readlink(fd)][:1]
    descriptor = os.open(path, os.O_RDWR)
    try:
        with mmap.mmap(descriptor, 0) as memory:
            yield memory
    finally:
        os.close(descriptor)
