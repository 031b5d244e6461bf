"""`kvservice demo --tiers`: a session and a prefix go down to the disk, and come back when nothing else is left.

first daemon    a prompt is computed, and half of a story is told; other prompts push the first prompt's blocks from the
                pool to the block store and to the disk; the session with the story is saved on the disk
second daemon   it has nothing but the disk: the story goes on where it was, and the prompt is not computed again
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import LlamaForCausalLM

from kvservice import client
from kvservice.client import KVClient, Session
from kvservice.demo.model import Picker, build_model, generate_alone, torch_settings
from kvservice.demo.story import LARGE_BLOCK_SIZE, NUM_TOKENS, STORE_BLOCKS, Story, make_prompt
from kvservice.demo.tiers_view import TiersView, stories_table, tiers_view
from kvservice.demo.watch import Levels, LevelsWatch
from kvservice.integrations.transformers import forward, install, model_keys, pool_options, uninstall
from kvservice.launch import Daemon
from kvservice.owned import OwnedFolder

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
