"""Cost of bookkeeping and of scheduling, in one process and without a device, and the judgement of scheduling policies
on traces.

Times are medians of single calls. They are meaningful as ratios to the calibration, a plain Python loop timed in the
same run.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from kvservice.bench import table
from kvservice.blocks import AllocationRequest, BlockManager, BlocksConfig
from kvservice.errors import InvalidArgumentError
from kvservice.scheduler import EngineScheduler, Report, Request, ScheduledBatch, Scheduler, SchedulerConfig

# ---- bookkeeping: each operation as the daemon calls it
#
# Times must not depend on the size of the pool. Sequences have 1024 tokens unless noted. Free blocks are scattered, as
# in a used pool, and blocks are hashed with SHA-256.


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


def run_blocks(num_blocks: int = 100_000, quick: bool = False) -> dict[str, Any]:
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


def render_blocks(results: dict[str, Any], console: Console) -> None:
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


# ---- replays traces of requests against the scheduler, without a model: the judgement of its policies
#
# A trace gives each request an arrival step, a prompt length and an output length. The scheduler sees neither the
# output lengths nor the arrivals to come: every request asks for MAX_TOKENS, and ends when its output is complete.


MAX_TOKENS = 1024
MAX_PROMPT = 2048


@dataclass(frozen=True)
class PressureTrace:
    """Requests in the order of their arrival: the steps of their arrivals, and the lengths of prompts and outputs."""

    arrival_step: list[int]
    prompt_len: list[int]
    output_len: list[int]

    def __len__(self) -> int:
        return len(self.arrival_step)

    @property
    def needed_tokens(self) -> int:
        """Tokens that are computed if nothing is computed twice. The last token of an output is not computed."""
        return sum(self.prompt_len) + sum(self.output_len) - len(self)


@dataclass(frozen=True)
class PressureResult:
    """Counts of a run: all steps, preemptions, tokens computed again, steps of sequences that waited for a block, and
    the steps from arrival to first step and to the end."""

    steps: int
    preemptions: int
    recomputed_tokens: int
    stalled_steps: int
    wait_mean: float
    wait_max: int
    latency_mean: float


def make_trace(
    seed: int, requests: int = 200, arrivals_per_step: float = 1.0, prompt_mean: float = 300, output_mean: float = 200
) -> PressureTrace:
    """Return a trace with Poisson arrivals and lognormal lengths (sigma 0.6)."""
    rng = np.random.default_rng(seed)
    arrivals = np.floor(np.cumsum(rng.exponential(1 / arrivals_per_step, requests))).astype(int) + 1

    def lengths(mean: float, highest: int) -> list[int]:
        drawn = rng.lognormal(np.log(mean) - 0.6**2 / 2, 0.6, requests)
        return [int(length) for length in np.clip(drawn, 8, highest)]

    return PressureTrace(arrivals.tolist(), lengths(prompt_mean, MAX_PROMPT), lengths(output_mean, MAX_TOKENS))


class _Replay:
    """One engine that answers every batch with random tokens."""

    def __init__(self, trace: PressureTrace, manager: BlockManager, config: SchedulerConfig) -> None:
        self.trace, self.manager = trace, manager
        self.namespace = manager.open_namespace()
        self.engine = Scheduler(manager).open_engine(self.namespace, config)
        self.rng = np.random.default_rng(0)
        self.arrived = self.step = self.preemptions = self.stalled = self.computed = 0
        self.first_steps: dict[int, int] = {}
        self.last_steps: dict[int, int] = {}
        self.outputs = np.zeros(len(trace), np.int64)

    def arrive(self) -> None:
        """Add the requests that have arrived by this step."""
        trace = self.trace
        while self.arrived < len(trace) and trace.arrival_step[self.arrived] <= self.step:
            prompt = self.rng.integers(0, 1 << 30, trace.prompt_len[self.arrived], dtype=np.int32)
            self.engine.add(Request(self.arrived, prompt, MAX_TOKENS))
            self.arrived += 1

    def compute(self, batch: ScheduledBatch) -> None:
        """Write all layers of a batch, and report its tokens."""
        self.preemptions += len(batch.preempted)
        self.stalled += batch.num_stalled
        if batch.step is None:
            return
        self.computed += batch.num_tokens
        for request_id in batch.step.sequence_ids.tolist():
            self.first_steps.setdefault(request_id, self.step)
        self.manager.mark_all_layers(self.namespace, batch.step.step_id)
        sampled = batch.sampled
        self.outputs[sampled] += 1
        ended = sampled[self.outputs[sampled] >= np.array(self.trace.output_len)[sampled]]
        self.last_steps.update(dict.fromkeys(ended.tolist(), self.step))
        tokens = self.rng.integers(0, 1 << 30, len(sampled), dtype=np.int32)
        self.engine.update(Report(batch.number, tokens, finished=ended))

    def result(self) -> PressureResult:
        arrivals = self.trace.arrival_step
        waits = [self.first_steps[i] - arrival for i, arrival in enumerate(arrivals)]
        return PressureResult(
            steps=self.step,
            preemptions=self.preemptions,
            recomputed_tokens=self.computed - self.trace.needed_tokens,
            stalled_steps=self.stalled,
            wait_mean=statistics.mean(waits),
            wait_max=max(waits),
            latency_mean=statistics.mean(self.last_steps[i] - arrival for i, arrival in enumerate(arrivals)),
        )


def replay(
    trace: PressureTrace,
    config: SchedulerConfig | None = None,
    num_blocks: int = 2000,
    num_swap_blocks: int = 0,
    after_step: Callable[[EngineScheduler, ScheduledBatch], None] | None = None,
) -> PressureResult:
    """Run a trace to its end in a pool of blocks of 16 tokens, without a watermark."""
    blocks = BlocksConfig(
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        watermark=0.0,
        max_sequence_tokens=MAX_PROMPT + 2 * MAX_TOKENS,
    )
    run = _Replay(trace, BlockManager(blocks), config or SchedulerConfig())
    while run.arrived < len(trace) or len(run.engine):
        run.step += 1
        run.arrive()
        batch = run.engine.schedule(float(run.step))
        run.compute(batch)
        if after_step is not None:
            after_step(run.engine, batch)
    return run.result()


# ---- scheduling: the 256 running sequences have 1024 tokens, and each waiting prompt 64


WAITING = (0, 1000)
ADMITTED = 8
COSTS = {
    "schedule_256_s": "schedule 256 decodes, none waiting; the step is opened",
    "update_256_s": "report their tokens",
    "schedule_256_waiting_1000_s": "schedule 256 decodes, 1000 waiting",
    "update_256_waiting_1000_s": "report their tokens",
    "admit_8_s": "admit 8 prompts of 1024 tokens, nothing cached",
    "admit_8_cached_s": "the same, all but the last block cached",
    "add_1024_s": "add a request of 1024 tokens: 64 SHA-256 hashes",
}
# Arrivals per step, and seeds, of the traces that are made.
TRACES = ((1.0, 1), (1.0, 2), (0.5, 3), (2.0, 4))


class _ScheduleBench:
    """An engine in a large pool, and the times of its operations by name."""

    def __init__(self) -> None:
        self.manager = BlockManager(BlocksConfig(num_blocks=100_000, watermark=0.0, max_sequences=2048))
        self.namespace = self.manager.open_namespace()
        self.rng = np.random.default_rng(0)
        self.rng.shuffle(self.manager.device._free_stack)
        config = SchedulerConfig(max_step_tokens=1 << 20, max_running=BATCH, share_prefixes=True)
        self.engine: EngineScheduler = Scheduler(self.manager).open_engine(self.namespace, config)
        self.times: dict[str, list[float]] = {}
        self.next_id = 0

    def timed(self, name: str, start: float) -> None:
        self.times.setdefault(name, []).append(time.perf_counter() - start)

    def tokens(self, count: int) -> Any:
        return self.rng.integers(0, 1 << 30, count, dtype=np.int32)

    def add(self, prompt: Any, max_tokens: int) -> None:
        start = time.perf_counter()
        self.engine.add(Request(self.next_id, prompt, max_tokens))
        if len(prompt) == PROMPT_TOKENS:
            self.timed("add_1024_s", start)
        self.next_id += 1

    def step(self, scheduled: str, updated: str, ends: bool = False) -> None:
        start = time.perf_counter()
        batch = self.engine.schedule()
        self.timed(scheduled, start)
        assert batch.step is not None, "there are requests, and blocks for them"
        self.manager.mark_all_layers(self.namespace, batch.step.step_id)
        tokens = self.tokens(len(batch.sampled))
        start = time.perf_counter()
        self.engine.update(Report(batch.number, tokens, finished=batch.sampled if ends else ()))
        self.timed(updated, start)

    def decode(self, waiting: int, repetitions: int) -> None:
        """Run 256 sequences whose blocks fill one after the other, with requests that wait for a place."""
        for i in range(BATCH):
            self.add(self.tokens(PROMPT_TOKENS + i % 16), max_tokens=1 << 16)
        self.step("first", "first")
        for _ in range(waiting):
            self.add(self.tokens(64), max_tokens=100)
        suffix = f"_waiting_{waiting}" if waiting else ""
        for _ in range(repetitions):
            self.step(f"schedule_256{suffix}_s", f"update_256{suffix}_s")

    def admit(self, repetitions: int) -> None:
        """Admit new prompts, and the same again when their blocks are cached."""
        for _ in range(repetitions):
            prompts = [self.tokens(PROMPT_TOKENS) for _ in range(ADMITTED)]
            for name in ("admit_8_s", "admit_8_cached_s"):
                for prompt in prompts:
                    self.add(prompt, max_tokens=16)
                self.step(name, "ended", ends=True)


def run_schedule(trace_file: str | None = None, quick: bool = False) -> dict[str, Any]:
    """Return seconds of every operation of COSTS, and under "traces" the results of each trace by its name. Raises
    InvalidArgumentError for a file that is not a trace."""
    traces = {f"{rate} arrivals a step, seed {seed}": make_trace(seed, arrivals_per_step=rate) for rate, seed in TRACES}
    if trace_file is not None:
        traces = {Path(trace_file).name: read_trace(trace_file), **traces}
    repetitions = 100 if quick else 600
    calibrations, times = [calibrate()], dict[str, list[float]]()
    for waiting in WAITING:
        bench = _ScheduleBench()
        bench.decode(waiting, repetitions)
        times |= bench.times
        calibrations.append(calibrate())
    admissions = _ScheduleBench()
    admissions.admit(repetitions // 5)
    times |= admissions.times
    calibrations.append(calibrate())
    return {
        "calibration_s": min(calibrations),
        **{name: statistics.median(times[name]) for name in COSTS},
        "traces": {
            name: {"needed_tokens": trace.needed_tokens, **dataclasses.asdict(replay(trace))}
            for name, trace in traces.items()
        },
    }


def read_trace(path: str) -> PressureTrace:
    """Read a trace: a JSON object with the lists arrival_step, prompt_len and output_len. Raises
    InvalidArgumentError."""
    try:
        read = json.loads(Path(path).read_text())
        lists = [read[name] for name in ("arrival_step", "prompt_len", "output_len")]
        rows = list(zip(*lists, strict=True))
        well_made = rows and all(type(value) is int and value > 0 for row in rows for value in row)
    except KeyError as error:
        raise InvalidArgumentError(f"is not a trace: the list {error} is missing", field="trace") from error
    except (ValueError, TypeError) as error:
        raise InvalidArgumentError(f"is not a trace: {error}", field="trace") from error
    if not well_made:
        raise InvalidArgumentError("must have lists of equal length of numbers above 0", field="trace")
    arrivals, prompts, outputs = (list(column) for column in zip(*sorted(rows, key=lambda row: row[0]), strict=True))
    return PressureTrace(arrivals, prompts, outputs)


def render_schedule(results: dict[str, Any], console: Console) -> None:
    """Print the costs in microseconds and as ratios to the calibration, and what happened to each trace."""
    calibration_s = results["calibration_s"]
    costs = table("scheduling", ("operation",), ("µs", "of the calibration"))
    for name, meaning in COSTS.items():
        costs.add_row(meaning, f"{1e6 * results[name]:.1f}", f"{results[name] / calibration_s:.5f}")
    console.print(costs)
    console.print(f"calibration: {1e3 * calibration_s:.1f} ms for a million assignments to a list")
    figures = ("preemptions", "recomputed tokens", "needed", "steps", "first wait", "longest", "latency")
    judged = table("traces in a pool of 2000 blocks, in steps and tokens", ("trace",), figures)
    for name, one in results["traces"].items():
        judged.add_row(
            name,
            f"{one['preemptions']}",
            f"{one['recomputed_tokens']:,}",
            f"{one['needed_tokens']:,}",
            f"{one['steps']:,}",
            f"{one['wait_mean']:.1f}",
            f"{one['wait_max']}",
            f"{one['latency_mean']:.1f}",
        )
    console.print(judged)
