"""`kvservice demo --tiers`: a session and a prefix go down to the disk, and come back when nothing else is left.

first daemon    a prompt is computed, and half of a story is told; other prompts push the first prompt's blocks from the
                pool to the block store and to the disk; the session with the story is saved on the disk
second daemon   it has nothing but the disk: the story goes on where it was, and the prompt is not computed again
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from transformers import LlamaForCausalLM

from kvservice import client
from kvservice.client import KVClient, Session
from kvservice.demo.model import Picker, build_model, generate_alone, make_prompt, torch_settings
from kvservice.integrations.transformers import forward, install, model_keys, pool_options, uninstall
from kvservice.launch import Daemon
from kvservice.owned import OwnedFolder
from kvservice.top.source import Source, to_json

# Larger blocks than the other demo's, so that few of them fill the smallest block store.
LARGE_BLOCK_SIZE = 64
NUM_TOKENS = 32
# The blocks that the block store of the demo has room for.
STORE_BLOCKS = 64


@dataclass(eq=False)
class Story:
    """A prompt and the tokens generated for it, the last of which is not appended in the daemon. `num_found` tokens of
    its latest sequence did not need to be computed."""

    name: str
    prompt: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    num_found: int = 0


# ---- the levels of a daemon's tiers, as its observer reports them

PATIENCE_S, _PAUSE_S = 20.0, 0.05


@dataclass(frozen=True)
class Levels:
    """Blocks of the pool by state, and those that were saved in the block store or wait for it; values in the block
    store; whether the disk is open, its values and saved sessions, and the values that went to it and came from it.
    Saved, written and read ones are counted since the daemon started."""

    active: int
    cached: int
    free: int
    saved: int
    waiting: int
    store_values: int
    disk_is_open: bool
    disk_values: int
    saved_sessions: int
    written_values: int
    written_bytes: int
    read_values: int
    read_bytes: int


class LevelsWatch:
    """Reads the levels of the daemon at `address`. It is a context manager."""

    def __init__(self, address: str) -> None:
        self._source = Source(address)
        self._runner = asyncio.Runner()

    def __enter__(self) -> LevelsWatch:
        self._runner.__enter__()
        self._runner.run(self._source.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._runner.run(self._source.__aexit__(*error))
        finally:
            self._runner.close()

    def levels(self) -> Levels:
        """Return the current levels. Raises KVServiceError."""
        return _levels(to_json(self._runner.run(self._source.first_snapshot())))

    def wait(self, condition: Callable[[Levels], bool], show: Callable[[Levels], None]) -> None:
        """Read and show the levels until they fulfil the condition, or for PATIENCE_S seconds."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            levels = self.levels()
            show(levels)
            if condition(levels) or time.monotonic() > deadline:
                return
            time.sleep(_PAUSE_S)


def _levels(snapshot: dict[str, Any]) -> Levels:
    pool, store, spill = snapshot["pool"], snapshot["store"] or {}, snapshot["spill"] or {}
    disk: dict[str, Any] = next((tier for tier in snapshot["tiers"] if tier["name"] == "disk"), {})
    return Levels(
        active=pool["active_blocks"] + pool["shared_blocks"],
        cached=pool["cached_blocks"] + pool["pinned_blocks"],
        free=pool["free_blocks"],
        saved=spill.get("saved_blocks", 0),
        waiting=spill.get("queued", 0),
        store_values=store.get("blocks", 0),
        disk_is_open=disk.get("state") == "open",
        disk_values=disk.get("num_values", 0),
        saved_sessions=(snapshot["saved"] or {}).get("num_sessions", 0),
        written_values=disk.get("written_values", 0),
        written_bytes=disk.get("written_bytes", 0),
        read_values=disk.get("read_values", 0),
        read_bytes=disk.get("read_bytes", 0),
    )


# ---- output: on a terminal a live map of pool, block store and disk, otherwise lines

# Slows the demo down, so that a person can follow it.
_LIVE_PAUSE_S = 0.04
# Signs of blocks in a line of the map. More are left out.
_MOST_SIGNS = 96
_BLOCKS = (("active", "█", "green"), ("cached", "▒", "yellow"), ("free", "·", "bright_black"))


class TiersView(Protocol):
    """Shows what happens, and the levels of the tiers."""

    def say(self, what: str) -> None: ...

    def levels(self, levels: Levels) -> None: ...


