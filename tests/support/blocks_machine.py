"""The block manager, compared with a model that knows the tokens of each sequence, over a pool of simulated K/V.

The K/V of a token depends on all tokens before it, so the simulated pool holds, for each slot, the whole prefix that
was written there. After every rule the slots of each sequence's table must hold its computed tokens. A missed copy, a
block that is shared too early, a slot with two owners or a stale cached block all show as wrong content.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
from event_replica import EventReplica
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from manager_state import full_state

from kvservice.blocks import (
    AllocationRequest,
    AllocStatus,
    BlockManager,
    BlocksConfig,
    EventJournal,
    SessionNamespace,
    StepPlan,
    TenantQuota,
    extra_keys_by_block,
)
from kvservice.chain_hash import block_hash, root_hash
from kvservice.errors import (
    FailedPreconditionError,
    LayerWrittenError,
    NotComputedError,
    OutOfBlocksError,
    QuotaExceededError,
    StaleStepError,
    UnknownPinError,
)

TOKENS = st.integers(0, 1)
SALTS = st.sampled_from([(), ((0, b"tenant"),), ((3, b"image"),)])
Content = tuple[Any, tuple[int, ...]]


@dataclass
class Model:
    """Expected state of a sequence: its tokens, how many are computed, its salt, the size of its table."""

    tokens: list[int]
    computed: int
    salt: tuple[tuple[int, bytes], ...]
    num_blocks: int
    swapped: bool = False
    step: int = 0

    def content(self, position: int) -> Content:
        """Return the simulated K/V of a position: all tokens up to it, and the extra keys up to its block."""
        return self.salt, tuple(self.tokens[: position + 1])


@dataclass
class LiveStep:
    """Expected state of a live step over the tokens starts[i] <= p < stops[i] of sequence ids[i]. `unknown` are the
    tokens that the engine has sampled and not yet given to the manager, by sequence. A step `ahead` covers so many
    tokens of each sequence that are not known yet."""

    ids: list[int]
    starts: list[int]
    stops: list[int]
    follows: int = 0
    follower: int = 0
    unknown: dict[int, int] = field(default_factory=dict)
    written: bool = False
    committed: bool = False
    ahead: int = 0


def resident(machine: BlockManagerMachine) -> bool:
    return any(not model.swapped for models in machine.models for model in models.values())


def swapped(machine: BlockManagerMachine) -> bool:
    return any(model.swapped for models in machine.models for model in models.values())


def stepping(machine: BlockManagerMachine) -> bool:
    return any(model.step for models in machine.models for model in models.values())


def sampling(machine: BlockManagerMachine) -> bool:
    return any(step.unknown for steps in machine.steps for step in steps.values())


def going_ahead(machine: BlockManagerMachine) -> bool:
    return any(step.ahead for steps in machine.steps for step in steps.values())


def findable(machine: BlockManagerMachine) -> bool:
    stats = machine.manager.stats()
    return stats.cached_blocks + stats.pinned_blocks > 0


def pinning(machine: BlockManagerMachine) -> bool:
    return bool(machine.pins)


class BlockManagerMachine(RuleBasedStateMachine):
    """Two clients of one small pool."""

    @initialize(
        num_blocks=st.integers(6, 32),
        block_size=st.sampled_from([1, 2, 4]),
        num_swap_blocks=st.integers(0, 12),
        num_layers=st.integers(1, 2),
        watermark=st.sampled_from([0.0, 0.15]),
        caching=st.sampled_from([True, True, True, False]),
        guaranteed=st.none() | st.tuples(st.integers(0, 3), st.integers(0, 3)),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        num_swap_blocks: int,
        num_layers: int,
        watermark: float,
        caching: bool,
        guaranteed: tuple[int, int] | None,
    ) -> None:
        self.now = 0.0
        self.config = BlocksConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            num_layers=num_layers,
            num_swap_blocks=num_swap_blocks,
            watermark=watermark,
            enable_prefix_caching=caching,
            max_sequences=14,
            max_sequence_tokens=64,
        )
        journal = EventJournal(window=1 << 30, with_tokens=True)
        self.manager = BlockManager(self.config, clock=lambda: self.now, journal=journal)
        self.replica = EventReplica(journal)
        self.guaranteed = guaranteed
        if guaranteed is not None:
            self.manager.set_tenants({str(who): guaranteed[who] for who in (0, 1)})
        self.spaces = [self.open_namespace(0), self.open_namespace(1)]
        self.models: list[dict[int, Model]] = [{}, {}]
        self.steps: list[dict[int, LiveStep]] = [{}, {}]
        self.stale: list[list[int]] = [[], []]
        self.pool: list[Content | None] = [None] * (num_blocks * block_size)
        self.swap_pool: list[Content | None] = [None] * (num_swap_blocks * block_size)
        self.pins: list[tuple[int, int, float]] = []
        self.next_id = 0

    # Helpers of the rules

    def open_namespace(self, who: int) -> SessionNamespace:
        """Open a client's namespace. Each client is a tenant of its own, if there are tenants."""
        space = self.manager.open_namespace()
        if self.guaranteed is not None:
            space.quota = TenantQuota(str(who), None, None)
        return space

    def missing(self, who: int) -> int:
        """Return how many of its guaranteed blocks a client does not hold."""
        owners = self.manager.device.owners
        if self.guaranteed is None or owners is None:
            return 0
        return max(0, self.guaranteed[who] - owners.num_held(str(who)))

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    def copy(self, src_pool: list[Any], dst_pool: list[Any], src: list[int], dst: list[int]) -> None:
        size = self.config.block_size
        read = [src_pool[block * size : (block + 1) * size] for block in src]
        for block, content in zip(dst, read, strict=True):
            dst_pool[block * size : (block + 1) * size] = content

    def pick(self, data: st.DataObject, suits: Callable[[Model], bool]) -> int:
        """Draw a client that has such a sequence."""
        return data.draw(
            st.sampled_from([who for who in (0, 1) if any(map(suits, self.models[who].values()))]), "client"
        )

    def choose(self, data: st.DataObject, who: int, swapped: bool = False, most: int = 4) -> list[int]:
        """Draw some of a client's sequences, resident or swapped out."""
        ids = [name for name, model in self.models[who].items() if model.swapped == swapped]
        if not ids:
            return []
        return data.draw(st.lists(st.sampled_from(ids), min_size=1, max_size=most, unique=True), "sequences")

    def refused(self, call: Any, *arguments: Any) -> None:
        """Check that the call raises OutOfBlocksError or QuotaExceededError and changes nothing."""
        before = full_state(self.manager)
        try:
            call(*arguments)
        except (OutOfBlocksError, QuotaExceededError):
            assert full_state(self.manager) == before
        else:
            raise AssertionError(f"{call.__name__} did what its check refused")

    def outdate(self, who: int, ids: list[int]) -> None:
        """Record that the newest steps of these sequences are stale."""
        for step_id in {self.models[who][name].step for name in ids} - {0}:
            self.end(who, step_id)

    def end(self, who: int, step_id: int) -> None:
        """Record that a step is stale, and the steps that end with it."""
        step = self.steps[who].pop(step_id, None)
        if step is None:
            return
        self.stale[who].append(step_id)
        for model in self.models[who].values():
            if model.step == step_id:
                model.step = 0
        self.end(who, step.follows)
        if step.follower in self.steps[who]:
            self.steps[who][step.follower].follows = 0
            if not step.committed:
                self.end(who, step.follower)

    def opened(
        self, who: int, step: StepPlan, ids: list[int], starts: list[int], lens: list[int], lookahead: int
    ) -> None:
        """Perform the copies of a step, and check that its slots are those of its tokens."""
        self.copy(self.pool, self.pool, step.copies.src.tolist(), step.copies.dst.tolist())
        assert step.sequence_ids.tolist() == ids
        assert step.query_lens.tolist() == lens
        assert step.context_lens.tolist() == [start + count for start, count in zip(starts, lens, strict=True)]
        stops = [start + count for start, count in zip(starts, lens, strict=True)]
        self.steps[who][step.step_id] = LiveStep(ids, starts, stops)
        slots = []
        for name, table, start, count in zip(ids, step.block_tables.tolist(), starts, lens, strict=True):
            size = self.config.block_size
            slots += [table[p // size] * size + p % size for p in range(start, start + count)]
            model = self.models[who][name]
            model.num_blocks = max(model.num_blocks, self.blocks_for(len(model.tokens) + lookahead))
            model.step = step.step_id
        assert step.slot_mapping.tolist() == slots

    # The rules

    @rule(data=st.data(), who=st.integers(0, 1), lookahead=st.integers(0, 3), fill=st.booleans())
    def allocate(self, data: st.DataObject, who: int, lookahead: int, fill: bool) -> None:
        prompts = data.draw(st.lists(st.lists(TOKENS, min_size=1, max_size=14), min_size=1, max_size=3), "prompts")
        salts = [data.draw(SALTS, "salt") for _ in prompts]
        requests = [
            AllocationRequest(self.next_id + i, prompt, salt, lookahead)
            for i, (prompt, salt) in enumerate(zip(prompts, salts, strict=True))
        ]
        manager, space = self.manager, self.spaces[who]
        if manager.can_allocate(space, requests) is not AllocStatus.OK:
            required = sum(self.blocks_for(len(prompt) + lookahead) for prompt in prompts)
            places = len(requests) + sum(map(len, self.models))
            assert required + self.config.watermark_blocks > self.missing(who) or places > self.config.max_sequences
            self.refused(manager.allocate, space, requests)
            return
        known = [manager.match_prefix(prompt, salt) for prompt, salt in zip(prompts, salts, strict=True)]
        made = manager.allocate(space, requests)
        self.next_id += len(requests)
        size = self.config.block_size
        for request, new, prompt, hit in zip(requests, made, prompts, known, strict=True):
            assert new.num_cached_tokens == min(hit, (len(prompt) - 1) // size * size)
            assert new.num_blocks == self.blocks_for(len(prompt))
            self.models[who][request.sequence_id] = Model(
                list(prompt), new.num_cached_tokens, tuple(request.extra_keys), new.num_blocks
            )
        if fill:
            ids = [request.sequence_id for request in requests]
            models = [self.models[who][name] for name in ids]
            step = manager.open_step(space, ids)
            lens = [self.pending(who, name) for name in ids]
            self.opened(who, step, ids, [model.computed for model in models], lens, 0)
            self.write(who, step.step_id)

    @precondition(resident)
    @rule(data=st.data(), lookahead=st.integers(0, 3), expect=st.booleans(), fill=st.booleans())
    def append(self, data: st.DataObject, lookahead: int, expect: bool, fill: bool) -> None:
        who = self.pick(data, lambda model: not model.swapped)
        ids = self.choose(data, who)
        counts = [data.draw(st.integers(1, 3), "count") for _ in ids]
        models = [self.models[who][name] for name in ids]
        if any(len(model.tokens) + count + lookahead > 64 for model, count in zip(models, counts, strict=True)):
            return
        tokens = [data.draw(TOKENS, "token") for _ in range(sum(counts))]
        lengths = [len(model.tokens) for model in models] if expect else None
        manager, space = self.manager, self.spaces[who]
        if not manager.can_append(space, ids, counts, lookahead):
            self.refused(manager.append, space, ids, tokens, counts, lengths, lookahead)
            return
        self.outdate(who, ids)
        step = manager.append(space, ids, tokens, counts, lengths, lookahead)
        left = list(tokens)
        for model, count in zip(models, counts, strict=True):
            model.tokens += left[:count]
            del left[:count]
        starts = [model.computed for model in models]
        lens = [len(model.tokens) - model.computed for model in models]
        self.opened(who, step, ids, starts, lens, lookahead)
        if expect:
            before = full_state(manager)
            again = manager.append(space, ids, tokens, counts, lengths, lookahead)
            assert (again.step_id, len(again.copies)) == (step.step_id, 0)
            assert again.slot_mapping is step.slot_mapping
            assert full_state(manager) == before
        if fill:
            self.write(who, step.step_id)

    @precondition(resident)
    @rule(data=st.data(), lookahead=st.integers(0, 3), chunked=st.booleans())
    def open_step(self, data: st.DataObject, lookahead: int, chunked: bool) -> None:
        who = self.pick(data, lambda model: not model.swapped)
        ids = [name for name in self.choose(data, who) if self.pending(who, name)]
        models = [self.models[who][name] for name in ids]
        if not ids or any(len(model.tokens) + lookahead > 64 for model in models):
            return
        lens = [self.pending(who, name) for name in ids]
        if chunked:
            lens = [data.draw(st.integers(1, most), "chunk") for most in lens]
        manager, space = self.manager, self.spaces[who]
        if not manager.can_open_step(space, ids, lookahead):
            self.refused(manager.open_step, space, ids, lens, lookahead)
            return
        self.outdate(who, ids)
        step = manager.open_step(space, ids, lens if chunked else None, lookahead)
        self.opened(who, step, ids, [model.computed for model in models], lens, lookahead)

    @precondition(resident)
    @rule(data=st.data(), lookahead=st.integers(0, 3))
    def reopen(self, data: st.DataObject, lookahead: int) -> None:
        """Open a step over tokens of which some may be computed. They are not computed any more."""
        who = self.pick(data, lambda model: not model.swapped)
        ids = [name for name in self.choose(data, who) if 0 < len(self.models[who][name].tokens) <= 64 - lookahead]
        models = [self.models[who][name] for name in ids]
        if not ids:
            return
        starts = [data.draw(st.integers(0, min(one.computed, len(one.tokens) - 1)), "start") for one in models]
        lens = [
            data.draw(st.integers(1, len(one.tokens) - at), "count") for one, at in zip(models, starts, strict=True)
        ]
        before = full_state(self.manager)
        try:
            step = self.manager.reopen(self.spaces[who], ids, starts, lens, lookahead)
        except OutOfBlocksError:
            assert full_state(self.manager) == before
            return
        self.outdate(who, ids)
        for model, start in zip(models, starts, strict=True):
            model.computed = start
        self.opened(who, step, ids, starts, lens, lookahead)

    def pending(self, who: int, name: int) -> int:
        model = self.models[who][name]
        return len(model.tokens) - model.computed

    @precondition(stepping)
    @rule(data=st.data(), last=st.booleans())
    def write_step(self, data: st.DataObject, last: bool) -> None:
        """Write the K/V of a live step, then mark all of its layers, or all but the last."""
        who = self.pick(data, lambda model: model.step > 0)
        steps = sorted({model.step for model in self.models[who].values()} - {0})
        self.write(who, data.draw(st.sampled_from(steps), "step"), last)

    def write(self, who: int, step_id: int, last: bool = True) -> None:
        manager, space, live = self.manager, self.spaces[who], self.steps[who][step_id]
        step = manager.get_step(space, step_id)
        if live.ahead:
            self.raises(FailedPreconditionError, manager.check_layer, space, step_id, 0)
            self.raises(FailedPreconditionError, manager.mark_all_layers, space, step_id)
            return
        if live.written:
            self.raises(LayerWrittenError, manager.check_layer, space, step_id, 0)
            self.raises(LayerWrittenError, manager.mark_all_layers, space, step_id)
            return
        slots = iter(step.slot_mapping.tolist())
        for name, start, stop in zip(live.ids, live.starts, live.stops, strict=True):
            model = self.models[who][name]
            tokens = [*model.tokens, live.unknown[name]] if name in live.unknown else model.tokens
            for position in range(start, stop):
                self.pool[next(slots)] = (model.salt, tuple(tokens[: position + 1]))
        written = space.steps[step_id].written
        for layer in range(self.config.num_layers - (not last)):
            if not written[layer]:
                live.written = layer == self.config.num_layers - 1
                assert manager.mark_layer(space, step_id, layer) == self.commit(who, live)

    def commit(self, who: int, step: LiveStep) -> bool:
        """Record a commit if the step and the one that it follows are complete. Returns whether they are."""
        followed = self.steps[who].get(step.follows)
        if not step.written or step.unknown or (followed and not followed.committed):
            return False
        step.committed = True
        for name, stop in zip(step.ids, step.stops, strict=True):
            self.models[who][name].computed = stop
        if step.follower in self.steps[who]:
            self.commit(who, self.steps[who][step.follower])
        return True

    @precondition(stepping)
    @rule(data=st.data(), lookahead=st.integers(0, 3), fill=st.booleans())
    def follow(self, data: st.DataObject, lookahead: int, fill: bool) -> None:
        """Open a step while another one is not complete: decodes and chunks of the sequences of both and of others."""
        who = self.pick(data, lambda model: model.step > 0)
        follows = data.draw(st.sampled_from(sorted(self.steps[who])), "follows")
        followed = self.steps[who][follows]
        third = followed.follows and not self.steps[who][followed.follows].committed
        if followed.follower or followed.unknown or followed.ahead or third:
            call = functools.partial(self.manager.advance, follows=follows)
            self.raises(FailedPreconditionError, call, self.spaces[who], followed.ids[:1], [0], [1])
            return
        covered = {name: i for i, name in enumerate(followed.ids) if self.models[who][name].step == follows}
        some = data.draw(st.lists(st.sampled_from(sorted(covered)), unique=True), "covered") if covered else []
        ids = list({*some, *self.choose(data, who, most=2)})
        starts, counts, lens, unknown = {}, {}, {}, {}
        for name in ids:
            model = self.models[who][name]
            starts[name] = followed.stops[covered[name]] if name in covered else model.computed
            pending = len(model.tokens) - starts[name]
            if name in covered and not pending:
                counts[name], unknown[name] = 1, data.draw(TOKENS, "sampled")
            elif not pending or (name not in covered and data.draw(st.booleans(), "appends")):
                counts[name] = data.draw(st.integers(1, 3), "count")
            lens[name] = data.draw(st.integers(1, pending + counts.get(name, 0)), "chunk")
        ids = sorted(ids, key=lambda name: name not in counts)
        lengths = {name: len(self.models[who][name].tokens) + counts.get(name, 0) for name in ids}
        if not ids or any(length + lookahead > 64 for length in lengths.values()):
            return
        tokens = {name: [data.draw(TOKENS, "token") for _ in range(counts[name])] for name in counts}
        num_appended: list[int] | None = [counts[name] for name in ids[: len(counts)]]
        if not counts or (max(counts.values()) == 1 and data.draw(st.booleans(), "one each")):
            num_appended = None
        before = full_state(self.manager)
        try:
            step = self.manager.advance(
                self.spaces[who], ids, [token for name in ids[: len(counts)] for token in tokens[name]],
                [lens[name] for name in ids], lookahead, num_appended=num_appended, follows=follows,
            )  # fmt: skip
        except OutOfBlocksError:
            assert full_state(self.manager) == before
            return
        shared = covered.keys() & set(ids)
        self.outdate(who, [name for name in ids if name not in covered])
        if shared:
            self.end(who, followed.follows)
        for name in counts:
            self.models[who][name].tokens += tokens[name] if name not in unknown else []
        self.opened(who, step, ids, [starts[name] for name in ids], [lens[name] for name in ids], 0)
        live = self.steps[who][step.step_id]
        live.unknown = unknown
        if shared:
            live.follows, followed.follower = follows, step.step_id
        for name in ids:
            reach = max(lengths[name], lengths[name] - max(counts.get(name, 0) - 1, 0) + lookahead)
            model = self.models[who][name]
            model.num_blocks = max(model.num_blocks, self.blocks_for(reach))
        if fill:
            self.write(who, step.step_id)

    @precondition(sampling)
    @rule(data=st.data())
    def set_tokens(self, data: st.DataObject) -> None:
        steps = [(who, step_id) for who in (0, 1) for step_id, step in self.steps[who].items() if step.unknown]
        who, step_id = data.draw(st.sampled_from(steps), "step")
        step = self.steps[who][step_id]
        tokens = [step.unknown[name] for name in step.ids if name in step.unknown]
        for name, token in step.unknown.items():
            self.models[who][name].tokens.append(token)
        step.unknown = {}
        assert self.manager.set_tokens(self.spaces[who], step_id, tokens) == self.commit(who, step)
        self.raises(FailedPreconditionError, self.manager.set_tokens, self.spaces[who], step_id, tokens)

    @precondition(resident)
    @rule(data=st.data(), num_steps=st.integers(1, 5))
    def open_ahead(self, data: st.DataObject, num_steps: int) -> None:
        who = self.pick(data, lambda model: not model.swapped)
        ids = self.choose(data, who)
        models = [self.models[who][name] for name in ids]
        if any(len(model.tokens) + num_steps > 64 for model in models):
            return
        manager, space = self.manager, self.spaces[who]
        if any(self.pending(who, name) for name in ids):
            self.raises(FailedPreconditionError, manager.open_ahead, space, ids, num_steps)
            return
        self.go_ahead(who, ids, num_steps, functools.partial(manager.open_ahead, space, ids, num_steps))

    @precondition(going_ahead)
    @rule(data=st.data(), num_steps=st.integers(0, 5), same=st.booleans())
    def commit_ahead(self, data: st.DataObject, num_steps: int, same: bool) -> None:
        """Write some tokens of a step ahead, and perhaps others that nobody wants. Then commit the first ones."""
        steps = [(who, step_id) for who in (0, 1) for step_id, step in self.steps[who].items() if step.ahead]
        who, step_id = data.draw(st.sampled_from(steps), "step")
        live, manager, space = self.steps[who][step_id], self.manager, self.spaces[who]
        models = [self.models[who][name] for name in live.ids]
        counts = [data.draw(st.integers(0, live.ahead), "count") for _ in live.ids]
        if same:
            counts = counts[:1] * len(counts)
        if any(len(model.tokens) + count + num_steps > 64 for model, count in zip(models, counts, strict=True)):
            return
        slots = iter(manager.get_step(space, step_id).slot_mapping.tolist())
        tokens: list[int] = []
        for model, count in zip(models, counts, strict=True):
            added = [data.draw(TOKENS, "token") for _ in range(count)]
            written = [*model.tokens, *added]
            for i in range(live.ahead):
                at = model.computed + i
                self.pool[next(slots)] = (model.salt, tuple(written[: at + 1])) if i < count else None
            tokens += added
        given = None if same else counts
        commit = functools.partial(manager.commit_ahead, space, step_id, tokens, given, num_steps)

        def known() -> None:
            left = list(tokens)
            for model, count in zip(models, counts, strict=True):
                model.tokens += left[:count]
                model.computed += count
                del left[:count]

        if num_steps:
            self.go_ahead(who, live.ids, num_steps, commit, known)
        else:
            assert commit() is None
            known()
            self.end(who, step_id)

    def go_ahead(
        self, who: int, ids: list[int], num_steps: int, call: Callable[[], StepPlan | None],
        known: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Open a step ahead, if there are enough blocks. `known` records what the call makes known."""
        before = full_state(self.manager)
        try:
            step = call()
        except OutOfBlocksError:
            assert full_state(self.manager) == before
            return
        assert step is not None
        self.outdate(who, ids)
        known()
        starts = [self.models[who][name].computed for name in ids]
        self.opened(who, step, ids, starts, [num_steps] * len(ids), num_steps)
        self.steps[who][step.step_id].ahead = num_steps

    @precondition(lambda self: any(self.stale))
    @rule(data=st.data(), who=st.integers(0, 1))
    def use_stale_step(self, data: st.DataObject, who: int) -> None:
        if self.stale[who]:
            step_id = data.draw(st.sampled_from(self.stale[who]), "step")
            self.raises(StaleStepError, self.manager.mark_layer, self.spaces[who], step_id, 0)

    def raises(self, error: type[Exception], call: Any, *arguments: Any) -> None:
        before = full_state(self.manager)
        try:
            call(*arguments)
        except error:
            assert full_state(self.manager) == before
        else:
            raise AssertionError(f"{call.__name__} did not raise {error.__name__}")

    @precondition(resident)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        who = self.pick(data, lambda model: not model.swapped)
        parents = self.choose(data, who, most=2)
        parents += parents[:1]
        children = list(range(self.next_id, self.next_id + len(parents)))
        if self.manager.stats().sequences + len(parents) > self.config.max_sequences:
            self.refused(self.manager.fork, self.spaces[who], parents, children)
            return
        self.next_id += len(parents)
        self.outdate(who, parents)
        self.manager.fork(self.spaces[who], parents, children)
        for parent, child in zip(parents, children, strict=True):
            model = self.models[who][parent]
            self.models[who][child] = Model(list(model.tokens), model.computed, model.salt, model.num_blocks)

    @precondition(resident)
    @rule(data=st.data())
    def rearrange(self, data: st.DataObject) -> None:
        who = self.pick(data, lambda model: not model.swapped)
        ids = self.choose(data, who, most=4)
        parents = [data.draw(st.sampled_from(ids), "parent") for _ in ids]
        moved = [(name, parent) for name, parent in zip(ids, parents, strict=True) if name != parent]
        self.outdate(who, [name for pair in moved for name in pair])
        self.manager.rearrange(self.spaces[who], ids, parents)
        models = {name: self.models[who][parent] for name, parent in moved}
        for name, model in models.items():
            num_blocks = self.blocks_for(len(model.tokens))
            self.models[who][name] = Model(list(model.tokens), model.computed, model.salt, num_blocks)

    @precondition(resident)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        who = self.pick(data, lambda model: not model.swapped)
        ids = self.choose(data, who)
        lengths = [data.draw(st.integers(0, len(self.models[who][name].tokens)), "length") for name in ids]
        self.outdate(who, ids)
        self.manager.truncate(self.spaces[who], ids, lengths)
        for name, length in zip(ids, lengths, strict=True):
            model = self.models[who][name]
            del model.tokens[length:]
            model.computed = min(model.computed, length)
            model.num_blocks = self.blocks_for(length)

    @precondition(resident)
    @rule(data=st.data(), both=st.booleans())
    def free(self, data: st.DataObject, both: bool) -> None:
        who = self.pick(data, lambda model: not model.swapped)
        ids = self.choose(data, who) + (self.choose(data, who, swapped=True) if both else [])
        self.outdate(who, ids)
        self.manager.free(self.spaces[who], ids)
        for name in ids:
            del self.models[who][name]

    @precondition(resident)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        who = self.pick(data, lambda model: not model.swapped)
        ids = self.choose(data, who)
        manager, space = self.manager, self.spaces[who]
        if not manager.can_swap_out(space, ids):
            self.refused(manager.swap_out, space, ids)
            return
        self.outdate(who, ids)
        plan = manager.swap_out(space, ids)
        self.copy(self.pool, self.swap_pool, plan.src.tolist(), plan.dst.tolist())
        assert len(set(plan.src.tolist())) == len(plan) == len(set(plan.dst.tolist()))
        for name in ids:
            self.models[who][name].swapped = True

    @precondition(swapped)
    @rule(data=st.data(), lookahead=st.integers(0, 3))
    def swap_in(self, data: st.DataObject, lookahead: int) -> None:
        who = self.pick(data, lambda model: model.swapped)
        ids = self.choose(data, who, swapped=True)
        models = [self.models[who][name] for name in ids]
        if any(len(model.tokens) + lookahead > 64 for model in models):
            return
        manager, space = self.manager, self.spaces[who]
        if manager.can_swap_in(space, ids, lookahead) is not AllocStatus.OK:
            self.refused(manager.swap_in, space, ids, lookahead)
            return
        plan = manager.swap_in(space, ids, lookahead)
        self.copy(self.swap_pool, self.pool, plan.src.tolist(), plan.dst.tolist())
        for model in models:
            model.swapped = False
            model.num_blocks = max(model.num_blocks, self.blocks_for(len(model.tokens) + lookahead))

    @precondition(resident)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        """Pin the prompt of one of the sequences, from any client."""
        who = self.pick(data, lambda model: not model.swapped)
        model = self.models[who][self.choose(data, who, most=1)[0]]
        if not model.tokens:
            return
        prompt, salt, who = model.tokens, model.salt, data.draw(st.integers(0, 1), "pinned by")
        ttl_s = data.draw(st.sampled_from([1.0, 5.0]), "ttl_s")
        known = self.manager.match_prefix(prompt, salt)
        try:
            pin = self.manager.pin(self.spaces[who], prompt, salt, ttl_s=ttl_s)
        except NotComputedError:
            assert known == 0
        except QuotaExceededError:
            assert known > 0
        else:
            assert pin.num_tokens == known == pin.num_blocks * self.config.block_size
            self.pins.append((who, pin.pin_id, self.now + ttl_s))

    @precondition(pinning)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        who, pin_id, deadline = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1), "pin"))
        try:
            self.manager.unpin(self.spaces[who], pin_id)
        except UnknownPinError:
            assert deadline <= self.now
        else:
            assert deadline > self.now

    @precondition(pinning)
    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(findable)
    @rule()
    def reset(self) -> None:
        self.manager.reset_prefix_cache()

    @rule(who=st.integers(0, 1))
    @precondition(lambda self: self.manager.stats().free_blocks == 0)
    def close(self, who: int) -> None:
        assert self.manager.close_namespace(self.spaces[who]) == len(self.models[who])
        self.pins = [pin for pin in self.pins if pin[0] != who]
        self.spaces[who], self.models[who], self.stale[who] = self.open_namespace(who), {}, []
        self.steps[who] = {}

    @precondition(resident)
    @rule(data=st.data())
    def common_prefix(self, data: st.DataObject) -> None:
        who = self.pick(data, lambda model: not model.swapped)
        ids = self.choose(data, who)
        described = self.manager.describe(self.spaces[who], ids, include_blocks=True)
        tables = [[] if info.block_ids is None else info.block_ids.tolist() for info in described]
        full = min(info.num_computed // self.config.block_size for info in described)
        shared = 0
        while shared < full and len({table[shared] for table in tables}) == 1:
            shared += 1
        assert self.manager.common_prefix_blocks(self.spaces[who], ids) == shared

    # Invariants

    @invariant()
    def keeps_what_is_guaranteed(self) -> None:
        if hasattr(self, "manager"):
            device = self.manager.device
            assert device.num_free + len(device.evictable) >= self.missing(0) + self.missing(1)

    @invariant()
    def is_whole(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check_integrity()

    @invariant()
    def tells_what_can_be_found(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.replica.follow()
        assert self.replica.blocks.keys() == self.manager.device.index.blocks.keys()
        size = self.config.block_size
        for model in (model for models in self.models for model in models.values()):
            extra = extra_keys_by_block(model.salt, "salt", size, self.config.max_sequence_tokens)
            parent = None
            for entry in range(model.computed // size):
                tokens = np.array(model.tokens[entry * size : (entry + 1) * size], "<i4").tobytes()
                chain_hash = block_hash(parent or root_hash(size), tokens, extra.get(entry, b""))
                assert self.replica.blocks.get(chain_hash, (parent, tokens)) == (parent, tokens)
                parent = chain_hash

    @invariant()
    def is_as_the_model(self) -> None:
        if not hasattr(self, "manager"):
            return
        for space, models in zip(self.spaces, self.models, strict=True):
            described = self.manager.describe(space, include_tokens=True, include_blocks=True)
            assert {info.sequence_id for info in described} == models.keys()
            for info in described:
                self.check_sequence(info, models[info.sequence_id])

    def check_sequence(self, info: Any, model: Model) -> None:
        assert (info.length, info.num_computed) == (len(model.tokens), model.computed)
        assert (info.num_blocks, info.swapped) == (model.num_blocks, model.swapped)
        assert info.token_ids.tolist() == model.tokens
        pool, size, blocks = self.swap_pool if model.swapped else self.pool, self.config.block_size, info.block_ids
        for position in range(model.computed):
            content = pool[int(blocks[position // size]) * size + position % size]
            assert content is not None
            keys, tokens = content
            assert tokens == tuple(model.tokens[: position + 1])
            assert self.keys_until(keys, position) == self.keys_until(model.salt, position)

    def keys_until(self, salt: tuple[tuple[int, bytes], ...], position: int) -> list[tuple[int, bytes]]:
        """Return the extra keys up to the block of a position."""
        end = (position // self.config.block_size + 1) * self.config.block_size
        return [key for key in salt if key[0] < end]


def run_quick(max_examples: int = 600) -> None:
    """Run the machine with the settings under which it detects the mutants of test_mutants."""
    quick = settings(
        max_examples=max_examples,
        stateful_step_count=40,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(BlockManagerMachine, settings=quick)
