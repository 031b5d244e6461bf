"""Replays traces of requests against the scheduler, without a model: the judgement of its policies.

A trace gives each request an arrival step, a prompt length and an output length. The scheduler sees neither the output
lengths nor the arrivals to come: every request asks for MAX_TOKENS, and ends when its output is complete.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvservice.blocks import BlockManager, BlocksConfig
from kvservice.scheduler import EngineScheduler, Report, Request, ScheduledBatch, Scheduler, SchedulerConfig

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
