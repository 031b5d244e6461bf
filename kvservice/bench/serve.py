"""Serving many requests at once: the engine over a daemon against the library's own ways, with the same model.

All contenders serve the same trace and take turns. Requests get greedy tokens and have no end token. Tokens are
compared with those of `generate` for one request at a time: equal in float32, while in bfloat16 rounding changes some.
"""

from __future__ import annotations

import copy
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from rich.console import Console
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from kvservice.bench import PeerMissingError, table
from kvservice.bench.cuda_harness import require_device
from kvservice.bench.plot import Lines, Panel, write_svg
from kvservice.bench.serve_inputs import ServeTrace, TraceRequest, build_model, make_trace, read_trace, shape_of
from kvservice.client import EngineBatch, KVClient, Step
from kvservice.engines import LLM, SamplingParams
from kvservice.engines.requests import EngineRequest
from kvservice.engines.runner import ModelRunner
from kvservice.integrations.transformers import KVServiceCache, install, pool_options
from kvservice.integrations.transformers.arguments import CACHE
from kvservice.launch import Daemon

# ---- figures: from the tokens of each request, with their times, to latencies, rates and equal tokens


POINTS = 100


@dataclass
class Served:
    """Answers of a contender: for every request its tokens, and the seconds after the start at which each was known."""

    token_ids: list[list[int]]
    token_times_s: list[list[float]]
    details: dict[str, Any] = field(default_factory=dict)
    """More figures, which only this kind of contender has."""


def figures(trace: ServeTrace, served: Served) -> dict[str, float]:
    """Return the figures of one run: first tokens are timed from a request's arrival.

    Tokens that a request did not ask for, such as those of a static batch that waits for its longest row, do not count.
    """
    first, between, last, count = [], [], 0.0, 0
    for request, times in zip(trace.requests, served.token_times_s, strict=True):
        kept = times[: request.num_tokens]
        assert len(kept) == request.num_tokens, "every request is served to its end"
        first.append(kept[0] - request.arrival_s)
        between.extend(np.diff(kept).tolist())
        last, count = max(last, kept[-1]), count + len(kept)
    return {
        "seconds": last,
        "output_tokens_per_s": count / last,
        "first_token_p50_s": statistics.median(first),
        "first_token_p99_s": float(np.quantile(first, 0.99)),
        "between_tokens_p50_s": statistics.median(between) if between else 0.0,
        "between_tokens_p99_s": float(np.quantile(between, 0.99)) if between else 0.0,
    }


def equality(trace: ServeTrace, served: Served, reference: Served) -> dict[str, float]:
    """Return the part of requests whose tokens all equal the reference's, and the part of tokens before the first
    difference of their request."""
    same_requests, same_tokens = 0, 0
    for request, tokens, expected in zip(trace.requests, served.token_ids, reference.token_ids, strict=True):
        length = request.num_tokens
        equal = np.equal(tokens[:length], expected[:length])
        same_tokens += length if equal.all() else int(equal.argmin())
        same_requests += bool(equal.all())
    return {"same_requests": same_requests / len(trace), "same_tokens": same_tokens / trace.output_tokens}


