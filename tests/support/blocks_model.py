"""The model of the state machine in blocks_machine.py: what it expects of a block manager, and what it checks after
each rule.

The K/V of a token depends on all tokens before it, so the simulated pool holds, for each slot, the whole prefix that
was written there. After every rule the slots of each sequence's table must hold its computed tokens. A missed copy, a
block that is shared too early, a slot with two owners or a stale cached block all show as wrong content.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
from blocks_calls import mark_layer
from event_replica import EventReplica
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant
from manager_state import full_state

from kvservice.blocks import (
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
    OutOfBlocksError,
    QuotaExceededError,
)

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


class CountedTables:
    """The native tables of a manager, and how many decode steps they have appended."""

    def __init__(self, tables: Any) -> None:
        self._tables, self.num_decodes = tables, 0
        self.plan_decode, self.start = tables.plan_decode, tables.start
        self.create, self.fork, self.full_blocks = tables.create, tables.fork, tables.full_blocks

    def append(self, *arguments: Any) -> None:
        self.num_decodes += 1
        self._tables.append(*arguments)


class ModelledBlocks(RuleBasedStateMachine):
    """Two clients of one small pool, and the model of it. The rules record in the model what they have done."""

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
        self.tables: Any = CountedTables(self.manager.step_tables)
        self.manager.step_tables = self.tables  # type: ignore[assignment]  # it stands for them
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

    def raises(self, error: type[Exception], call: Any, *arguments: Any) -> None:
        before = full_state(self.manager)
        try:
            call(*arguments)
        except error:
            assert full_state(self.manager) == before
        else:
            raise AssertionError(f"{call.__name__} did not raise {error.__name__}")

    def owns_next(self, who: int, name: int) -> bool:
        """Return whether a sequence has no pending tokens, and nobody else has the block of its next token."""
        [info] = self.manager.describe(self.spaces[who], [name], include_blocks=True)
        entry = info.length // self.config.block_size
        if info.num_computed < info.length or entry == info.num_blocks:
            return bool(info.num_computed == info.length)
        block, device = int(info.block_ids[entry]), self.manager.device  # type: ignore[index]  # they are included
        return bool(device.ref_count[block] == 1 and not device.indexed[block])

    def pending(self, who: int, name: int) -> int:
        model = self.models[who][name]
        return len(model.tokens) - model.computed

    def write(self, who: int, step_id: int, last: bool = True) -> None:
        manager, space, live = self.manager, self.spaces[who], self.steps[who][step_id]
        step = space.live_step(step_id).plan
        if live.ahead:
            self.raises(FailedPreconditionError, manager.check_part, space, step_id, 0, 0, 0)
            self.raises(FailedPreconditionError, manager.mark_all_layers, space, step_id)
            return
        if live.written:
            self.raises(LayerWrittenError, manager.check_part, space, step_id, 0, 0, 0)
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
                assert mark_layer(manager, space, step_id, layer) == self.commit(who, live)

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
