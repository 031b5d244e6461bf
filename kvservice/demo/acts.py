"""The two acts of `kvservice demo --tiers`: each is played with a daemon of its own, on the same disk."""

from __future__ import annotations

from transformers import LlamaForCausalLM

from kvservice import client
from kvservice.client import KVClient, Session
from kvservice.demo.model import Picker
from kvservice.demo.story import LARGE_BLOCK_SIZE, NUM_TOKENS, STORE_BLOCKS, Story, make_prompt
from kvservice.demo.tiers_view import TiersView
from kvservice.demo.watch import Levels, LevelsWatch
from kvservice.integrations.transformers import forward, model_keys

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
