"""Random operations on the sequences of one session, with a model of all contents, while the daemon is killed.

The client repeats calls by itself. What it cannot know is checked against the daemon: after an error or a restart, each
sequence has the tokens and the K/V of the model, or it was reported lost.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kv_model import BLOCK_SIZE, HEAD_SIZE, NUM_HEADS, NUM_LAYERS, ModelSequence, reference_attention

from kvservice.client import Pin, Sequence, Session, Step
from kvservice.errors import (
    ConnectionLostError,
    KVServiceError,
    LayerWrittenError,
    NotComputedError,
    OutOfBlocksError,
    QuotaExceededError,
    SequenceLostError,
    StaleStepError,
    UnknownStepError,
)

MAX_LIVE, MAX_TOKENS = 8, 56
# The beginnings of most prompts, in all sessions.
BEGINNINGS = [[100 * which + position for position in range(24)] for which in range(1, 5)]
PIN_S = 600.0
# Errors of a step that a kill has ended, or whose layer was in flight then.
STEP_OVER = (ConnectionLostError, StaleStepError, UnknownStepError, LayerWrittenError)


@dataclass
class Live:
    """A sequence and its model. `changing`: an operation on it may have been executed or not."""

    handle: Sequence
    model: ModelSequence
    changing: bool = False


@dataclass
class SequenceStorm:
    """One session. `failures` are sentences about everything that is wrong; `counts` are of operations and events."""

    kv: Session
    seed: int
    failures: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.queries = np.random.default_rng(self.seed)
        self.tolerance = 2e-4 if self.kv.info.device == "cpu" else 2e-3
        self.live: dict[int, Live] = {}
        self.pins: list[tuple[Pin, list[int]]] = []
        self.num_restarts = self.kv.num_restarts

    def run_one(self) -> None:
        """Run one random operation, then compare everything if the daemon was restarted meanwhile."""
        operation = self.random.choice(self.operations())
        try:
            operation()
            self.counts[operation.__name__] += 1
        except (OutOfBlocksError, QuotaExceededError):
            self.counts["no room"] += 1
            self.free_some(3)
        except SequenceLostError:
            self.counts["lost in a call"] += 1
            self.compare()
        except STEP_OVER as error:
            self.counts[type(error).__name__] += 1
            self.compare()
        except NotComputedError as error:
            if self.kv.num_restarts == self.num_restarts:
                self.failures.append(f"{self.kv.transport}: {error}")
            self.compare()  # decides whether the tokens may have got lost
        if self.kv.num_restarts != self.num_restarts:
            self.compare()

    def operations(self) -> list[Callable[[], None]]:
        often = [self.allocate, self.append, self.append, self.append, self.read]
        return [*often, self.fork, self.truncate, self.swap_out, self.swap_in, self.free, self.pin, self.unpin]

    # ---- operations

    def allocate(self) -> None:
        if len(self.live) >= MAX_LIVE:
            return self.free_some(2)
        tokens = list(self.random.choice(BEGINNINGS)[: self.random.randint(1, 24)])
        tokens += [self.random.randrange(1000) for _ in range(self.random.randint(0, 9))]
        keys = ((0, b"tenant"),) if self.random.random() < 0.2 else ()
        handle = self.kv.allocate(tokens, extra_keys=keys)
        one = self.live[handle.sequence_id] = Live(handle, ModelSequence(tokens, keys, handle.num_cached_tokens))
        self.counts["cached tokens"] += handle.num_cached_tokens
        self.check_contents(one)
        self.compute([one])
        return None

    def append(self) -> None:
        chosen = [one for one in self.some() if len(one.model.tokens) < MAX_TOKENS - 4]
        if not chosen:
            return
        counts = [self.random.randint(1, 4) for _ in chosen]
        tokens = [[self.random.randrange(1000) for _ in range(count)] for count in counts]
        step = self.changing(
            chosen,
            lambda: self.kv.append(
                [one.handle for one in chosen], [token for part in tokens for token in part], num_tokens=counts
            ),
        )
        for one, part in zip(chosen, tokens, strict=True):
            one.model.tokens += part
        self.send(step, chosen)

    def compute(self, chosen: list[Live]) -> None:
        """Compute the tokens that are not computed."""
        if chosen := [one for one in chosen if one.model.pending]:
            self.send(self.kv.open_step([one.handle for one in chosen]), chosen)

    def send(self, step: Step, chosen: list[Live]) -> None:
        """Write the layers of a step over all pending tokens, with attention or without."""
        attends = self.random.random() < 0.7
        for layer in range(NUM_LAYERS):
            whole = [one.model.kv(layer, 0, len(one.model.tokens)) for one in chosen]
            key, value = (
                np.concatenate([both[i][-count:] for both, count in zip(whole, step.query_lens, strict=True)])
                for i in (0, 1)
            )
            if not attends:
                step.write(key, value, layer)
                continue
            query = self.queries.standard_normal((len(key), NUM_HEADS, HEAD_SIZE), np.float32)
            output = step.extend(layer, query, key, value)
            parts = np.split(query, np.cumsum(step.query_lens)[:-1])
            expected = [reference_attention(part, *both) for part, both in zip(parts, whole, strict=True)]
            if not np.allclose(output, np.concatenate(expected), rtol=0, atol=self.tolerance):
                self.failures.append(f"wrong output of layer {layer} of step {step.step_id}")
        for one in chosen:
            one.model.computed = len(one.model.tokens)
        self.counts["computed tokens"] += step.num_tokens

    def fork(self) -> None:
        for parent in self.some()[:1]:
            if len(self.live) < MAX_LIVE:
                child = self.changing([parent], lambda: self.kv.fork(parent.handle))  # noqa: B023
                model = ModelSequence(list(parent.model.tokens), parent.model.keys, parent.model.computed)
                self.live[child.sequence_id] = Live(child, model)

    def truncate(self) -> None:
        for one in self.some()[:1]:
            length = self.random.randint(1, len(one.model.tokens))
            self.changing([one], lambda: self.kv.truncate(one.handle, length))  # noqa: B023
            del one.model.tokens[length:]
            one.model.computed = min(one.model.computed, length)

    def swap_out(self) -> None:
        self.swap(self.some(), self.kv.swap_out, swapped=True)

    def swap_in(self) -> None:
        self.swap(self.some(swapped=True), self.kv.swap_in, swapped=False)

    def swap(self, chosen: list[Live], call: Callable[[list[Sequence]], int], *, swapped: bool) -> None:
        if chosen:
            self.changing(chosen, lambda: call([one.handle for one in chosen]))
            for one in chosen:
                one.model.swapped = swapped

    def free(self) -> None:
        if self.random.random() < 0.5:
            self.free_some(1)

    def free_some(self, count: int) -> None:
        chosen = self.random.sample([*self.live], min(count, len(self.live)))
        if chosen:
            ones = [self.live[one] for one in chosen]
            self.changing(ones, lambda: self.kv.free([one.handle for one in ones]))
            for one in chosen:
                del self.live[one]

    def read(self) -> None:
        for one in self.some():
            self.check_contents(one)

    def pin(self) -> None:
        for one in self.some()[:1]:
            if not one.model.keys and len(self.pins) < 3 and one.model.computed >= BLOCK_SIZE:
                tokens = list(one.model.tokens)
                self.pins.append((self.kv.pin(tokens, PIN_S), tokens))

    def unpin(self) -> None:
        if self.pins:
            pin, tokens = self.pins.pop(self.random.randrange(len(self.pins)))
            found = self.kv.match_prefix(tokens)
            if found < pin.num_pinned_tokens:
                self.failures.append(f"{found} tokens of {pin.num_pinned_tokens} pinned ones are found")
            self.kv.unpin(pin)

    # ---- what must be true

    def some(self, *, swapped: bool = False) -> list[Live]:
        ones = [one for one in self.live.values() if one.model.swapped == swapped]
        return self.random.sample(ones, min(len(ones), self.random.randint(1, 3)))

    def changing(self, ones: Iterable[Live], call: Callable[[], Any]) -> Any:
        """Make a call that changes sequences. It may have been executed if it raises ConnectionLostError."""
        ones = list(ones)
        try:
            answer = call()
        except ConnectionLostError:
            for one in ones:
                one.changing = True
            raise
        return answer

    def compare(self) -> None:
        """Compare all sequences with the daemon's, and their contents. Compute what is not computed. Again, if the
        daemon is killed meanwhile."""
        while True:
            self.num_restarts = self.kv.num_restarts
            try:
                self.compare_once()
                if self.kv.num_restarts == self.num_restarts:
                    return
            except (SequenceLostError, *STEP_OVER):
                self.counts["interrupted comparisons"] += 1

    def compare_once(self) -> None:
        self.counts["comparisons"] += 1
        self.forget_lost(self.kv.lost_sequences())
        known = {one.sequence_id: one for one in self.kv.describe(token_ids=True)}
        for sequence_id in known.keys() - self.live.keys():
            # A fork or an allocation whose answer was lost for good.
            self.counts["unexpected sequences"] += 1
            self.kv.free([Sequence(sequence_id, known[sequence_id].length)])
        for sequence_id, one in list(self.live.items()):
            found = known.get(sequence_id)
            if found is None:
                if not one.changing:
                    self.failures.append(f"sequence {sequence_id} is gone, and was not reported lost")
                del self.live[sequence_id]
                continue
            self.adopt(one, list(found.token_ids), found.num_computed_tokens, swapped=found.swapped)
        for one in self.live.values():
            if not one.model.swapped:
                self.check_contents(one)
        for one in list(self.live.values()):
            if not one.model.swapped:
                try:
                    self.compute([one])
                except OutOfBlocksError:
                    self.counts["no room"] += 1

    def adopt(self, one: Live, tokens: list[int], computed: int, *, swapped: bool) -> None:
        """Take the daemon's state over where the model cannot know it; anywhere else it has to be the model's."""
        model, number = one.model, one.handle.sequence_id
        if tokens != model.tokens and not one.changing:
            self.failures.append(f"sequence {number} has {len(tokens)} tokens, not its {len(model.tokens)}")
        if computed < min(model.computed, len(tokens)) and not one.changing:
            self.failures.append(
                f"{self.kv.transport}: sequence {number} has {computed} computed tokens, not {model.computed}"
            )
        if swapped != model.swapped and not one.changing:
            self.failures.append(f"sequence {number} is in the wrong tier")
        model.tokens, model.computed, model.swapped = tokens, computed, swapped
        one.handle.length, one.changing = len(tokens), False

    def forget_lost(self, lost: list[int]) -> None:
        for sequence_id in lost:
            self.counts["lost"] += 1
            self.live.pop(sequence_id, None)
        if lost:
            self.kv.free([Sequence(one, 0) for one in lost])

    def check_contents(self, one: Live) -> None:
        """Compare the K/V of the computed tokens, byte by byte."""
        if not one.model.computed:
            return
        keys, values = self.kv.read(one.handle, 0, one.model.computed)
        self.counts["bytes read"] += keys.nbytes + values.nbytes
        for layer in range(NUM_LAYERS):
            expected = one.model.kv(layer, 0, one.model.computed)
            if not (np.array_equal(keys[layer], expected[0]) and np.array_equal(values[layer], expected[1])):
                same = (keys[layer] == expected[0]).all(axis=(1, 2)) & (values[layer] == expected[1]).all(axis=(1, 2))
                wrong = np.flatnonzero(~same).tolist()
                self.counts["wrong tokens"] += len(wrong)
                self.failures.append(
                    f"sequence {one.handle.sequence_id} has wrong K/V in layer {layer} at positions {wrong} "
                    f"(of {one.model.computed}, blocks of {BLOCK_SIZE})"
                )

    def finish(self) -> None:
        """Free everything, whatever is killed meanwhile."""
        self.compare()
        self.free_some(len(self.live))
        for pin, _ in self.pins:
            self.kv.unpin(pin)
        self.pins.clear()
        if left := self.kv.describe():
            self.failures.append(f"{len(left)} sequences are left")


def describe_error(error: KVServiceError) -> str:
    return f"{type(error).__name__}: {error}"
