"""A state machine that applies random operations to a system and to its model. Both must agree after each operation.

Every sequence is checked in two ways: by `read`, and by attention over it, compared with float64 attention over the
model's content.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kv_model import (
    BLOCK_SIZE,
    HEAD_SIZE,
    NUM_HEADS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    POOL,
    ModelSequence,
    ModelStep,
    reference_attention,
)
from kv_systems import Info

from kvservice.errors import (
    LayerWrittenError,
    LengthMismatchError,
    NotComputedError,
    OutOfBlocksError,
    QuotaExceededError,
    SequenceNotSwappedError,
    SequenceSwappedError,
    StaleStepError,
    UnknownSequenceError,
)

NUM_SESSIONS = 2
MAX_TOKENS = int(POOL["max_sequence_tokens"])
Draw = st.DataObject
KEYS = st.sampled_from([(), (), (), ((0, b"tenant"),), ((5, b"image"),), ((5, b"other"), (6, b"image"))])
TOKENS = st.integers(1, 14).flatmap(lambda count: st.lists(st.integers(0, 2), min_size=count, max_size=count))


class KVMachine(RuleBasedStateMachine):
    """`make_system` opens a system with NUM_SESSIONS empty sessions."""

    def __init__(self, make_system: Callable[[], Any]) -> None:
        super().__init__()
        self.system = make_system()
        self.sequences: list[dict[int, ModelSequence]] = [{} for _ in range(NUM_SESSIONS)]
        self.steps: list[dict[int, ModelStep]] = [{} for _ in range(NUM_SESSIONS)]
        self.stale: list[list[ModelStep]] = [[] for _ in range(NUM_SESSIONS)]
        self.pins: list[list[Any]] = [[] for _ in range(NUM_SESSIONS)]
        # Both sessions use the same ids, because the ids of different sessions must not collide.
        self.new_ids = [itertools.count() for _ in range(NUM_SESSIONS)]
        self.queries = np.random.default_rng(0)

    # ---- choosing

    def choose_session(self, data: Draw, wanted: Callable[[int], Any]) -> int | None:
        sessions = [s for s in range(NUM_SESSIONS) if wanted(s)]
        return data.draw(st.sampled_from(sessions), "session") if sessions else None

    def ids(self, s: int, *, swapped: bool = False, pending: bool = False) -> list[int]:
        known = self.sequences[s].items()
        return [n for n, one in known if one.swapped == swapped and (one.pending > 0 or not pending)]

    def choose_batch(self, data: Draw, **which: bool) -> tuple[int, list[int]] | None:
        s = self.choose_session(data, lambda s: self.ids(s, **which))
        if s is None:
            return None
        some = st.lists(st.sampled_from(self.ids(s, **which)), min_size=1, max_size=3, unique=True)
        return s, data.draw(some, "sequences")

    # ---- operations

    @rule(data=st.data())
    def allocate(self, data: Draw) -> None:
        s = data.draw(st.integers(0, NUM_SESSIONS - 1), "session")
        chosen = [self.choose_prompt(data) for _ in range(data.draw(st.integers(1, 3), "batch"))]
        ids = [next(self.new_ids[s]) for _ in chosen]
        found = [self.system.match_prefix(s, tokens[:-1], keys) if tokens[:-1] else 0 for tokens, keys in chosen]
        try:
            cached = self.system.allocate(s, ids, [tokens for tokens, _ in chosen], [keys for _, keys in chosen])
        except (OutOfBlocksError, QuotaExceededError):
            return
        assert cached == found
        for sequence_id, (tokens, keys), computed in zip(ids, chosen, cached, strict=True):
            self.sequences[s][sequence_id] = ModelSequence(tokens, keys, computed)

    def choose_prompt(self, data: Draw) -> tuple[list[int], Any]:
        """Choose new tokens, or a prefix of an existing sequence of either session."""
        known = [one for sequences in self.sequences for one in sequences.values() if one.tokens]
        if not known or data.draw(st.booleans(), "fresh"):
            return data.draw(TOKENS, "tokens"), data.draw(KEYS, "keys")
        like = data.draw(st.sampled_from(known), "like")
        kept = data.draw(st.just(len(like.tokens)) | st.integers(1, len(like.tokens)), "kept")
        tokens = like.tokens[:kept] + data.draw(TOKENS, "more")
        keys = like.keys if data.draw(st.integers(0, 3), "same keys") else data.draw(KEYS, "keys")
        return tokens[:MAX_TOKENS], keys

    @rule(s=st.integers(0, NUM_SESSIONS - 1))
    def splice(self, s: int) -> None:
        """Allocate prompts that start as one sequence and continue as another: the tokens of a block alone do not
        determine its K/V."""
        both = [one for known in self.sequences for one in known.values() if one.computed >= 2 * BLOCK_SIZE]
        for first, second in itertools.permutations(both[-3:], 2):
            tokens = first.tokens[:BLOCK_SIZE] + second.tokens[BLOCK_SIZE : 2 * BLOCK_SIZE] + [0]
            sequence_id = next(self.new_ids[s])
            try:
                (computed,) = self.system.allocate(s, [sequence_id], [tokens], [first.keys])
            except (OutOfBlocksError, QuotaExceededError):
                return
            self.sequences[s][sequence_id] = ModelSequence(tokens, first.keys, computed)
            self.reads_back_what_was_written()
            self.system.free(s, [sequence_id])
            del self.sequences[s][sequence_id]

    @rule(data=st.data())
    def prefill(self, data: Draw) -> None:
        batch = self.choose_batch(data, pending=True)
        if batch is None:
            return
        s, ids = batch
        pending = [self.sequences[s][n].pending for n in ids]
        counts = [data.draw(st.integers(1, most), "chunk") for most in pending]
        everything = data.draw(st.booleans(), "everything")
        try:
            handle = self.system.open_step(s, ids, None if everything else counts)
        except OutOfBlocksError:
            return
        self.opened(data, s, handle, ids, pending if everything else counts)

    @rule(data=st.data())
    def append(self, data: Draw) -> None:
        batch = self.choose_batch(data)
        if batch is None:
            return
        s, ids = batch
        models = [self.sequences[s][n] for n in ids]
        counts = [data.draw(st.integers(1, 4), "count") for _ in ids]
        if any(len(one.tokens) + count > MAX_TOKENS for one, count in zip(models, counts, strict=True)):
            return
        tokens = data.draw(st.lists(st.integers(0, 2), min_size=sum(counts), max_size=sum(counts)), "tokens")
        lengths = [len(one.tokens) for one in models]
        try:
            handle = self.system.append(s, ids, tokens, counts, lengths)
        except OutOfBlocksError:
            return
        rest = iter(tokens)
        for one, count in zip(models, counts, strict=True):
            one.tokens += itertools.islice(rest, count)
        step = self.opened(data, s, handle, ids, [one.pending for one in models])
        step.appended = (tokens, counts, lengths)

    def opened(self, data: Draw, s: int, handle: Any, ids: list[int], counts: list[int]) -> ModelStep:
        self.named(s, ids)
        starts = [self.sequences[s][n].computed for n in ids]
        step = ModelStep(handle, ids, starts, counts)
        assert handle.query_lens.tolist() == counts
        assert handle.context_lens.tolist() == [start + count for start, count in zip(starts, counts, strict=True)]
        assert handle.step_id not in self.steps[s]
        self.steps[s][handle.step_id] = step
        self.send(data, s, step, data.draw(st.sampled_from([NUM_LAYERS, NUM_LAYERS, NUM_LAYERS, 1, 0]), "layers"))
        return step

    @rule(data=st.data())
    def send_layers(self, data: Draw) -> None:
        s = self.choose_session(data, lambda s: [step for step in self.steps[s].values() if step.left])
        if s is not None:
            step = data.draw(st.sampled_from([step for step in self.steps[s].values() if step.left]), "step")
            self.send(data, s, step, data.draw(st.integers(1, NUM_LAYERS), "layers"))

    def send(self, data: Draw, s: int, step: ModelStep, num_layers: int) -> None:
        how = data.draw(st.sampled_from(["attend", "attend", "write", "write all"]), "how")
        layers = data.draw(st.permutations(step.left), "order")[:num_layers]
        if how == "write all" and len(layers) == NUM_LAYERS:
            parts = [self.new_kv(s, step, layer) for layer in range(NUM_LAYERS)]
            self.system.write(s, step.handle, None, *(np.stack(part) for part in zip(*parts, strict=True)))
        else:
            for layer in layers:
                self.send_layer(s, step, layer, attend=how == "attend")
        step.written |= set(layers)
        if not step.left and layers:
            for n, start, count in zip(step.ids, step.starts, step.counts, strict=True):
                self.sequences[s][n].computed = start + count

    def new_kv(self, s: int, step: ModelStep, layer: int) -> tuple[Any, Any]:
        spans = zip(step.ids, step.starts, step.counts, strict=True)
        parts = [self.sequences[s][n].kv(layer, start, start + count) for n, start, count in spans]
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def send_layer(self, s: int, step: ModelStep, layer: int, *, attend: bool) -> None:
        key, value = self.new_kv(s, step, layer)
        if not attend:
            self.system.write(s, step.handle, layer, key, value)
            return
        query = self.queries.standard_normal((len(key), NUM_HEADS, HEAD_SIZE), np.float32)
        output = self.system.attend(s, step.handle, layer, query, key, value)
        np.testing.assert_allclose(output, self.expected_output(s, step, layer, query), rtol=0, atol=2e-4)

    def expected_output(self, s: int, step: ModelStep, layer: int, query: Any) -> Any:
        parts, done = [], 0
        for n, start, count in zip(step.ids, step.starts, step.counts, strict=True):
            key, value = self.sequences[s][n].kv(layer, 0, start + count)
            parts.append(reference_attention(query[done : done + count], key, value))
            done += count
        return np.concatenate(parts)

    def named(self, s: int, ids: list[int]) -> None:
        """End the steps of these sequences, after an operation on them."""
        for step_id, step in list(self.steps[s].items()):
            if set(step.ids) & set(ids):
                self.stale[s].append(self.steps[s].pop(step_id))

    @rule(data=st.data())
    def fork(self, data: Draw) -> None:
        batch = self.choose_batch(data)
        if batch is None:
            return
        s, parents = batch
        parents += data.draw(st.sampled_from([[], [parents[0]]]), "again")
        children = [next(self.new_ids[s]) for _ in parents]
        try:
            self.system.fork(s, parents, children)
        except QuotaExceededError:
            return
        self.named(s, parents)
        for parent, child in zip(parents, children, strict=True):
            one = self.sequences[s][parent]
            self.sequences[s][child] = ModelSequence(list(one.tokens), one.keys, one.computed)

    @rule(data=st.data())
    def truncate(self, data: Draw) -> None:
        batch = self.choose_batch(data)
        if batch is None:
            return
        s, (n, *_) = batch
        one = self.sequences[s][n]
        length = data.draw(st.integers(0, len(one.tokens)), "length")
        self.system.truncate(s, n, length)
        self.named(s, [n])
        del one.tokens[length:]
        one.computed = min(one.computed, length)

    @rule(data=st.data())
    def swap_out(self, data: Draw) -> None:
        batch = self.choose_batch(data)
        if batch is None:
            return
        s, ids = batch
        try:
            self.system.swap_out(s, ids)
        except OutOfBlocksError as error:
            refused_by = error.tier
        else:
            self.named(s, ids)
            for n in ids:
                self.sequences[s][n].swapped = True
            return
        assert refused_by == "swap"

    @rule(data=st.data())
    def swap_in(self, data: Draw) -> None:
        batch = self.choose_batch(data, swapped=True)
        if batch is None:
            return
        s, ids = batch
        try:
            self.system.swap_in(s, ids)
        except OutOfBlocksError:
            return
        for n in ids:
            self.sequences[s][n].swapped = False

    @rule(data=st.data())
    def swap_around_another(self, data: Draw) -> None:
        """Swap out, allocate another sequence in the freed blocks, and swap in."""
        batch = self.choose_batch(data)
        if batch is None:
            return
        s, ids = batch
        try:
            self.system.swap_out(s, ids)
        except OutOfBlocksError:
            return
        self.named(s, ids)
        for n in ids:
            self.sequences[s][n].swapped = True
        self.system.reset_prefix_cache(s)
        self.fill_and_free(s)
        try:
            self.system.swap_in(s, ids)
        except OutOfBlocksError:
            return
        for n in ids:
            self.sequences[s][n].swapped = False

    def fill_and_free(self, s: int) -> None:
        filler, tokens = next(self.new_ids[s]), [3] * 4 * BLOCK_SIZE
        try:
            self.system.allocate(s, [filler], [tokens], [()])
        except (OutOfBlocksError, QuotaExceededError):
            return
        handle = self.system.open_step(s, [filler], None)
        kv = np.full((NUM_LAYERS, len(tokens), NUM_KV_HEADS, HEAD_SIZE), 9.0, np.float32)
        self.system.write(s, handle, None, kv, kv)
        self.system.free(s, [filler])
        self.system.reset_prefix_cache(s)

    @rule(data=st.data(), swapped=st.booleans())
    def free(self, data: Draw, swapped: bool) -> None:
        batch = self.choose_batch(data, swapped=swapped)
        if batch is not None:
            s, ids = batch
            self.system.free(s, ids)
            self.named(s, ids)
            for n in ids:
                del self.sequences[s][n]

    @rule(data=st.data())
    def pin(self, data: Draw) -> None:
        known = [one for sequences in self.sequences for one in sequences.values() if one.tokens]
        if not known:
            return
        one = data.draw(st.sampled_from(known), "like")
        s = data.draw(st.integers(0, NUM_SESSIONS - 1), "session")
        found = self.system.match_prefix(s, one.tokens, one.keys)
        try:
            pin = self.system.pin(s, one.tokens, one.keys)
        except (NotComputedError, QuotaExceededError) as error:
            refused = type(error)
        else:
            assert pin.num_pinned_tokens == found > 0
            self.pins[s].append(pin)
            return
        assert (refused is NotComputedError) == (found == 0)

    @rule(data=st.data())
    def unpin(self, data: Draw) -> None:
        s = self.choose_session(data, lambda s: self.pins[s])
        if s is not None:
            self.system.unpin(s, self.pins[s].pop(data.draw(st.integers(0, len(self.pins[s]) - 1), "pin")))

    @rule(s=st.integers(0, NUM_SESSIONS - 1))
    def reset_prefix_cache(self, s: int) -> None:
        self.system.reset_prefix_cache(s)

    # ---- operations that must fail, or return the same answer again

    @rule(data=st.data())
    def repeat_an_append(self, data: Draw) -> None:
        s = self.choose_session(data, lambda s: [step for step in self.steps[s].values() if step.appended])
        if s is None:
            return
        step = data.draw(st.sampled_from([step for step in self.steps[s].values() if step.appended]), "step")
        assert step.appended is not None
        tokens, counts, lengths = step.appended
        again = self.system.append(s, step.ids, tokens, counts, lengths)
        assert again.step_id == step.handle.step_id
        different = [(token + 1) % 3 for token in tokens]
        refuses(LengthMismatchError, self.system.append, s, step.ids, different, counts, lengths)

    @precondition(lambda self: any(self.stale))
    @rule(data=st.data())
    def use_a_stale_step(self, data: Draw) -> None:
        s = self.choose_session(data, lambda s: self.stale[s])
        assert s is not None
        step = data.draw(st.sampled_from(self.stale[s]), "step")
        layer = data.draw(st.integers(0, NUM_LAYERS - 1), "layer")
        kv = np.zeros((sum(step.counts), 2, HEAD_SIZE), np.float32)
        refuses(StaleStepError, self.system.write, s, step.handle, layer, kv, kv)

    @rule(data=st.data())
    def send_a_layer_twice(self, data: Draw) -> None:
        s = self.choose_session(data, lambda s: [step for step in self.steps[s].values() if step.written])
        if s is None:
            return
        step = data.draw(st.sampled_from([step for step in self.steps[s].values() if step.written]), "step")
        layer = min(step.written)
        key, value = self.new_kv(s, step, layer)
        refuses(LayerWrittenError, self.system.write, s, step.handle, layer, key + 1, value)
        every = np.zeros((NUM_LAYERS, *key.shape), np.float32)
        refuses(LayerWrittenError, self.system.write, s, step.handle, None, every, every)

    @rule(data=st.data())
    def name_the_wrong_sequences(self, data: Draw) -> None:
        s = data.draw(st.integers(0, NUM_SESSIONS - 1), "session")
        unknown = next(self.new_ids[s])
        foreign = [n for n in self.sequences[1 - s] if n not in self.sequences[s]]
        for n in [unknown, *foreign[:1]]:
            batch = [*list(self.sequences[s])[:1], n]
            for call in (self.system.free, self.system.swap_out, self.system.swap_in):
                refuses(UnknownSequenceError, call, s, batch)
            refuses(UnknownSequenceError, self.system.read, s, n, 0, 0)
        for n in self.ids(s, swapped=True)[:1]:
            refuses(SequenceSwappedError, self.system.append, s, [n], [0], [1], [len(self.sequences[s][n].tokens)])
        for n in self.ids(s)[:1]:
            refuses(SequenceNotSwappedError, self.system.swap_in, s, [n])

    @rule(data=st.data())
    def probe(self, data: Draw) -> None:
        """Check attention over one sequence, through a temporary fork."""
        batch = self.choose_batch(data)
        if batch is not None:
            s, (n, *_) = batch
            self.probe_sequence(s, n)

    def probe_sequence(self, s: int, n: int) -> None:
        one = self.sequences[s][n]
        if len(one.tokens) == MAX_TOKENS:
            return
        child = next(self.new_ids[s])
        try:
            self.system.fork(s, [n], [child])
        except QuotaExceededError:
            return
        self.named(s, [n])
        try:
            handle = self.system.append(s, [child], [1], [1], [len(one.tokens)])
        except OutOfBlocksError:
            self.system.free(s, [child])
            return
        self.sequences[s][child] = ModelSequence([*one.tokens, 1], one.keys, one.computed)
        step = ModelStep(handle, [child], [one.computed], [one.pending + 1])
        for layer in range(NUM_LAYERS):
            self.send_layer(s, step, layer, attend=True)
        self.system.free(s, [child])
        del self.sequences[s][child]

    # ---- invariants after each operation

    @invariant()
    def describes_itself_as_the_model_does(self) -> None:
        for s, known in enumerate(self.sequences):
            wanted = [Info(n, len(m.tokens), m.computed, m.swapped, tuple(m.tokens)) for n, m in known.items()]
            assert self.system.describe(s) == wanted

    @invariant()
    def figures_add_up(self) -> None:
        stats = self.system.stats()
        parts = (
            stats.free_blocks, stats.active_blocks, stats.shared_blocks, stats.cached_blocks, stats.pinned_blocks,
        )  # fmt: skip
        assert sum(parts) == stats.num_blocks == POOL["num_blocks"]
        assert min(parts) >= 0
        models = [one for known in self.sequences for one in known.values()]
        assert stats.sequences == len(models)
        assert stats.swapped_sequences == sum(one.swapped for one in models)
        assert stats.tokens == sum(len(one.tokens) for one in models)
        assert (stats.used_swap_blocks > 0) == any(one.swapped and one.tokens for one in models)

    @invariant()
    def reads_back_what_was_written(self) -> None:
        for s, n in self.resident():
            one = self.sequences[s][n]
            key, value = self.system.read(s, n, 0, one.computed)
            for layer in range(NUM_LAYERS):
                wanted = one.kv(layer, 0, one.computed)
                np.testing.assert_array_equal(key[layer], wanted[0])
                np.testing.assert_array_equal(value[layer], wanted[1])
            if one.pending:
                refuses(NotComputedError, self.system.read, s, n, 0, one.computed + 1)

    @invariant()
    def is_whole(self) -> None:
        self.system.check()

    def resident(self) -> Iterator[tuple[int, int]]:
        for s in range(NUM_SESSIONS):
            for n in self.ids(s):
                yield s, n

    def teardown(self) -> None:
        """Check every sequence once more, and check that nothing is left after the end."""
        try:
            for s, n in list(self.resident()):
                self.probe_sequence(s, n)
        finally:
            self.system.end()


def refuses(error: type[Exception], call: Callable[..., Any], *args: Any) -> None:
    try:
        call(*args)
    except error:
        return
    raise AssertionError(f"{call} did not raise {error.__name__}")