@contextmanager
def tiers_view(console: Console, quiet: bool, stories: Sequence[Story]) -> Iterator[TiersView]:
    """Yield a live view if the console is a terminal, else a view that prints lines, or nothing if `quiet`."""
    if quiet:
        yield _Silence()
    elif console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield _LiveTiers(live, stories)
    else:
        yield _LinesOfTiers(console)


class _Silence:
    def say(self, what: str) -> None: ...

    def levels(self, levels: Levels) -> None: ...


class _LiveTiers:
    """Keeps the events as a list above the map."""

    def __init__(self, live: Live, stories: Sequence[Story]) -> None:
        self._live, self._stories = live, stories
        self._events: list[Text] = []

    def say(self, what: str) -> None:
        self._events.append(Text(f"• {what}"))

    def levels(self, levels: Levels) -> None:
        self._live.update(Group(*self._events, Text(), tiers_map(levels), _progress(self._stories)), refresh=True)
        time.sleep(_LIVE_PAUSE_S)


class _LinesOfTiers:
    """Prints a line for each event."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._what = ""

    def say(self, what: str) -> None:
        self._what = what

    def levels(self, levels: Levels) -> None:
        """Print the latest event with the first levels after it."""
        if not self._what:
            return
        blocks = f"pool {levels.active} active, {levels.cached} cached, {levels.free} free"
        below = f"store {levels.store_values}, disk {levels.disk_values} and {levels.saved_sessions} sessions"
        self._console.print(f"{self._what}  [{blocks}; {below}]", markup=False, soft_wrap=True)
        self._what = ""


def tiers_map(levels: Levels) -> RenderableType:
    """Return a line for each tier, with one sign for each block."""
    pool = Text()
    for state, sign, colour in _BLOCKS:
        pool.append(sign * getattr(levels, state), style=colour)
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_row(Text("pool", style="bold"), _size(levels.active + levels.cached), pool)
    table.add_row(Text("block store", style="bold"), _size(levels.store_values), _signs(levels.store_values))
    saved = Text("◆" * levels.saved_sessions, style="magenta")
    disk = Text(" ").join([saved, _signs(levels.disk_values)]) if saved else _signs(levels.disk_values)
    table.add_row(Text("disk", style="bold"), _size(levels.disk_values), disk)
    legend = " ".join(f"{sign} {state}" for state, sign, _ in _BLOCKS)
    table.add_row("", "", Text(f"{legend}   ◆ saved session", style="bright_black"))
    return table


def _size(count: int) -> str:
    return f"{count} blocks"


def _signs(count: int) -> Text:
    more = "…" if count > _MOST_SIGNS else ""
    return Text("▒" * min(count, _MOST_SIGNS) + more, style="yellow")


def _progress(stories: Sequence[Story]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for story in stories:
        done = len(story.token_ids)
        bar = ProgressBar(NUM_TOKENS, done, width=NUM_TOKENS, complete_style="green", finished_style="bright_black")
        table.add_row(story.name, bar, f"{done}/{NUM_TOKENS}")
    return table


def stories_table(stories: Sequence[Story], alone: Sequence[Sequence[int]]) -> RenderableType:
    """Return a table with one row per story. `alone` are the tokens that transformers generated by itself."""
    table = Table(title="Tokens, compared with the library's own cache")
    for heading in ("sequence", "prompt", "found", "generated", "same tokens"):
        table.add_column(heading)
    for story, expected in zip(stories, alone, strict=True):
        same = sum(ours == theirs for ours, theirs in zip(story.token_ids, expected, strict=True))
        table.add_row(
            story.name,
            str(len(story.prompt)),
            str(story.num_found),
            str(len(story.token_ids)),
            Text(f"{same} of {len(expected)}", style="green" if same == len(expected) else "red"),
        )
    return table


# ---- the demo

NUM_BLOCKS = 24
# The smallest block store. It has room for STORE_BLOCKS blocks.
STORE_GIB, DISK_GIB = 1 / 64, 1 / 4


@dataclass(frozen=True)
class TiersResult:
    """Result of the demo. `story_tokens` and `prompt_tokens` came from the disk to the second daemon. `written_values`
    went to the disk in the first one. `problems` lists the unmet requirements."""

    tokens_match: bool
    tokens: int
    story_tokens: int
    prompt_tokens: int
    written_values: int
    written_bytes: int
    read_values: int
    read_bytes: int
    elapsed_s: float
    device: str
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the fields without `problems`."""
        return {name: value for name, value in asdict(self).items() if name != "problems"}


