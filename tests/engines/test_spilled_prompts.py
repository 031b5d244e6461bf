"""An engine gets the same tokens over blocks that come from the disk, after the daemon has lost its memory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvservice.client import KVClient
from kvservice.engines import LLM, SamplingParams
from kvservice.launch import Daemon

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROBE = list(range(33))
# At the width of the tiny model.
SHAPE: dict[str, Any] = {"num_layers": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float32", "block_size": 16}


def test_prompts_are_found_after_a_reboot_and_the_tokens_are_the_same(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    options = SHAPE | {
        "num_blocks": 64, "max_sequence_tokens": 512, "swap_space_gib": 0.0, "store_gib": 1 / 64,
        "disk": str(tmp_path / "disk"), "disk_gib": 0.25, "weights": "tiny", "prefill_tokens_per_s": 1.0,
    }  # fmt: skip
    prompts = [[(7 * n + 3 * i) % 500 for i in range(100)] for n in range(3)]

    def generate(daemon: Daemon) -> tuple[list[list[int]], int]:
        """Return the tokens, and how many tokens of prompts were found."""
        with KVClient(daemon.address) as client, LLM(directory, address=daemon.address) as engine:
            before = client.stats().prefix_cache_hit_tokens
            outputs = engine.generate(prompts, GREEDY)
            hits = client.stats().prefix_cache_hit_tokens - before
        return [list(one.outputs[0].token_ids) for one in outputs], hits

    with Daemon(**options) as daemon:
        expected, hits = generate(daemon)
        assert hits == 0
        fill_probe(daemon)
        assert daemon.stop() == 0
    with Daemon(**options) as daemon:
        wait_for_disk(daemon)
        assert generate(daemon) == (expected, 3 * 96)


def fill_probe(daemon: Daemon) -> None:
    """Compute a prompt that shows when the disk is open."""
    with KVClient(daemon.address) as client, client.session() as session:
        sequence = session.allocate(PROBE)
        kv = np.zeros((SHAPE["num_layers"], len(PROBE), SHAPE["num_kv_heads"], SHAPE["head_size"]), np.float32)
        session.open_step([sequence]).write(kv, kv)
        session.free([sequence])


def wait_for_disk(daemon: Daemon) -> None:
    """Wait until the disk is open. A test fails after a minute."""
    pause = threading.Event()
    with KVClient(daemon.address) as client, client.session() as session:
        for _ in range(1200):
            sequence = session.allocate(PROBE)
            session.free([sequence])
            if sequence.num_cached_tokens:
                return
            pause.wait(0.05)
    pytest.fail("the disk is not open")
