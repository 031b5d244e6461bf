"""A miniature inference engine with continuous batching over a session of the daemon.

In each step it starts the prompts that are due, generates one token for every running sequence, and frees complete
sequences. Prompts use Extend, generated tokens use Decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import LlamaForCausalLM

from kvservice import client
from kvservice.client import Session
from kvservice.demo.model import Picker
from kvservice.demo.script import Part
from kvservice.integrations.transformers import forward, model_keys


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
