"""Cost of scheduling, in one process and without a device, and the judgement of its policies on traces.

Costs are medians of single calls, and meaningful as ratios to the calibration of `bench blocks`, timed in the same run.
The 256 running sequences have 1024 tokens, and each waiting prompt 64.
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

from kvservice.bench.blocks import BATCH, PROMPT_TOKENS, calibrate
from kvservice.bench.harness import table
from kvservice.blocks import BlockManager, BlocksConfig
from kvservice.errors import InvalidArgumentError
from kvservice.scheduler import EngineScheduler, Report, Request, ScheduledBatch, Scheduler, SchedulerConfig

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


# ---- the measurement


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


def run(trace_file: str | None = None, quick: bool = False) -> dict[str, Any]:
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


def render(results: dict[str, Any], console: Console) -> None:
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
