"""The pool of a killed process on a real GPU, and copies whose end is noticed without another call."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import numpy as np
import pytest
from kept_files import HeldFiles
from killed_device import NUM_FILLED, check_taken_over, config_of, killed, unfinished

from kvservice.devices import open_device
from kvservice.kept import KeptFiles, KeptState

CUDA = pytest.importorskip("kvservice._cuda", reason="kvservice was built without CUDA")


def wait_for_no(kept: KeptState, name: str, num_blocks: int) -> None:
    pause = threading.Event()
    for _ in range(60_000):
        if not len(unfinished(kept, name, num_blocks)):
            return
        pause.wait(0.001)
    pytest.fail("nobody has noticed that the copies are complete")


def test_after_a_kill_all_blocks_but_the_unfinished_ones_are_whole() -> None:
    """Every byte of the other blocks is compared."""
    kept = KeptState.open(KeptFiles(killed("cuda"), None), {})
    device = open_device(config_of("cuda"), kept)
    asyncio.run(check_taken_over(device, kept))
    device.close()


def test_the_end_of_copies_is_noticed_when_idle() -> None:
    """The counts of unfinished blocks return to 0 without another operation."""
    kept = KeptState.fresh()
    device: Any = open_device(config_of("cuda"), kept)
    ids = np.arange(NUM_FILLED, dtype=np.int32)
    device.swap_out(ids, ids)
    device.copy(ids, ids + np.int32(NUM_FILLED))
    device.swap_in(ids, ids + np.int32(2 * NUM_FILLED))
    wait_for_no(kept, "unfinished_swap", NUM_FILLED)
    wait_for_no(kept, "unfinished_device", 3 * NUM_FILLED)
    device.close()


@pytest.mark.alone
def test_the_memory_is_free_when_no_process_has_the_descriptor() -> None:
    left = []
    for num_processes in (1, 3):
        keeper = HeldFiles()
        for _ in range(num_processes):
            kept = KeptState.open(keeper.start(), {})
            device = open_device(config_of("cuda"), kept)
            kept.ready()
            device.close()
        assert kept.taken == (num_processes > 1)
        keeper.close()
        gc.collect()  # the staging memory of the devices
        left.append(CUDA.memory_info(0)[0])
    assert left[1] > left[0] - device.memory_bytes["pool"]