def run_tiers(*, device: str, console: Console, quiet: bool) -> TiersResult:
    """Run the demo with private daemons on `device`, and show it unless `quiet`. Raises StartError."""
    started_s = time.monotonic()
    story, prompt = (Story(name, _prompt(seed)) for seed, name in enumerate(("story", "prompt")))
    again = Story("prompt again", prompt.prompt)
    stories = (story, prompt, again)
    with ExitStack() as stack:
        stack.enter_context(torch_settings())
        model = build_model()
        alone = [generate_alone(model, one.prompt, Picker(None), NUM_TOKENS) for one in stories]
        install(model)
        stack.callback(uninstall, model)
        disk = stack.enter_context(OwnedFolder("kvservice-demo-"))
        view = stack.enter_context(tiers_view(console, quiet, stories))
        with _daemon(model, device, disk, view) as (act, watch):
            token = act.go_down(prompt, story)
            before = watch.levels()
        view.say("the daemon is stopped, and another one is started: the disk is all that is left")
        with _daemon(model, device, disk, view) as (act, watch):
            act.come_back(again, story, token)
            after = watch.levels()
    result = _result(stories, alone, before, after, device, time.monotonic() - started_s)
    if not quiet:
        _print_result(console, result, stories, alone)
    return result


def _prompt(seed: int) -> tuple[int, ...]:
    return make_prompt(seed, 5 * LARGE_BLOCK_SIZE + LARGE_BLOCK_SIZE // 2)


@contextmanager
def _daemon(model: LlamaForCausalLM, device: str, disk: Path, view: TiersView) -> Iterator[tuple[Act, LevelsWatch]]:
    """Run a daemon that keeps nothing but what is on the disk."""
    options: dict[str, Any] = pool_options(model.config) | {"device": device, "block_size": LARGE_BLOCK_SIZE}
    options |= {"num_blocks": NUM_BLOCKS, "swap_space_gib": 0, "weights": "demo"}
    options |= {"store_gib": STORE_GIB, "disk": str(disk), "disk_gib": DISK_GIB}
    # The model computes its prompts faster, but the demo is about blocks that come back, on slow disks too.
    options |= {"prefill_tokens_per_s": 100}
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(**options))
        watch = stack.enter_context(LevelsWatch(daemon.address))
        client = stack.enter_context(KVClient(daemon.address))
        yield Act(model, client, watch, view), watch


def _result(
    stories: Sequence[Story],
    alone: Sequence[list[int]],
    before: Levels,
    after: Levels,
    device: str,
    elapsed_s: float,
) -> TiersResult:
    story, prompt, again = stories
    wrong = [one.name for one, tokens in zip(stories, alone, strict=True) if one.token_ids != tokens]
    full_blocks = len(prompt.prompt) // LARGE_BLOCK_SIZE * LARGE_BLOCK_SIZE
    story_tokens = len(story.prompt) + NUM_TOKENS // 2 - 1
    requirements = {
        f"tokens differ from the library's own: {', '.join(wrong)}": not wrong,
        f"{story.num_found} of {story_tokens} tokens of the story came back": story.num_found == story_tokens,
        "no blocks went to the disk": before.written_values > 0,
        f"{again.num_found} of {full_blocks} tokens of the prompt came back": again.num_found == full_blocks,
        "no blocks came from the disk": after.read_values > 0,
    }
    return TiersResult(
        tokens_match=not wrong,
        tokens=sum(len(one.token_ids) for one in stories),
        story_tokens=story.num_found,
        prompt_tokens=again.num_found,
        written_values=before.written_values,
        written_bytes=before.written_bytes,
        read_values=after.read_values,
        read_bytes=after.read_bytes,
        elapsed_s=round(elapsed_s, 3),
        device=device,
        problems=tuple(problem for problem, fulfilled in requirements.items() if not fulfilled),
    )


def _print_result(
    console: Console, result: TiersResult, stories: Sequence[Story], alone: Sequence[Sequence[int]]
) -> None:
    console.print(stories_table(stories, alone))
    console.print(
        f"{result.tokens} tokens in {result.elapsed_s:.1f} s on {result.device}: {result.written_values} blocks "
        f"written to the disk, {result.read_values} read from it; after the restart {result.story_tokens} tokens of "
        f"the story and {result.prompt_tokens} of the prompt were not computed again."
    )


# ---- the two acts of `kvservice demo --tiers`: each is played with a daemon of its own, on the same disk


