"""Operations of a block manager that may end at any line, over simulated pools of K/V.

Each slot of the pools holds a number for all tokens and extra keys up to it. After every operation, `Rig` recovers from
the kept memory at each line of it, and compares with the sequences before and after the operation. The operation may
then go on from one of these points, as after a crash.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from crashes import KeptManager, Key, Seen, State, View, pins, torn, traced, views

from kvservice.blocks import NUM_COUNTERS, BlockCopies, BlocksConfig, SessionNamespace, chain_hashes
from kvservice.errors import KVServiceError

CONFIG = BlocksConfig(
    num_blocks=18, block_size=2, num_layers=2, num_swap_blocks=12, watermark=0.0, max_sequences=9,
    max_sequence_tokens=20, max_namespaces=4,
)  # fmt: skip
Array = np.ndarray[Any, Any]
Views = dict[Key, View]
SALTS: list[tuple[tuple[int, bytes], ...]] = [(), (), ((0, b"tenant"),), ((3, b"image"), (0, b"tenant"))]


class Rig:
    """A manager that two clients and a scheduler use. `counts` counts operations, `seen` is what they ran,
    `seen_in_recovery` what recoveries ran, and `num_checked` the states from which another manager recovered."""

    def __init__(self, seed: int, *, crash: float = 0.0, tear: bool = True) -> None:
        """`crash` is the probability that an operation goes on from a random line of it. `tear` says to check states
        within lines, too."""
        self.random, self.rng = random.Random(seed), np.random.default_rng(seed)
        self.crash, self.tear = crash, tear
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self.seen, self.seen_in_recovery = Seen(), Seen()
        self.num_checked = self.num_lost = self.num_crashes = 0
        self.manager = self.make(None)
        self.open = {1, 2}
        self.spaces = {number: self.manager.open_namespace(number) for number in (1, 2)}
        self.pool = np.zeros(CONFIG.num_blocks * CONFIG.block_size, np.int64)
        self.swap_pool = np.zeros(CONFIG.num_swap_blocks * CONFIG.block_size, np.int64)
        # The K/V of each full block with a hash that was ever computed, and its tokens.
        self.contents: dict[bytes, tuple[list[int], list[int]]] = {}
        self.next_id = 1
        # The processes that can write to the pool and live, and the blocks that waited for one before the operation.
        self.living: set[int] = set()
        self.waited = self.manager.quarantine.held.copy()

    def make(self, state: State | None) -> KeptManager:
        return KeptManager(CONFIG, lambda: self.now, state)

    # Operations that may end at any line

    def during(self, name: str, call: Callable[[], Any], touched: Iterable[Key] = (), closing: int = 0) -> Any:
        """Run an operation, and check the states at each line of it. Returns None if it was refused, or if the rig went
        on from one of its lines."""
        before, index, kept_pins = views(self.manager), dict(self.manager.device.index.blocks), pins(self.manager)
        lost, self.waited = self.lost(self.manager), self.manager.quarantine.held.copy()
        try:
            result, states = traced(self.manager, call, self.seen)
        except KVServiceError:
            assert views(self.manager) == before
            return None
        self.counts[name] += 1
        after = views(self.manager)
        self.record(after.values())
        stays = index.items() & self.manager.device.index.blocks.items()
        same_pins = {key: blocks for key, blocks in kept_pins.items() if pins(self.manager).get(key) == blocks}
        expected = (before, after, frozenset(touched), dict(stays), same_pins, lost)
        mixed = torn(states, self.manager.memory.items(), self.rng) if self.tear else []
        for state in (*states, *mixed):
            self.check(state, *expected, self.open)
            if closing:
                self.check(state, *expected, self.open - {closing})
        if self.random.random() < self.crash:
            self.num_crashes += 1
            self.go_on_from(self.random.choice(states + mixed))
            return None
        return result

    def check(
        self, state: State, before: Views, after: Views, touched: frozenset[Key], index: dict[bytes, int],
        kept_pins: dict[Key, list[int]], lost_before: set[Key], open_numbers: set[int],
    ) -> KeptManager:  # fmt: skip
        """Recover from a state of kept memory. Sequences that were not touched are there, bit by bit; touched ones are
        as before, as after, or lost. No block that can be found has other content than its hash says."""
        self.num_checked += 1
        made = self.recover(state, open_numbers)
        made.check_integrity()
        assert made.quarantine.held[self.waited & self.manager.quarantine.held].all()
        found, lost = views(made), self.lost(made)
        assert not lost & found.keys()
        for key in before.keys() | after.keys() | lost_before | lost:
            if key[0] not in open_numbers:
                assert key not in found
            elif key in lost:
                # A sequence of a scheduler ends with the process. If its id is that of a sequence that was lost, it is
                # lost again until the operation that made it is kept as a whole.
                ends = key in after and after[key].scheduled
                assert key in touched or key in lost_before or ends
            else:
                allowed = (before.get(key), after.get(key)) if key in touched else (before.get(key),)
                assert found.get(key) in [None if one is None or one.scheduled else one for one in allowed]
                assert key not in lost_before or key in found or key in touched
        assert found.keys() <= before.keys() | after.keys()
        self.check_content(made, found)
        cached = made.device.index.blocks
        assert index.items() <= cached.items()
        assert {key: at for key, at in kept_pins.items() if key[0] in open_numbers}.items() <= pins(made).items()
        for number, space in self.spaces.items():
            if number in open_numbers:
                mine = next(one for one in made.namespaces if one.number == number)
                assert space.last_step_id - 1 <= mine.last_step_id <= space.last_step_id
                assert space.last_pin_id - 1 <= mine.last_pin_id <= space.last_pin_id
                assert not mine.steps
        return made

    def recover(self, state: State, open_numbers: set[int]) -> KeptManager:
        made = self.make(state)
        recovery = made.recover({number: [0] * NUM_COUNTERS for number in open_numbers}, living=self.living)
        assert recovery.num_sequences == len(views(made))
        assert recovery.num_pins == len(pins(made))
        return made

    def check_content(self, made: KeptManager, found: Views) -> None:
        """Check the K/V of computed tokens, and of blocks in the prefix index."""
        size, device = CONFIG.block_size, made.device
        for one in found.values():
            pool = self.swap_pool if one.swapped else self.pool
            slots = [one.blocks[at // size] * size + at % size for at in range(one.num_computed)]
            assert pool[slots].tolist() == content(one)[: one.num_computed]
        for chain_hash, block in device.index.blocks.items():
            kv, tokens = self.contents[chain_hash]
            assert self.pool[block * size : (block + 1) * size].tolist() == kv
            assert device.token_ids[block].tolist() == tokens

    def quiet(self) -> None:
        """Check that a restart between operations changes nothing except for sequences of a scheduler."""
        _, states = traced(self.manager, self.manager.end_operation, self.seen)
        now, index = views(self.manager), dict(self.manager.device.index.blocks)
        arguments = now, now, frozenset[Key](), index, pins(self.manager), self.lost(self.manager), self.open
        made = [self.check(state, *arguments) for state in states[1:] or states][-1]
        if not any(one.scheduled for one in now.values()):
            queues = [one.device.evictable.blocks().tolist() for one in (self.manager, made)]
            assert queues[0] == queues[1]
            assert [list(space.rows) for space in self.ordered(self.manager)] == [
                list(space.rows) for space in self.ordered(made)
            ]

    def ordered(self, manager: KeptManager) -> list[SessionNamespace]:
        return sorted(manager.namespaces, key=lambda space: space.number)

    def go_on_from(self, state: State) -> None:
        """Restart from a state of kept memory. That may end at any line, too."""
        made = self.make(state)
        opened = {number: [0] * NUM_COUNTERS for number in self.open}
        _, states = traced(made, lambda: made.recover(opened, living=self.living), self.seen_in_recovery)
        expected = views(made), self.lost(made), pins(made), made.device.index.blocks
        for one in (*states, *(torn(states, made.memory.items(), self.rng) if self.tear else ())):
            self.num_checked += 1
            again = self.recover(one, self.open)
            again.check_integrity()
            assert (views(again), self.lost(again), pins(again), again.device.index.blocks) == expected
            assert np.array_equal(again.quarantine.held, made.quarantine.held)
        self.manager = made
        self.spaces = {space.number: space for space in made.namespaces}
        self.num_lost += len(self.lost(made))
        self.check_content(made, views(made))

    def lost(self, manager: KeptManager) -> set[Key]:
        return {(space.number, name) for space in manager.namespaces for name in space.lost}

    def record(self, found: Iterable[View]) -> None:
        """Remember the content of all full blocks by hash."""
        size = CONFIG.block_size
        for one in found:
            tokens, kv = np.array(one.tokens, np.int32), content(one)
            for i, chain_hash in enumerate(chain_hashes(tokens, dict(one.extra), size)):
                part = slice(i * size, (i + 1) * size)
                self.contents[chain_hash] = kv[part], list(one.tokens[part])

    # Copies, which the device performs some time after the operation

    def copy(
        self, src: Array, dst: Array, src_pool: Array, dst_pool: Array, unfinished: Array, touched: set[Key]
    ) -> None:
        """Let the device copy blocks: they are unfinished from submission to completion."""
        before, size = views(self.manager), CONFIG.block_size
        index = self.manager.device.index.blocks
        stays = {
            chain_hash: block for chain_hash, block in index.items() if block not in dst or dst_pool is not self.pool
        }
        no_pins: dict[Key, list[int]] = {}
        expected = before, before, frozenset(touched), stays, no_pins, self.lost(self.manager), self.open
        read = src_pool.reshape(-1, size)[src].copy()
        np.add.at(unfinished, dst, 1)
        self.manager.unsubmitted[dst if dst_pool is self.pool else dst[:0]] = False
        self.manager.end_operation()
        self.check(self.manager.kept_state(), *expected)
        dst_pool.reshape(-1, size)[dst] = read
        np.subtract.at(unfinished, dst, 1)
        self.check(self.manager.kept_state(), before, before, frozenset(), dict(index), *expected[4:])

    def copy_on_write(self, copies: BlockCopies) -> None:
        if len(copies):
            holders = self.holders(copies.dst, swapped=False)
            self.copy(copies.src, copies.dst, self.pool, self.pool, self.manager.unfinished_device, holders)

    def holders(self, blocks: Array, *, swapped: bool) -> set[Key]:
        """Return the sequences that hold one of these blocks."""
        wanted = set(blocks.tolist())
        return {key for key, one in views(self.manager).items() if one.swapped == swapped and wanted & set(one.blocks)}


def content(one: View) -> list[int]:
    """Return the simulated K/V of each token: a number for all tokens up to it, and the extra keys up to its block."""
    size = CONFIG.block_size
    keys = [tuple(pair for pair in one.extra if pair[0] <= block) for block in range(-(-len(one.tokens) // size))]
    return [hash((keys[at // size], one.tokens[: at + 1])) for at in range(len(one.tokens))]
