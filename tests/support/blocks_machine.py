"""The block manager, compared with a model that knows the tokens of each sequence, over a pool of simulated K/V: the
rules. blocks_model.py has the model and the invariants."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis.strategies as st
import numpy as np
from blocks_calls import can_allocate
from blocks_model import Model, ModelledBlocks
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import precondition, rule, run_state_machine_as_test
from manager_state import full_state

from kvservice.blocks import AllocationRequest, AllocStatus
from kvservice.errors import (
    FailedPreconditionError,
    NotComputedError,
    OutOfBlocksError,
    QuotaExceededError,
    StaleStepError,
    UnknownPinError,
)

TOKENS = st.integers(0, 1)
SALTS = st.sampled_from([(), ((0, b"tenant"),), ((3, b"image"),)])


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


class BlockManagerMachine(ModelledBlocks):
    """The operations of the clients, with random arguments. `num_decodes` counts the appends of all machines that went
    the native way."""

    num_decodes = 0

    @rule(data=st.data(), who=st.integers(0, 1), lookahead=st.integers(0, 3), fill=st.booleans())
    def allocate(self, data: st.DataObject, who: int, lookahead: int, fill: bool) -> None:
        prompts = data.draw(st.lists(st.lists(TOKENS, min_size=1, max_size=14), min_size=1, max_size=3), "prompts")
        salts = [data.draw(SALTS, "salt") for _ in prompts]
        requests = [
            AllocationRequest(self.next_id + i, prompt, salt, lookahead)
            for i, (prompt, salt) in enumerate(zip(prompts, salts, strict=True))
        ]
        manager, space = self.manager, self.spaces[who]
        if can_allocate(manager, space, requests) is not AllocStatus.OK:
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
    @rule(data=st.data(), lookahead=st.integers(0, 3), expect=st.booleans(), fill=st.booleans(), decode=st.booleans())
    def append(self, data: st.DataObject, lookahead: int, expect: bool, fill: bool, decode: bool) -> None:
        """Append some tokens, or with `decode` one to each sequence, with the arguments of the native way."""
        who = self.pick(data, lambda model: not model.swapped)
        ids = self.choose(data, who)
        if decode:
            ids = [name for name in ids if not self.pending(who, name)] or ids
            lookahead = 0
        counts = [1 if decode else data.draw(st.integers(1, 3), "count") for _ in ids]
        models = [self.models[who][name] for name in ids]
        if any(len(model.tokens) + count + lookahead > 64 for model, count in zip(models, counts, strict=True)):
            return
        tokens = [data.draw(TOKENS, "token") for _ in range(sum(counts))]
        lengths = [len(model.tokens) for model in models] if expect else None
        given: tuple[Any, ...] = (tokens, counts, lengths, lookahead)
        if decode:
            given = (np.array(tokens, np.int32), None, None if lengths is None else np.array(lengths))
        manager, space = self.manager, self.spaces[who]
        if not manager.can_append(space, ids, None if decode else counts, lookahead):
            self.refused(manager.append, space, ids, *given)
            return
        self.outdate(who, ids)
        is_native, num_decodes = decode and all(self.owns_next(who, name) for name in ids), self.tables.num_decodes
        step = manager.append(space, ids, *given)
        assert self.tables.num_decodes - num_decodes == is_native
        BlockManagerMachine.num_decodes += is_native
        left = list(tokens)
        for model, count in zip(models, counts, strict=True):
            model.tokens += left[:count]
            del left[:count]
        starts = [model.computed for model in models]
        lens = [len(model.tokens) - model.computed for model in models]
        self.opened(who, step, ids, starts, lens, lookahead)
        if expect:
            before = full_state(manager)
            again = manager.append(space, ids, *given)
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
        before = full_state(manager)
        try:
            step = manager.open_step(space, ids, lens if chunked else None, lookahead)
        except OutOfBlocksError:
            assert full_state(manager) == before
            return
        self.outdate(who, ids)
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

    @precondition(stepping)
    @rule(data=st.data(), last=st.booleans())
    def write_step(self, data: st.DataObject, last: bool) -> None:
        """Write the K/V of a live step, then mark all of its layers, or all but the last."""
        who = self.pick(data, lambda model: model.step > 0)
        steps = sorted({model.step for model in self.models[who].values()} - {0})
        self.write(who, data.draw(st.sampled_from(steps), "step"), last)

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
        slots = iter(space.live_step(step_id).plan.slot_mapping.tolist())
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

    @precondition(lambda self: any(self.stale))
    @rule(data=st.data(), who=st.integers(0, 1))
    def use_stale_step(self, data: st.DataObject, who: int) -> None:
        if self.stale[who]:
            step_id = data.draw(st.sampled_from(self.stale[who]), "step")
            self.raises(StaleStepError, self.manager.check_part, self.spaces[who], step_id, 0, 0, 0)

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