def median_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the run whose rate is the median of all, with the rates of all."""
    rates = [run["output_tokens_per_s"] for run in runs]
    return runs[rates.index(statistics.median_low(rates))] | {"rates": rates}


def progress(served: Served) -> list[tuple[float, int]]:
    """Return points (seconds, tokens generated until then), at most POINTS of them."""
    times = sorted(at for row in served.token_times_s for at in row)
    marks = np.unique(np.linspace(1, len(times), min(POINTS, len(times))).astype(int)).tolist()
    return [(0.0, 0), *((times[count - 1], count) for count in marks)]


# ---- the engine over a daemon as a way to serve requests, and counts of its batches


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


# ---- the library's own ways to serve requests: `generate` in static batches, and its continuous batching


# Tokens of one step of the library's continuous batching, and of a page of its cache.
STEP_TOKENS = {"cpu": 1024, "cuda": 8192}
PAGE_TOKENS = 32
# The library renamed it after 5.17.
PAGE_OPTION = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"


class _TokenClock(StoppingCriteria):
    """Records the time of every token. It stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:  # noqa: ARG002
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class StaticBatches:
    """`generate` over batches of the requests that wait, at most `size` of them, padded on the left.

    A batch generates until its longest output is complete. `open_cache` returns a cache for each batch; None leaves it
    to the library.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        size: int,
        open_cache: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        # The library types `self` of generate() with a protocol that its own models do not match.
        self.model: Any = model
        self.size, self.open_cache = size, open_cache

    def serve(self, trace: ServeTrace) -> Served:
        served = Served([], [])
        start = time.perf_counter()
        while len(served.token_ids) < len(trace):
            waiting = trace.requests[len(served.token_ids) :]
            time.sleep(max(0.0, start + waiting[0].arrival_s - time.perf_counter()))
            now_s = time.perf_counter() - start
            batch = [request for request in waiting[: self.size] if request.arrival_s <= now_s]
            token_ids, times = self._generate(batch)
            for request, row in zip(batch, token_ids, strict=True):
                served.token_ids.append(row[: request.num_tokens])
                served.token_times_s.append([at - start for at in times[: request.num_tokens]])
        return served

    def _generate(self, batch: Sequence[TraceRequest]) -> tuple[list[list[int]], list[float]]:
        longest = max(len(request.prompt) for request in batch)
        ids = torch.zeros((len(batch), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, longest - len(request.prompt) :] = torch.from_numpy(request.prompt)
            mask[row, longest - len(request.prompt) :] = 1
        clock = _TokenClock()
        with self.open_cache() as cache, torch.no_grad():
            output = self.model.generate(
                ids.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                max_new_tokens=max(request.num_tokens for request in batch),
                do_sample=False,
                **{CACHE: cache},
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        return output[:, longest:].tolist(), clock.times


class LibraryBatching:
    """The library's continuous batching, with a new manager and an empty cache for each run."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model

    def serve(self, trace: ServeTrace) -> Served:
        step_tokens = STEP_TOKENS[self.model.device.type]
        blocks = sum(-(-(len(one.prompt) + one.num_tokens) // PAGE_TOKENS) for one in trace.requests)
        options: dict[str, Any] = {PAGE_OPTION: PAGE_TOKENS}
        batching = ContinuousBatchingConfig(**options, num_blocks=blocks + 16, max_batch_tokens=step_tokens)
        greedy: Any = GenerationConfig  # it has no types
        manager = self.model.init_continuous_batching(
            generation_config=greedy(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=trace.longest),
            continuous_batching_config=batching,
        )
        manager.warmup()
        manager.start()
        try:
            return self._answers(manager, trace)
        finally:
            manager.stop(block=True)
            manager.destroy()

    def _answers(self, manager: Any, trace: ServeTrace) -> Served:
        served = Served([[] for _ in trace.requests], [[] for _ in trace.requests])
        added = answered = 0
        start = time.perf_counter()
        while answered < len(trace):
            now_s = time.perf_counter() - start
            while added < len(trace) and trace.requests[added].arrival_s <= now_s:
                request = trace.requests[added]
                manager.add_request(
                    request.prompt.tolist(),
                    request_id=str(added),
                    max_new_tokens=request.num_tokens,
                    record_timestamps=True,
                )
                added += 1
            until_next_s = trace.requests[added].arrival_s - now_s if added < len(trace) else 1.0
            result = manager.get_result(timeout=max(0.001, until_next_s))
            if result is None:
                if not manager.is_running():
                    raise PeerMissingError("the thread of the library's continuous batching has ended")
                continue
            if result.error is not None:
                raise PeerMissingError(result.error)
            number = int(result.request_id)
            served.token_ids[number] = list(result.generated_tokens)
            served.token_times_s[number] = [at - start for at in result.timestamps]
            answered += 1
        return served


# ---- the measurement


REFERENCE = "generate, one by one"
ENGINE = "kvservice.engines.LLM"
# Tokens of the requests that warm up: they end one after the other, and torch may compile again for small steps.
WARM_UP = (2, 4, 6, 8, 10, 12, 14, 16)
# Columns of the block usage over time, after the seconds.
USAGE = ("used blocks", "running", "waiting")


class ServingWay(Protocol):
    """A way to serve requests."""

    def serve(self, trace: ServeTrace) -> Served:
        """Serve a trace. Raises PeerMissingError if this way does not run here."""


@dataclass(frozen=True)
class ServeOptions:
    """Options of `bench serve`. `trace` is a file; without it requests are made, see `make_trace`. `model` are values
    of the model's configuration instead of those for the device."""

    device: str = "cpu"
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    trace: str | None = None
    kind: str = "chat"
    seed: int = 0
    requests: int = 64
    rate: float = 0.0
    num_blocks: int = 2048
    rounds: int = 3
    quick: bool = False
    plot: str | None = None
    model: dict[str, Any] | None = None

    def read(self, vocabulary: int) -> ServeTrace:
        """Return the trace. Raises InvalidArgumentError."""
        if self.trace is not None:
            trace = read_trace(self.trace, vocabulary)
        else:
            trace = make_trace(self.kind, self.seed, self.requests, self.rate, vocabulary)
        return trace.cut(*[8] * 8) if self.quick else trace


def run(options: ServeOptions) -> dict[str, Any]:
    """Return the trace, the model, and for each dtype the figures of every contender. Raises InvalidArgumentError for a
    file that is not a trace, FailedPreconditionError without the device."""
    if options.device == "cuda":
        require_device()
    shape = options.model or shape_of(options.device)
    trace = options.read(shape["vocab_size"])
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    results = {
        "trace": trace.name,
        "requests": len(trace),
        "prompt_tokens": trace.prompt_tokens,
        "output_tokens": trace.output_tokens,
        "device": options.device,
        "threads": torch.get_num_threads(),
        "model": shape,
        "num_blocks": options.num_blocks,
        "dtypes": {dtype: measure(dtype, trace, options) for dtype in options.dtypes},
    }
    if options.plot is not None:
        write_svg(options.plot, panels(results))
    return results


def measure(dtype: str, trace: ServeTrace, options: ServeOptions) -> dict[str, Any]:
    """Let the contenders of one dtype take turns. Returns their figures, and why others are missing."""
    runs: dict[str, list[dict[str, Any]]] = {}
    missing: dict[str, str] = {}
    with contenders(dtype, options) as (ways, forget):
        for number in range(1 if options.quick else 1 + options.rounds):
            served: dict[str, Served] = {}
            for name in [name for name in ways if name not in missing]:
                forget()
                try:
                    # The first round warms up.
                    served[name] = ways[name].serve(trace if options.quick or number else trace.cut(*WARM_UP))
                except PeerMissingError as error:
                    missing[name] = str(error)
            if options.quick or number:
                for name, one in served.items():
                    row = {**figures(trace, one), **equality(trace, one, served[REFERENCE]), **one.details}
                    runs.setdefault(name, []).append(row | {"progress": progress(one)})
    return {"contenders": {name: median_run(rows) for name, rows in runs.items()}, "missing": missing}


@contextmanager
def contenders(dtype: str, options: ServeOptions) -> Iterator[tuple[dict[str, ServingWay], Callable[[], object]]]:
    """Yield the contenders by name, and a function that empties the daemon's prefix cache."""
    model = build_model(dtype, options.device, options.model)
    pool = pool_options(model.config, getattr(torch, dtype))
    with ExitStack() as stack:
        daemon = stack.enter_context(
            Daemon(**pool, num_blocks=options.num_blocks, device=options.device, share_pool="write")
        )
        client = stack.enter_context(KVClient(daemon.address))
        session = stack.enter_context(client.session("library with KVServiceCache"))
        engine = stack.enter_context(closing(EngineWay(copy.deepcopy(model), daemon.address)))
        ways: dict[str, ServingWay] = {
            REFERENCE: StaticBatches(model, 1),
            "generate, batches of 8": StaticBatches(model, 8),
            "generate, batches of 16": StaticBatches(model, 16),
            "the library's continuous batching": LibraryBatching(model),
            "generate with KVServiceCache, batches of 8": StaticBatches(
                install(copy.deepcopy(model)), 8, lambda: KVServiceCache(session)
            ),
            ENGINE: engine,
        }
        if not options.quick:
            compiled = EngineWay(copy.deepcopy(model), daemon.address, compiled=True)
            ways[f"{ENGINE}, compiled"] = stack.enter_context(closing(compiled))
        yield ways, session.reset_prefix_cache


def panels(results: dict[str, Any]) -> list[Panel]:
    """Return the charts: for each dtype the tokens of all contenders, then the block usage and queues of contenders
    that record them."""
    made = []
    for dtype, measured in results["dtypes"].items():
        rows = measured["contenders"]
        tokens: Lines = {name: row["progress"] for name, row in rows.items()}
        made.append(Panel(f"{results['trace']}, {dtype}: tokens generated", "output tokens", tokens))
        for name, row in rows.items():
            if "usage" in row:
                lines: Lines = {line: [(at[0], at[1 + n]) for at in row["usage"]] for n, line in enumerate(USAGE)}
                made.append(Panel(f"{name}, {dtype}: blocks and queues", "blocks, or requests", lines))
    return made


def render(results: dict[str, Any], console: Console) -> None:
    """Print the figures of every contender in tables, one for each dtype."""
    console.print(
        f"{results['requests']} requests ({results['trace']}), {results['prompt_tokens']:,} prompt and "
        f"{results['output_tokens']:,} output tokens, {results['device']}, {results['threads']} threads"
    )
    columns = ("tokens/s", "first token p50, p99 in ms", "between tokens", "equal requests", "tokens")
    for dtype, measured in results["dtypes"].items():
        served = table(dtype, ("way",), columns)
        for name, row in measured["contenders"].items():
            served.add_row(
                name,
                f"{row['output_tokens_per_s']:.0f}",
                f"{1e3 * row['first_token_p50_s']:.0f}, {1e3 * row['first_token_p99_s']:.0f}",
                f"{1e3 * row['between_tokens_p50_s']:.1f}, {1e3 * row['between_tokens_p99_s']:.1f}",
                f"{row['same_requests']:.0%}",
                f"{row['same_tokens']:.1%}",
            )
        console.print(served)
        _render_schedules(measured["contenders"], console)
        for name, reason in measured["missing"].items():
            console.print(f"{name}: not measured. {reason}")


def _render_schedules(rows: dict[str, Any], console: Console) -> None:
    """Print the schedules of the ways that record them."""
    headings = (
        "steps",
        "tokens a step",
        "prefix hits",
        "preemptions, swapped",
        "recomputed tokens",
        "stalls",
        "blocks",
        "model",
    )
    scheduled = table("schedule", ("way",), headings)
    for name, row in rows.items():
        if "usage" in row:
            scheduled.add_row(
                name,
                f"{row['steps']:,}",
                f"{row['tokens_per_step']:.1f}",
                f"{row['prefix_hit_share']:.1%}",
                f"{row['preemptions']}, {row['swapped']}",
                f"{row['recomputed_tokens']:,}",
                f"{row['stalled_steps']:,}",
                f"{max(used for _, used, *_ in row['usage']):,}",
                f"{row['model_share']:.0%}",
            )
    if scheduled.row_count:
        console.print(scheduled)