# Other prompts, which have more blocks than the pool and the block store together.
NUM_OTHERS, OTHER_BLOCKS = 16, 6
_SHOW_EVERY_TOKENS = 4


class Act:
    """Plays with the daemon at `address`, and shows what happens."""

    def __init__(self, model: LlamaForCausalLM, kv_client: KVClient, watch: LevelsWatch, view: TiersView) -> None:
        self._model, self._client, self._watch, self._view = model, kv_client, watch, view
        self._keys = model_keys(model)
        self._picker = Picker(None)

    def go_down(self, prompt: Story, story: Story) -> bytes:
        """Compute a prompt and half of a story, and let both go down to the disk. Returns the token of the session that
        has the story."""
        self._await_disk()
        with self._client.session("prompt") as kv:
            kv.free([self._tell(kv, prompt, NUM_TOKENS)])
            # Blocks that are used only once may not be admitted to the disk.
            kv.free([kv.allocate(prompt.prompt, extra_keys=self._keys)])
        self._say(f"a prompt of {len(prompt.prompt)} tokens is computed, and cached in the pool")
        kv = self._client.session("story", detachable=True)
        self._tell(kv, story, NUM_TOKENS // 2)
        self._say(f"half of a story is told: {len(story.token_ids)} tokens")
        self._push_out()
        token = kv.detach(durable=True)
        self._say("the session with the story is saved on the disk")
        return token

    def come_back(self, prompt: Story, story: Story, token: bytes) -> None:
        """Tell the story to its end, and compute what is missing of the prompt."""
        self._await_disk()
        with self._client.resume(token) as kv:
            (info,) = kv.describe()
            story.num_found = info.length
            self._say(f"the session is resumed: {info.length} tokens of the story are back, none is computed again")
            sequence = client.Sequence(info.sequence_id, info.length, 0, tuple(self._keys))
            self._continue(kv, sequence, story, NUM_TOKENS)
            kv.free([sequence])
        self._say("the story is told to its end")
        with self._client.session("prompt") as kv:
            kv.free([self._tell(kv, prompt, NUM_TOKENS)])
        self._say(f"{prompt.num_found} of {len(prompt.prompt)} tokens of the prompt are found in the tiers")

    def _tell(self, kv: Session, story: Story, num_tokens: int) -> client.Sequence:
        """Compute the prompt, except the tokens found in the tiers, and generate."""
        sequence = kv.allocate(story.prompt, extra_keys=self._keys)
        story.num_found = sequence.num_cached_tokens
        step = kv.open_step([sequence])
        (logits,) = forward(self._model, step, story.prompt[story.num_found :], last_only=True)
        story.token_ids.append(self._picker.pick(logits))
        self._continue(kv, sequence, story, num_tokens)
        return sequence

    def _continue(self, kv: Session, sequence: client.Sequence, story: Story, num_tokens: int) -> None:
        while len(story.token_ids) < num_tokens:
            last = story.token_ids[-1:]
            step = kv.append([sequence], last)
            (logits,) = forward(self._model, step, last)
            story.token_ids.append(self._picker.pick(logits))
            if len(story.token_ids) % _SHOW_EVERY_TOKENS == 0:
                self._view.levels(self._watch.levels())

    def _push_out(self) -> None:
        """Compute other prompts, each twice, until the first ones have left the pool."""
        with self._client.session("others") as kv:
            for number in range(NUM_OTHERS):
                tokens = make_prompt(1000 + number, OTHER_BLOCKS * LARGE_BLOCK_SIZE)
                for _ in range(2):
                    sequence = kv.allocate(tokens, extra_keys=self._keys)
                    step = kv.open_step([sequence])
                    forward(self._model, step, tokens[sequence.num_cached_tokens :], last_only=True)
                    kv.free([sequence])
                self._watch.wait(_has_room_for_next, self._view.levels)
        self._say(f"{NUM_OTHERS} other prompts push it out of the pool, into the block store and on to the disk")

    def _await_disk(self) -> None:
        """Wait until the disk has its index. Before that its values are misses."""
        self._watch.wait(lambda levels: levels.disk_is_open, self._view.levels)

    def _say(self, what: str) -> None:
        self._view.say(what)
        self._view.levels(self._watch.levels())


def _has_room_for_next(levels: Levels) -> bool:
    """Return whether the next prompt evicts only values that are on the disk. The daemon does not wait for that."""
    return not levels.waiting and levels.saved - levels.written_values <= STORE_BLOCKS - OTHER_BLOCKS
