"""The demo: it starts a daemon, runs the parts, compares the tokens, and checks the requirements."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from transformers import LlamaForCausalLM

from kvservice.auth.client import NO_CREDENTIALS, ClientCredentials
from kvservice.client import KVClient, PoolStats
from kvservice.demo.engine import Engine, Generation
from kvservice.demo.model import Picker, build_model, generate_alone, largest_error, torch_settings
from kvservice.demo.script import BLOCK_SIZE, parts
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.transformers import install, pool_options, uninstall
from kvservice.launch import Daemon

NUM_BLOCKS = 72
SWAP_SPACE_GIB = 1 / 256
# Limit on the error of the logits relative to transformers' own error, both against float64, where tokens may differ.
ERROR_RATIO_MAX = 2.0


@dataclass(frozen=True)
class DemoResult:
    """Result of the demo. Counters are the daemon's, over the run; `swapped_blocks` counts both directions.

    In float32 the tokens must be equal. In bfloat16 logits are so close that rounding can change tokens, so their
    largest error is compared with transformers' own; in float32 both errors are None. `problems` lists the unmet
    requirements.
    """

    tokens_match: bool
    sequences: int
    tokens: int
    prefix_cache_hit_tokens: int
    cow_copies: int
    swapped_blocks: int
    num_blocks: int
    num_free_blocks_after: int
    elapsed_s: float
    device: str
    dtype: str
    logits_error: float | None
    library_logits_error: float | None
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the fields without `problems`."""
        return {name: value for name, value in asdict(self).items() if name != "problems"}


def run(
    *,
    address: str | None,
    device: str,
    console: Console,
    quiet: bool,
    dtype: str = "float32",
    credentials: ClientCredentials = NO_CREDENTIALS,
) -> DemoResult:
    """Run the demo against the daemon at `address`, or a private one on `device`, and show it unless `quiet`.

    The model computes on the CPU in `dtype`, float32 or bfloat16; K/V and attention are in the daemon. Raises
    InvalidArgumentError if the daemon's pool does not have the shape of the demo's model, and StartError if no daemon
    can be started.
    """
    started_s = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(torch_settings())
        model = build_model(dtype)
        if address is None:
            address = stack.enter_context(_private_daemon(model, device)).address
        client = stack.enter_context(KVClient(address, tls=credentials.tls, token=credentials.token))
        _check_pool(client, model)
        before = client.stats()
        generations, after = _generate(client, model, console, quiet)
        alone = [_alone(model, generation) for generation in generations]
        errors = _errors(model, generations) if dtype != "float32" else None
    where = (client.info.device, dtype)
    result = _result(generations, alone, errors, before, after, where, time.monotonic() - started_s)
    if not quiet:
        _print_result(console, result, generations, alone)
    return result


def _private_daemon(model: LlamaForCausalLM, device: str) -> Daemon:
    options = pool_options(model.config) | {"device": device, "block_size": BLOCK_SIZE}
    return Daemon(num_blocks=NUM_BLOCKS, swap_space_gib=SWAP_SPACE_GIB, **options)


def _check_pool(client: KVClient, model: LlamaForCausalLM) -> None:
    options = pool_options(model.config)
    needed = options | {"block_size": BLOCK_SIZE, "enable_prefix_caching": True, "kv_cache_dtype": options["dtype"]}
    for name, value in needed.items():
        if getattr(client.info, name) != value:
            raise InvalidArgumentError(f"the demo needs a daemon with {name} = {value}", field="address")


def _generate(
    client: KVClient, model: LlamaForCausalLM, console: Console, quiet: bool
) -> tuple[list[Generation], PoolStats]:
    """Run the parts in a new session. Returns the sequences, and the statistics of the pool afterwards."""
    install(model)
    try:
        with client.session("demo") as kv, ExitStack() as stack:
            engine = Engine(model, kv, show=lambda _: None)
            if not quiet:
                display = stack.enter_context(view(console))
                engine.show = lambda what: display.update(engine.step, what, engine.generations, client.stats())
            kv.reset_prefix_cache()
            generations = engine.play(parts())
            kv.reset_prefix_cache()
            engine.show("all freed, prefix cache reset")
            return generations, client.stats()
    finally:
        uninstall(model)


def _alone(model: LlamaForCausalLM, generation: Generation) -> list[int]:
    part = generation.part
    return generate_alone(model, part.prompt, Picker(generation.seed), part.num_tokens)


def _errors(model: LlamaForCausalLM, generations: Sequence[Generation]) -> tuple[float, float]:
    return largest_error(model, ((one.part.prompt, one.token_ids, torch.stack(one.logits)) for one in generations))


