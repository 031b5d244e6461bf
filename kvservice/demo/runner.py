"""The demo: it starts a daemon, runs the parts, compares the tokens, and checks the requirements."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from transformers import LlamaForCausalLM

from kvservice import client
from kvservice.auth.client import NO_CREDENTIALS, ClientCredentials
from kvservice.client import KVClient, PoolStats, Session
from kvservice.demo.model import Picker, build_model, generate_alone, largest_error, make_prompt, torch_settings
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.transformers import forward, install, model_keys, pool_options, uninstall
from kvservice.launch import Daemon

# ---- the script: prompts, and the operations on their sequences


BLOCK_SIZE = 16


@dataclass(frozen=True)
class Part:
    """A prompt and the operations on the sequences generated from it. Steps are counted from 0."""

    name: str
    prompt: tuple[int, ...]
    starts_at_step: int
    num_tokens: int = 32
    # One sequence per seed, forked after the prompt is computed. None selects the likeliest tokens.
    seeds: tuple[int | None, ...] = (None,)
    # The sequence is in the swap tier from the first of these steps to the second.
    swapped_steps: tuple[int, int] | None = None
    # After half of the tokens, this many are truncated and generated again.
    num_tokens_again: int = 0


def parts() -> list[Part]:
    shared = make_prompt(71, 3 * BLOCK_SIZE)
    return [
        Part("plain", make_prompt(72, 37), starts_at_step=0),
        Part("prefix", shared + make_prompt(73, 9), starts_at_step=0),
        Part("same prefix", shared + make_prompt(74, 14), starts_at_step=3),
        # 43 tokens end in the middle of a block, so the first two writers must copy it.
        Part("samples", make_prompt(75, 43), starts_at_step=5, seeds=(101, 102, 103)),
        Part("swapped", make_prompt(76, 52), starts_at_step=7, swapped_steps=(20, 30)),
        Part("rewound", make_prompt(77, 25), starts_at_step=9, num_tokens_again=8),
    ]


# ---- a miniature inference engine with continuous batching over a session of the daemon
#
# In each step it starts the prompts that are due, generates one token for every running sequence, and frees complete
# sequences. Prompts use Extend, generated tokens use Decode.


@dataclass
class Generation:
    """A sequence during generation. Its last token is picked but not yet appended in the daemon."""

    name: str
    part: Part
    seed: int | None
    sequence: client.Sequence
    picker: Picker
    token_ids: list[int] = field(default_factory=list)
    # The logits of the picked tokens, one row per token.
    logits: list[torch.Tensor] = field(default_factory=list)
    # Tokens before half_way that were truncated, to be generated again.
    given_back: list[int] = field(default_factory=list)
    state: str = "running"

    def pick(self, logits: torch.Tensor) -> None:
        self.logits.append(logits.detach().float().cpu())
        self.token_ids.append(self.picker.pick(logits))

    @property
    def half_way(self) -> int:
        return self.part.num_tokens // 2

    @property
    def complete(self) -> bool:
        return len(self.token_ids) == self.part.num_tokens

    @property
    def again_alike(self) -> bool:
        """Whether the truncated tokens were the same the second time."""
        return self.token_ids[self.half_way - len(self.given_back) : self.half_way] == self.given_back


class Engine:
    """Runs the parts on a session. It calls `show(what)` after each event."""

    def __init__(self, model: LlamaForCausalLM, kv: Session, show: Callable[[str], None]) -> None:
        self.model = model
        self.kv = kv
        self.show = show
        self.step = 0
        self.generations: list[Generation] = []

    def play(self, parts: Sequence[Part]) -> list[Generation]:
        """Generate all parts to their end. Returns their sequences, which are freed in the daemon by then."""
        waiting = sorted(parts, key=lambda part: part.starts_at_step)
        while waiting or self._in_state("running", "swapped out"):
            while waiting and waiting[0].starts_at_step <= self.step:
                self._start(waiting.pop(0))
            self._swap()
            self._rewind()
            self._decode()
            self._free_complete()
            self.step += 1
        return self.generations

    def _in_state(self, *states: str) -> list[Generation]:
        return [generation for generation in self.generations if generation.state in states]

    def _start(self, part: Part) -> None:
        """Compute the tokens of a prompt that are not in the prefix cache, and fork it for each further sample."""
        parent = self.kv.allocate(part.prompt, extra_keys=model_keys(self.model))
        step = self.kv.open_step([parent])
        (logits,) = forward(self.model, step, part.prompt[parent.num_cached_tokens :], last_only=True)
        children = self.kv.fork_batch([parent] * (len(part.seeds) - 1)) if len(part.seeds) > 1 else []
        for number, (seed, sequence) in enumerate(zip(part.seeds, [parent, *children], strict=True), 1):
            name = part.name if len(part.seeds) == 1 else f"{part.name} {number}"
            generation = Generation(name, part, seed, sequence, Picker(seed))
            generation.pick(logits)
            self.generations.append(generation)
        reused = f", {parent.num_cached_tokens} of them from the prefix cache" if parent.num_cached_tokens else ""
        forks = f", forked into {len(part.seeds)}" if children else ""
        self.show(f"{part.name}: prompt of {len(part.prompt)} tokens{reused}{forks}")

    def _decode(self) -> None:
        running = self._in_state("running")
        if not running:
            return
        token_ids = [generation.token_ids[-1] for generation in running]
        step = self.kv.append([generation.sequence for generation in running], token_ids)
        logits = forward(self.model, step, token_ids)
        for generation, row in zip(running, logits, strict=True):
            generation.pick(row)
        copies = f", {step.cow_copies} blocks copied on write" if step.cow_copies else ""
        self.show(f"decoded {len(running)} tokens{copies}")

    def _swap(self) -> None:
        for generation in self._in_state("running", "swapped out"):
            first, last = generation.part.swapped_steps or (None, None)
            if self.step == first:
                moved = self.kv.swap_out([generation.sequence])
                # The swap-in must copy from the swap tier instead of reusing blocks that are still cached.
                self.kv.reset_prefix_cache()
                generation.state = "swapped out"
                self.show(f"{generation.name}: {moved} blocks swapped out")
            elif self.step == last:
                moved = self.kv.swap_in([generation.sequence])
                generation.state = "running"
                self.show(f"{generation.name}: {moved} blocks swapped in")

    def _rewind(self) -> None:
        for generation in self._in_state("running"):
            count = generation.part.num_tokens_again
            if count and not generation.given_back and len(generation.token_ids) == generation.half_way:
                generation.given_back = generation.token_ids[-count:]
                del generation.token_ids[-count:], generation.logits[-count:]
                self.kv.truncate(generation.sequence, generation.sequence.length - count)
                self.show(f"{generation.name}: truncated by {count} tokens")

    def _free_complete(self) -> None:
        complete = [generation for generation in self._in_state("running") if generation.complete]
        if not complete:
            return
        self.kv.free([generation.sequence for generation in complete])
        for generation in complete:
            generation.state = "complete"
        self.show(f"{', '.join(generation.name for generation in complete)}: complete, freed")


# ---- the demo

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
