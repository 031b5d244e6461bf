"""Serving many requests at once: the engine over a daemon against the library's own ways, with the same model.

All contenders serve the same trace and take turns. Requests get greedy tokens and have no end token. Tokens are
compared with those of `generate` for one request at a time: equal in float32, while in bfloat16 rounding changes some.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from rich.console import Console

from kvservice.bench.cuda_timing import require_device
from kvservice.bench.harness import table
from kvservice.bench.peer_process import PeerMissingError
from kvservice.bench.serve_engine import EngineWay, ScheduleRecord
from kvservice.bench.serve_figures import Served, equality, figures, median_run, progress
from kvservice.bench.serve_model import build_model, shape_of
from kvservice.bench.serve_peers import LibraryBatching, StaticBatches
from kvservice.bench.serve_plot import Lines, Panel, write_svg
from kvservice.bench.serve_trace import ServeTrace, make_trace, read_trace
from kvservice.client import KVClient
from kvservice.integrations.transformers import KVServiceCache, install, pool_options
from kvservice.launch import Daemon

__all__ = [
    "ENGINE",
    "LibraryBatching",
    "Panel",
    "PeerMissingError",
    "ScheduleRecord",
    "ServeOptions",
    "ServeTrace",
    "Served",
    "equality",
    "figures",
    "make_trace",
    "measure",
    "median_run",
    "progress",
    "read_trace",
    "render",
    "run",
    "write_svg",
]

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