def _result(
    generations: Sequence[Generation],
    alone: Sequence[list[int]],
    errors: tuple[float, float] | None,
    before: PoolStats,
    after: PoolStats,
    where: tuple[str, str],
    elapsed_s: float,
) -> DemoResult:
    swapped_out = after.swapped_out_blocks - before.swapped_out_blocks
    swapped_in = after.swapped_in_blocks - before.swapped_in_blocks
    hit_tokens = after.prefix_cache_hit_tokens - before.prefix_cache_hit_tokens
    cow_copies = after.cow_copies - before.cow_copies
    mismatched = [ours.name for ours, theirs in zip(generations, alone, strict=True) if ours.token_ids != theirs]
    rewound = [generation for generation in generations if generation.given_back]
    held_before = before.active_blocks + before.shared_blocks + before.pinned_blocks
    if errors is None:
        requirements = {
            f"tokens differ from the library's own: {', '.join(mismatched)}": not mismatched,
            "tokens generated again differ": bool(rewound) and all(generation.again_alike for generation in rewound),
        }
    else:
        ours, library = errors
        requirements = {
            f"logits err by {ours:.3g}, the library's own by {library:.3g}": ours <= ERROR_RATIO_MAX * library,
            "nothing was generated again": bool(rewound),
        }
    requirements |= {
        "the prefix cache was not hit": hit_tokens > 0,
        "nothing was copied on write": cow_copies > 0,
        "nothing was swapped out and in": swapped_out > 0 and swapped_in > 0,
        f"{after.free_blocks} blocks are free of {after.num_blocks}": after.free_blocks + held_before
        == after.num_blocks,
    }
    return DemoResult(
        tokens_match=not mismatched,
        sequences=len(generations),
        tokens=sum(len(generation.token_ids) for generation in generations),
        prefix_cache_hit_tokens=hit_tokens,
        cow_copies=cow_copies,
        swapped_blocks=swapped_out + swapped_in,
        num_blocks=after.num_blocks,
        num_free_blocks_after=after.free_blocks,
        elapsed_s=round(elapsed_s, 3),
        device=where[0],
        dtype=where[1],
        logits_error=errors[0] if errors else None,
        library_logits_error=errors[1] if errors else None,
        problems=tuple(problem for problem, fulfilled in requirements.items() if not fulfilled),
    )


def _print_result(
    console: Console, result: DemoResult, generations: Sequence[Generation], alone: Sequence[list[int]]
) -> None:
    console.print(results_table(generations, alone))
    console.print(
        f"{result.tokens} tokens of {result.sequences} sequences in {result.elapsed_s:.1f} s on {result.device}: "
        f"{result.prefix_cache_hit_tokens} prompt tokens from the prefix cache, {result.cow_copies} blocks copied on "
        f"write, {result.swapped_blocks} blocks swapped, {result.num_free_blocks_after} of {result.num_blocks} blocks "
        "free afterwards."
    )


# ---- output of the demo: on a terminal a live map of the pool and the sequences, otherwise lines


# States of blocks with their characters and colours.
_BLOCKS = (("active", "█", "green"), ("shared", "▓", "cyan"), ("cached", "▒", "yellow"), ("free", "·", "bright_black"))
_STATES = {"running": "green", "swapped out": "magenta", "complete": "bright_black"}
# Slows the demo down, so that a person can follow it.
_LIVE_PAUSE_S = 0.04
_LINE_EVERY_STEPS = 8


class View(Protocol):
    def update(self, step: int, what: str, generations: Sequence[Generation], stats: PoolStats) -> None: ...


@contextmanager
def view(console: Console) -> Iterator[View]:
    """Yield a live view if the console is a terminal, else a view that prints lines."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield _LiveMap(live)


class _LiveMap:
    def __init__(self, live: Live) -> None:
        self._live = live

    def update(self, step: int, what: str, generations: Sequence[Generation], stats: PoolStats) -> None:
        heading = Text.assemble((f"step {step:3}  ", "bold"), what)
        self._live.update(Group(heading, pool_map(stats), _progress(generations)), refresh=True)
        time.sleep(_LIVE_PAUSE_S)


class _Lines:
    """Prints a line for every event, and for every eighth step that only decodes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def update(self, step: int, what: str, generations: Sequence[Generation], stats: PoolStats) -> None:
        decoding_only = what.startswith("decoded") and "copied" not in what
        if decoding_only and step % _LINE_EVERY_STEPS:
            return
        counts = ", ".join(f"{count} {state}" for state, count in _counts(stats).items())
        running = sum(generation.state == "running" for generation in generations)
        self._console.print(f"step {step:3}  {running} running  {what}  [{counts}]", markup=False, soft_wrap=True)


def pool_map(stats: PoolStats) -> RenderableType:
    """Return a map with one character per block, by state, and its legend."""
    counts = _counts(stats)
    blocks, legend = Text(), Text()
    for state, sign, color in _BLOCKS:
        blocks.append(sign * counts[state], style=color)
        legend.append(f"{sign} {counts[state]} {state}   ", style=color)
    legend.append(f"swap tier: {stats.used_swap_blocks} of {stats.num_swap_blocks}", style="magenta")
    return Group(blocks, legend)


def _counts(stats: PoolStats) -> dict[str, int]:
    return {
        "active": stats.active_blocks,
        "shared": stats.shared_blocks,
        "cached": stats.cached_blocks + stats.pinned_blocks,
        "free": stats.free_blocks,
    }


def _progress(generations: Sequence[Generation]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for generation in generations:
        done, total = len(generation.token_ids), generation.part.num_tokens
        bar = ProgressBar(total, done, width=total, complete_style="green", finished_style="bright_black")
        state = Text(generation.state, style=_STATES[generation.state])
        table.add_row(generation.name, bar, f"{done}/{total}", state)
    return table


def results_table(generations: Sequence[Generation], alone: Sequence[Sequence[int]]) -> RenderableType:
    """Return a table with one row per sequence. `alone` are the tokens that transformers generated by itself."""
    table = Table(title="Generated with K/V in the daemon, compared with the library's own cache")
    for heading in ("sequence", "prompt", "from cache", "generated", "picked by", "same tokens"):
        table.add_column(heading)
    for generation, expected in zip(generations, alone, strict=True):
        same = sum(ours == theirs for ours, theirs in zip(generation.token_ids, expected, strict=True))
        table.add_row(
            generation.name,
            str(len(generation.part.prompt)),
            str(generation.sequence.num_cached_tokens),
            str(len(generation.token_ids)),
            "likeliest" if generation.seed is None else f"seed {generation.seed}",
            Text(f"{same} of {len(expected)}", style="green" if same == len(expected) else "red"),
        )
    return table
