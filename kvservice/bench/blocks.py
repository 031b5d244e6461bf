"""Cost of bookkeeping, in one process and without a device: each operation as the daemon calls it.

Times are medians of single calls. They are meaningful as ratios to the calibration, a plain Python loop timed in the
same run, and in comparison between pool sizes, on which they must not depend. Sequences have 1024 tokens unless noted.
Free blocks are scattered, as in a used pool, and blocks are hashed with SHA-256.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console

from kvservice.bench.harness import table
from kvservice.blocks import AllocationRequest, BlockManager, BlocksConfig

BLOCK_SIZE = 16
BATCH = 256
PROMPT_TOKENS = 1024
SCALING_BLOCKS = (1_000, 100_000, 1_000_000)
OPERATIONS = {
    "can_append_256_s": "check one token more for 256 running sequences",
    "append_step_256_s": "check and append one token for 256 running sequences",
    "commit_step_256_s": "commit that step; about 16 blocks become full and are hashed",
    "allocate_1024_s": "allocate 1024 tokens, prefix cache on, all misses",
    "allocate_1024_evicting_s": "the same where every block has to be evicted first",
    "commit_1024_s": "commit the prefill: hash its 64 blocks",
    "allocate_1024_hit_s": "allocate 1024 tokens, all hits but the last block",
    "fork_s": "fork a sequence of 1024 tokens",
    "free_s": "free a sequence of 1024 tokens; its blocks stay cached",
    "swap_out_plan_s": "plan the swap-out of a sequence of 1024 tokens",
    "swap_in_plan_s": "plan its swap-in; the device still has the blocks",
}


def calibrate() -> float:
    """Return the best of three times of a plain loop of one million list assignments, in seconds."""

    def loop() -> float:
        d = list(range(1024))
        start = time.perf_counter()
        for i in range(1_000_000):
            d[i & 1023] = i
        return time.perf_counter() - start

    return min(loop() for _ in range(3))


class _Bench:
    """A manager, and the times of its operations by name."""

    def __init__(self, num_blocks: int, repetitions: int) -> None:
        self.config = BlocksConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, num_swap_blocks=1024, watermark=0.0)
        self.manager = BlockManager(self.config)
        self.namespace = self.manager.open_namespace()
        self.repetitions = repetitions
        self.rng = np.random.default_rng(0)
        self.rng.shuffle(self.manager.device._free_stack)
        self.times: dict[str, list[float]] = {}

    def run(self) -> dict[str, float]:
        self.decode()
        self.prompts()
        self.forks()
        self.evicting()
        return {name: statistics.median(self.times[name]) for name in OPERATIONS}

    def timed(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        result = call(*arguments)
        self.times.setdefault(name, []).append(time.perf_counter() - start)
        return result

    def prompt(self, sequence_id: int, num_tokens: int = PROMPT_TOKENS) -> list[AllocationRequest]:
        """Return a new, unique prompt."""
        return [AllocationRequest(sequence_id, self.rng.integers(0, 1 << 30, num_tokens, dtype=np.int32))]

    def decode(self) -> None:
        """Append to 256 sequences whose blocks fill one after the other. After 16 tokens they start again."""
        manager, namespace = self.manager, self.namespace
        context = decode_context(self.config.num_blocks)
        ids = np.sort(self.rng.choice(1 << 40, BATCH, replace=False))
        starts = context - BLOCK_SIZE * 2 + np.arange(BATCH) % BLOCK_SIZE
        for sequence_id, length in zip(ids.tolist(), starts.tolist(), strict=True):
            manager.allocate(namespace, self.prompt(sequence_id, length))
        manager.mark_all_layers(namespace, manager.open_step(namespace, ids).step_id)
        for _ in range(max(2, self.repetitions // BLOCK_SIZE)):
            for done in range(BLOCK_SIZE):
                tokens = self.rng.integers(0, 1 << 30, BATCH, dtype=np.int32)
                self.timed("can_append_256_s", manager.can_append, namespace, ids)
                step = self.timed("append_step_256_s", manager.append, namespace, ids, tokens, None, starts + done)
                self.timed("commit_step_256_s", manager.mark_all_layers, namespace, step.step_id)
            manager.truncate(namespace, ids, starts)
        manager.free(namespace, ids)
        manager.reset_prefix_cache()

    def prompts(self) -> None:
        manager, namespace, first = self.manager, self.namespace, np.array([1])
        for _ in range(self.repetitions):
            if manager.stats().free_blocks < 2 * PROMPT_TOKENS // BLOCK_SIZE:
                manager.reset_prefix_cache()
            request = self.prompt(1)
            self.timed("allocate_1024_s", manager.allocate, namespace, request)
            step = manager.open_step(namespace, first)
            self.timed("commit_1024_s", manager.mark_all_layers, namespace, step.step_id)
            same = [AllocationRequest(2, request[0].token_ids)]
            self.timed("allocate_1024_hit_s", manager.allocate, namespace, same)
            manager.free(namespace, np.array([2]))
            self.timed("swap_out_plan_s", manager.swap_out, namespace, first)
            self.timed("swap_in_plan_s", manager.swap_in, namespace, first)
            self.timed("free_s", manager.free, namespace, first)
        manager.reset_prefix_cache()

    def forks(self) -> None:
        """Fork one sequence repeatedly, in two runs, because the first run touches the rows of the children."""
        manager, namespace, parent = self.manager, self.namespace, np.array([1])
        manager.allocate(namespace, self.prompt(1))
        for _ in range(2):
            self.times["fork_s"] = []
            for child_id in range(2, 2 + self.repetitions):
                self.timed("fork_s", manager.fork, namespace, parent, np.array([child_id]))
            manager.free(namespace, np.arange(2, 2 + self.repetitions))
        manager.free(namespace, parent)

    def evicting(self) -> None:
        """Allocate from a pool that is full of cached blocks."""
        manager, namespace = self.manager, self.namespace
        while manager.stats().free_blocks:
            free = manager.stats().free_blocks
            self.compute(self.prompt(1, min(free * BLOCK_SIZE, self.config.max_sequence_tokens)))
        for _ in range(self.repetitions):
            request = self.prompt(1)
            self.timed("allocate_1024_evicting_s", manager.allocate, namespace, request)
            manager.mark_all_layers(namespace, manager.open_step(namespace, [1]).step_id)
            manager.free(namespace, [1])

    def compute(self, request: list[AllocationRequest]) -> None:
        """Allocate, compute and free a sequence. Its blocks stay cached."""
        sequence_id = [request[0].sequence_id]
        self.manager.allocate(self.namespace, request)
        step = self.manager.open_step(self.namespace, sequence_id)
        self.manager.mark_all_layers(self.namespace, step.step_id)
        self.manager.free(self.namespace, sequence_id)


def decode_context(num_blocks: int) -> int:
    """Return the length of the 256 running sequences: 1024 tokens, or what fits into a small pool."""
    return min(PROMPT_TOKENS, num_blocks // BATCH * BLOCK_SIZE)


def run(num_blocks: int = 100_000, quick: bool = False) -> dict[str, Any]:
    """Return seconds of every operation at `num_blocks`, and under "scaling" at 1,000, 100,000 and 1,000,000 blocks.

    `decode_context_tokens` is the length of the 256 sequences of the append steps. It is below 1024 at 1,000 blocks,
    which cannot hold more. `quick` means fewer repetitions and no pool of a million blocks.
    """
    repetitions = 60 if quick else 400
    sizes = SCALING_BLOCKS[:2] if quick else SCALING_BLOCKS
    calibrations, results = [calibrate()], {}
    for size in sorted({num_blocks, *sizes}):
        results[size] = _Bench(size, repetitions).run()
        calibrations.append(calibrate())
    return {
        "calibration_s": min(calibrations),
        "num_blocks": num_blocks,
        "block_size": BLOCK_SIZE,
        **results[num_blocks],
        "scaling": {str(size): {"decode_context_tokens": decode_context(size), **results[size]} for size in sizes},
    }


def render(results: dict[str, Any], console: Console) -> None:
    """Print the figures in microseconds and as ratios to the calibration, and at each pool size."""
    calibration_s, scaling = results["calibration_s"], results["scaling"]
    title = f"bookkeeping, {results['num_blocks']:,} blocks of {results['block_size']} tokens"
    figures = ("µs", "of the calibration", *(f"µs, {int(size):,} blocks" for size in scaling))
    rows = table(title, ("operation",), figures)
    for name, meaning in OPERATIONS.items():
        microseconds = [f"{1e6 * figures[name]:.1f}" for figures in scaling.values()]
        rows.add_row(meaning, f"{1e6 * results[name]:.1f}", f"{results[name] / calibration_s:.6f}", *microseconds)
    console.print(rows)
    console.print(f"calibration: {1e3 * calibration_s:.1f} ms for a million assignments to a list")
    for size, figures in scaling.items():
        if figures["decode_context_tokens"] < PROMPT_TOKENS:
            tokens = figures["decode_context_tokens"]
            console.print(f"at {int(size):,} blocks the 256 running sequences have {tokens} tokens each: no more fit")
