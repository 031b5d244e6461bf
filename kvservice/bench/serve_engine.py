"""The engine over a daemon as a way to serve requests, and counts of its batches."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from kvservice.bench.serve_figures import Served
from kvservice.bench.serve_trace import ServeTrace
from kvservice.client import EngineBatch, Step
from kvservice.engines import LLM, SamplingParams
from kvservice.engines.requests import EngineRequest
from kvservice.engines.runner import ModelRunner

# Seconds between two readings of the block usage.
USAGE_INTERVAL_S = 0.05


@dataclass
class ScheduleRecord:
    """Counts over the batches of one run.

    `positions` are the tokens of each sequence that are computed or cached. `usage` has (seconds, used blocks, running,
    waiting) rows.
    """

    positions: dict[int, int] = field(default_factory=dict)
    steps: int = 0
    computed: int = 0
    cached: int = 0
    recomputed: int = 0
    recomputations: int = 0
    swaps: int = 0
    stalled: int = 0
    usage: list[tuple[float, int, int, int]] = field(default_factory=list)

    def add(self, batch: EngineBatch[Step]) -> None:
        """Count a batch, which may have no step."""
        self.recomputations += sum(not one.swapped for one in batch.preempted)
        self.swaps += sum(one.swapped for one in batch.preempted)
        self.stalled += batch.num_stalled
        if batch.step is None:
            return
        self.steps += 1
        self.computed += batch.step.num_tokens
        ends = batch.step.context_lens
        rows = zip(batch.sequence_ids.tolist(), (ends - batch.step.query_lens).tolist(), ends.tolist(), strict=True)
        for sequence, start, end in rows:
            known = self.positions.get(sequence)
            if known is None:
                self.cached += start
            else:
                self.recomputed += max(0, min(known, end) - start)
            self.positions[sequence] = max(known or 0, end)

    def details(self, trace: ServeTrace) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "tokens_per_step": self.computed / max(1, self.steps),
            "prefix_hit_share": self.cached / trace.prompt_tokens,
            "preemptions": self.recomputations + self.swaps,
            "swapped": self.swaps,
            "recomputed_tokens": self.recomputed,
            "stalled_steps": self.stalled,
            "usage": self.usage,
        }


class _TimedRunner:
    """Counts the seconds in which the model runs. On a GPU these are the seconds in which it is launched."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.seconds = runner, 0.0

    def run(self, step: Step, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        logits = self.runner.run(step, token_ids, rows)
        self.seconds += time.perf_counter() - start
        return logits


class EngineWay:
    """An LLM whose loop runs here, so that each token has a time."""

    def __init__(self, model: PreTrainedModel, address: str, **options: Any) -> None:
        self.llm = LLM(model, address=address, **options)
        self.runner = _TimedRunner(self.llm.core.host.runner)
        host: Any = self.llm.core.host
        host.runner = self.runner

    def serve(self, trace: ServeTrace) -> Served:
        loop = self.llm.core.loop
        requests = self._requests(trace)
        served = Served([[] for _ in requests], [[] for _ in requests])
        numbers = {request.request_id: number for number, request in enumerate(requests)}
        record, added = ScheduleRecord(), 0
        self.runner.seconds = 0.0
        start = time.perf_counter()
        while added < len(requests) or loop.live:
            now_s = time.perf_counter() - start
            arrived = sum(one.arrival_s <= now_s for one in trace.requests[added:])
            if arrived:
                loop.add(requests[added : added + arrived])
                added += arrived
            elif not loop.live:
                time.sleep(trace.requests[added].arrival_s - now_s)
                continue
            changed = loop.step()
            self._record(record, start)
            now_s = time.perf_counter() - start
            for request in changed:
                times = served.token_times_s[numbers[request.request_id]]
                times += [now_s] * (request.samples[0].num_generated - len(times))
        served.token_ids = [request.samples[0].generated_ids for request in requests]
        model_share = self.runner.seconds / (time.perf_counter() - start)
        served.details = record.details(trace) | {"model_share": model_share}
        return served

    def close(self) -> None:
        self.llm.close()

    def _requests(self, trace: ServeTrace) -> list[EngineRequest]:
        params = [
            SamplingParams(temperature=0.0, max_tokens=request.num_tokens, ignore_eos=True)
            for request in trace.requests
        ]
        return self.llm.core.new_requests([request.prompt.tolist() for request in trace.requests], params)

    def _record(self, record: ScheduleRecord, start: float) -> None:
        """Count the batch of the last step, and ask for the blocks in use now and then."""
        batch = self.llm.core.loop.batch
        if batch is None:
            return
        record.add(batch)
        now_s = time.perf_counter() - start
        if not record.usage or now_s - record.usage[-1][0] >= USAGE_INTERVAL_S:
            stats = self.llm.core.host.client.stats()
            record.usage.append((now_s, stats.active_blocks, batch.running, batch.waiting))
