"""The bench of loaded prompts: its options are valid, and its table has all ways."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from kvservice.bench import spill
from kvservice.config import ServeConfig


def test_a_pool_holds_some_prompts_and_the_memory_some_more(tmp_path: Path) -> None:
    for disk in (True, False):
        config = ServeConfig(**spill.options_of("cpu", str(tmp_path) if disk else ""))
        prompt_bytes = spill.NUM_TOKENS * config.layout.token_bytes
        assert config.pool_blocks == spill.POOL_PROMPTS * spill.NUM_TOKENS // spill.BLOCK_SIZE
        assert (config.store_gib * 2**30 < 10 * prompt_bytes) == disk
        assert bool(config.disk) == disk


def test_every_way_is_compared_with_computing() -> None:
    results = {"num_bytes": 4 << 20, "compute": 2.0, "disk": 0.1, "memory": 0.01, "memcpy": 0.001}
    console = Console(file=io.StringIO(), width=120)
    spill.render(results, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for label, factor in (("disk", "20.0"), ("store", "200.0"), ("memcpy", "2000.0")):
        (line,) = [line for line in text.splitlines() if label in line]
        assert factor in line
