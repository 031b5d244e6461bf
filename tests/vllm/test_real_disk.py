"""vLLM with its K/V blocks in a daemon's store whose memory is small, and on the disk below it."""

from __future__ import annotations

import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from scraping import Samples, scrape, scrape_until, value
from small_pool import SMALL_POOL
from tiny_llama import VOCABULARY
from vllm_processes import Engine, connector

from kvservice.launch import Daemon

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

BLOCK_SIZE = 32
# Blocks of a prompt, of 64 KiB, and of the store's memory of 16 MiB.
NUM_BLOCKS, NUM_IN_MEMORY = 31, 256
# Tokens that are generated after it.
NUM_TOKENS = 8


def prompt(seed: int) -> list[int]:
    """The last token is computed in any case, to get the logits."""
    return random.Random(seed).choices(range(3, VOCABULARY), k=NUM_BLOCKS * BLOCK_SIZE + 1)


def on_disk(samples: Samples, name: str) -> float:
    return value(samples, f"kvservice_tier_{name}", tier="disk")


def assert_is_found(engine: Engine, port: int, expected: list[list[int]], num_read: int) -> None:
    """At least `num_read` blocks come from the disk. The engine finds a new daemon in the background, and that opens
    its disk in the background. It publishes its figures after calls."""
    for _ in range(200):
        found = engine.generate([prompt(0)], max_tokens=NUM_TOKENS)
        assert found["tokens"] == expected
        engine.reset()
        figures = scrape(port)
        counted = [on_disk(figures, name) for name in ("lookup_hits_total", "values_read_total")]
        if found["cached"] == [NUM_BLOCKS * BLOCK_SIZE] and min(counted) >= num_read:
            return
        time.sleep(0.1)
    pytest.fail(f"{found['cached']} tokens are found, {counted} blocks on the disk")


def test_a_prefix_is_found_on_the_disk_by_another_engine_and_after_the_daemon_was_killed(
    model: Path, tmp_path: Path
) -> None:
    port = free_port()
    options: dict[str, Any] = SMALL_POOL | {
        "unix_socket": tmp_path / "kvservice.sock",
        "http_address": f"127.0.0.1:{port}",
        "disk": tmp_path / "disk",
        "disk_gib": 0.25,
    }
    with ExitStack() as daemons:
        daemon = daemons.enter_context(Daemon(**options))
        # The engines are taken for slow ones, so that no disk is too slow for them. The reader saves nothing.
        transfer = connector(daemon.address, prefill_tokens_per_s=100)
        writer = Engine(model, tmp_path / "writer", kv_transfer_config=transfer)
        reader = Engine(model, tmp_path / "reader", kv_transfer_config=transfer | {"kv_role": "kv_consumer"})
        with writer, reader:
            first = writer.generate([prompt(0)], max_tokens=NUM_TOKENS)
            assert first["cached"] == [0]
            for other in range(1, 17):
                writer.generate([prompt(other)], max_tokens=1)
                # The disk keeps up: no value is evicted that is not there.
                least = (other + 1) * NUM_BLOCKS + 24 - NUM_IN_MEMORY
                scrape_until(port, lambda samples, least=least: on_disk(samples, "values") >= least)  # type: ignore[misc]
            assert on_disk(scrape(port), "values_read_total") == 0
            assert_is_found(reader, port, first["tokens"], 1)

            # A daemon that is asked to end writes all of its memory to the disk. One that is killed writes nothing.
            for number in (signal.SIGTERM, signal.SIGKILL):
                daemon.process.send_signal(number)
                daemon.process.wait()
                daemons.close()
                daemon = daemons.enter_context(Daemon(**options))
                assert_is_found(reader, port, first["tokens"], NUM_BLOCKS)
