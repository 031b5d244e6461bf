"""Random operations of two clients and a scheduler on a `Rig`, each of which may end at any line."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
from crash_rig import CONFIG, SALTS, Rig, content
from crashes import Key, View, views

from kvservice.blocks import AllocationRequest, SessionNamespace, StepPlan, chain_hashes, extra_keys_by_block
from kvservice.errors import KVServiceError


class Operations(Rig):
    """`one` performs a random operation."""

    def one(self) -> None:
        numbers = sorted(self.open)
        if not numbers:
            return self.open_namespace()
        number = self.random.choice(numbers)
        weights = {
            self.allocate: 4, self.fill: 5, self.append: 4, self.advance: 3, self.follow: 2, self.reopen: 2,
            self.truncate: 2, self.fork: 3, self.rearrange: 2, self.swap_out: 2, self.swap_in: 3, self.free: 3,
            self.pin: 5, self.unpin: 3, self.expire: 2, self.reset: 1, self.touch: 1, self.close: 2,
            self.allocate_found: 1, self.restart_now: 1, self.load: 3, self.ahead: 3, self.begin_writing: 3,
            self.take_over: 1, self.end_writing: 2,
        }  # fmt: skip
        self.random.choices(list(weights), list(weights.values()))[0](number)
        self.quiet()
        if len(self.open) < 2 and self.random.random() < 0.5:
            self.open_namespace()
        return None

    def some(self, number: int, *, swapped: bool = False, most: int = 3) -> list[int]:
        """Return some of a client's sequences."""
        ids = [key[1] for key, one in views(self.manager).items() if key[0] == number and one.swapped == swapped]
        return self.random.sample(ids, min(len(ids), self.random.randint(1, most)))

    def keys(self, number: int, ids: list[int]) -> list[Key]:
        return [(number, name) for name in ids]

    def open_namespace(self) -> None:
        number = next(number for number in range(1, 9) if number not in self.open)
        self.spaces[number] = self.manager.open_namespace(number)
        self.open.add(number)

    def prompt(self) -> list[int]:
        return [self.random.randint(0, 1) for _ in range(self.random.randint(1, 9))]

    def new_ids(self, number: int, count: int) -> list[int]:
        """Return unused ids, sometimes those of lost sequences."""
        lost = sorted(self.spaces[number].lost)[:count] if self.random.random() < 0.7 else []
        self.next_id += count + 1
        return [*lost, *range(self.next_id - count, self.next_id - len(lost))]

    def allocate(self, number: int) -> None:
        ids = self.new_ids(number, self.random.randint(1, 3))
        requests = [AllocationRequest(name, self.prompt(), self.random.choice(SALTS)) for name in ids]
        space = self.spaces[number]
        self.during("allocate", lambda: self.manager.allocate(space, requests), self.keys(number, ids))

    def allocate_found(self, number: int) -> None:
        """A scheduler's sequences, which are freed by a restart. Here their scheduler frees them at last."""
        self.next_id += 1
        name, tokens = self.next_id, np.array(self.prompt(), np.int32)
        extra = extra_keys_by_block(self.random.choice(SALTS), "keys", CONFIG.block_size, 64)
        found = self.manager.find_prompt(name, tokens, extra, chain_hashes(tokens, extra, CONFIG.block_size))
        space = self.spaces[number]
        made = self.during(
            "allocate_found", lambda: self.manager.allocate_found(space, [found]), self.keys(number, [name])
        )
        assert made is None or views(self.manager)[number, name].scheduled

    def fill(self, number: int) -> None:
        """Compute pending tokens of sequences, perhaps only some."""
        ids = [name for name in self.some(number) if self.pending(number, name)]
        if ids:
            lens = [self.random.randint(1, self.pending(number, name)) for name in ids]
            space = self.spaces[number]
            counts = lens if self.random.random() < 0.3 else None
            step = self.during(
                "open_step",
                lambda: self.manager.open_step(space, ids, counts, self.lookahead()),
                self.keys(number, ids),
            )
            self.opened(space, step)

    def pending(self, number: int, name: int) -> int:
        states = self.manager.sequences.states[self.spaces[number].rows[name]]
        return int(states[0] - states[1])

    def lookahead(self) -> int:
        return self.random.choice([0, 0, 0, 3])

    def append(self, number: int) -> None:
        if ids := self.some(number):
            counts = [self.random.randint(1, 3) for _ in ids] if self.random.random() < 0.5 else None
            tokens = [self.random.randint(0, 1) for _ in range(sum(counts) if counts else len(ids))]
            # A list is not planned in native code.
            given: Any = np.array(tokens, np.int32) if self.random.random() < 0.7 else tokens
            space, lookahead = self.spaces[number], self.lookahead()
            step = self.during(
                "append", lambda: self.manager.append(space, ids, given, counts, None, lookahead),
                self.keys(number, ids),
            )  # fmt: skip
            self.opened(space, step)

    def advance(self, number: int) -> None:
        if ids := self.some(number):
            space, decodes = self.spaces[number], self.random.randint(0, len(ids))
            counts = [self.random.randint(1, 2) if i < decodes else 0 for i in range(len(ids))]
            lens = [self.pending(number, name) + count for name, count in zip(ids, counts, strict=True)]
            if all(lens):
                tokens = [self.random.randint(0, 1) for _ in range(sum(counts))]
                appended = counts[:decodes] if sum(counts) > decodes else None
                lookahead = self.lookahead()
                step = self.during(
                    "advance",
                    lambda: self.manager.advance(space, ids, tokens, lens, lookahead, num_appended=appended),
                    self.keys(number, ids),
                )
                self.opened(space, step)

    def follow(self, number: int) -> None:
        """Open a step, and one that follows it. Their layers are written, and then the tokens become known."""
        space, ids = self.spaces[number], [name for name in self.some(number) if self.pending(number, name)]
        keys = self.keys(number, ids)
        first = self.during("open_step", lambda: self.manager.open_step(space, ids), keys) if ids else None
        if first is None:
            return
        self.copy_on_write(first.copies)
        zeros, ones = [0] * len(ids), [1] * len(ids)
        second = self.during(
            "follow", lambda: self.manager.advance(space, ids, zeros, ones, follows=first.step_id), keys
        )
        if second is None:
            return
        self.copy_on_write(second.copies)
        self.write(space, first)
        if second.step_id not in space.steps or space is not self.spaces.get(number):
            return
        tokens = [self.random.randint(0, 1) for _ in ids]
        if self.during("set_tokens", lambda: self.manager.set_tokens(space, second.step_id, tokens), keys) is not None:
            self.manager.end_operation()
            self.write(space, second)

    def ahead(self, number: int) -> None:
        """Open a step ahead, and commit some of its tokens, or several times."""
        space, ids = self.spaces[number], [name for name in self.some(number) if not self.pending(number, name)]
        keys, num_steps = self.keys(number, ids), self.random.randint(1, 4)
        if not ids:
            return
        lengths = [sequence.length for sequence in self.manager.describe(space, ids)]
        step = self.during("open_ahead", lambda: self.manager.open_ahead(space, ids, num_steps, lengths), keys)
        while step is not None:
            self.copy_on_write(step.copies)
            self.manager.end_operation()
            step = self.commit_ahead(space, step, num_steps)

    def commit_ahead(self, space: SessionNamespace, step: StepPlan, num_steps: int) -> StepPlan | None:
        """Write the K/V of a step ahead, commit some of its tokens, and return the next step, if there is one."""
        ids, found = step.sequence_ids.tolist(), views(self.manager)
        counts = [self.random.randint(0, num_steps) for _ in ids]
        tokens = [[self.random.randint(0, 1) for _ in range(count)] for count in counts]
        slots = iter(step.slot_mapping.tolist())
        for name, added in zip(ids, tokens, strict=True):
            one = found[space.number, name]
            kv = content(dataclasses.replace(one, tokens=(*one.tokens, *added)))[len(one.tokens) :]
            for i in range(num_steps):
                self.pool[next(slots)] = kv[i] if i < len(kv) else -1
        flat, more = [token for added in tokens for token in added], self.random.choice([0, num_steps])
        next_step: StepPlan | None = self.during(
            "commit_ahead",
            lambda: self.manager.commit_ahead(space, step.step_id, flat, counts, more),
            self.keys(space.number, ids),
        )
        self.manager.end_operation()
        return next_step

    def opened(self, space: SessionNamespace, step: StepPlan | None) -> None:
        """Let the device make the copies of a new step, and write the step."""
        if step is not None:
            self.copy_on_write(step.copies)
            if self.random.random() < 0.8:
                self.write(space, step)

    def write(self, space: SessionNamespace, step: StepPlan) -> None:
        """Write the layers of a step. The last write is sometimes still in progress when the step commits."""
        number = space.number
        self.manager.end_operation()
        late = self.random.random() < 0.3
        blocks = np.unique(step.slot_mapping // CONFIG.block_size)
        holders = self.holders(blocks, swapped=False)
        if late:
            self.pool[step.slot_mapping] = -1
            np.add.at(self.manager.unfinished_device, blocks, 1)
        else:
            self.write_kv(number, step)

        def mark() -> None:
            """Mark all layers: one by one, in two parts where that is possible, at once, or as a lane does."""
            last, way, count = CONFIG.num_layers - 1, self.random.randint(0, 3), len(step.slot_mapping)
            if way == 0:
                return self.manager.mark_all_layers(space, step.step_id)
            if way == 1 and (written := self.manager.written_layers(space, step.step_id)) is not None:
                written[:] = b"\1" * CONFIG.num_layers
                self.manager.commit_written(space, step.step_id)
                return None
            for layer in range(CONFIG.num_layers):
                for first, num_tokens in ((0, count // 2), (count // 2, 0)) if way == 2 and count > 1 else ((0, 0),):
                    part = self.manager.check_part(space, step.step_id, layer, first, num_tokens)
                    whole = num_tokens == 0
                    assert self.manager.completes(space, step.step_id, layer, part) == (layer == last and whole)
                    self.manager.mark_part(space, step.step_id, layer, part)
            return None

        touched = holders if late else self.keys(number, step.sequence_ids.tolist())
        manager = self.manager
        self.during("late commit" if late else "commit", mark, touched)
        if late and manager is self.manager:
            self.write_kv(number, step)
            np.subtract.at(self.manager.unfinished_device, blocks, 1)

    def write_kv(self, number: int, step: StepPlan) -> None:
        found, slots = views(self.manager), iter(step.slot_mapping.tolist())
        for name, count, end in zip(
            step.sequence_ids.tolist(), step.query_lens.tolist(), step.context_lens.tolist(), strict=True
        ):
            for kv in content(found[number, name])[end - count : end]:
                self.pool[next(slots)] = kv

    def reopen(self, number: int) -> None:
        ids, found = self.some(number), views(self.manager)
        ones = [found[number, name] for name in ids]
        if ids and all(len(one.tokens) for one in ones):
            starts = [self.random.randint(0, min(one.num_computed, len(one.tokens) - 1)) for one in ones]
            lens = [self.random.randint(1, len(one.tokens) - at) for one, at in zip(ones, starts, strict=True)]
            space = self.spaces[number]
            step = self.during(
                "reopen",
                lambda: self.manager.reopen(space, ids, starts, lens, self.lookahead()),
                self.keys(number, ids),
            )
            self.opened(space, step)

    def truncate(self, number: int) -> None:
        ids, found = self.some(number), views(self.manager)
        if ids:
            lengths = [self.random.randint(0, len(found[number, name].tokens)) for name in ids]
            space, unindex = self.spaces[number], self.random.random() < 0.5
            self.during(
                "truncate", lambda: self.manager.truncate(space, ids, lengths, unindex=unindex), self.keys(number, ids)
            )

    def fork(self, number: int) -> None:
        if parents := self.some(number):
            children, space = self.new_ids(number, len(parents)), self.spaces[number]
            self.during("fork", lambda: self.manager.fork(space, parents, children), self.keys(number, children))

    def rearrange(self, number: int) -> None:
        if len(ids := self.some(number)) > 1:
            parents, space = [self.random.choice(ids) for _ in ids], self.spaces[number]
            self.during("rearrange", lambda: self.manager.rearrange(space, ids, parents), self.keys(number, ids))

    def swap_out(self, number: int) -> None:
        if ids := self.some(number):
            space, keys = self.spaces[number], set(self.keys(number, ids))
            plan = self.during("swap_out", lambda: self.manager.swap_out(space, ids), keys)
            if plan is not None:
                unfinished = self.manager.unfinished_swap
                self.copy(plan.src, plan.dst, self.pool, self.swap_pool, unfinished, keys)

    def swap_in(self, number: int) -> None:
        if not self.some(number, swapped=True):
            self.swap_out(number)
        if number in self.open and (ids := self.some(number, swapped=True)):
            if self.random.random() < 0.7:  # so that blocks have to be copied
                self.during("reset", self.manager.reset_prefix_cache)
            space, lookahead = self.spaces[number], self.lookahead()
            keys = set(self.keys(number, ids))
            plan = self.during("swap_in", lambda: self.manager.swap_in(space, ids, lookahead), keys)
            if plan is not None:
                self.manager.submitted(plan) if not len(plan) else None
                holders = self.holders(plan.dst, swapped=False)
                unfinished = self.manager.unfinished_device
                self.copy(plan.src, plan.dst, self.swap_pool, self.pool, unfinished, holders)

    def free(self, number: int) -> None:
        space = self.spaces[number]
        ids = self.some(number) + self.some(number, swapped=True, most=2)
        lost = self.random.sample(sorted(space.lost), min(len(space.lost), 2))
        if ids or lost:

            def free() -> None:
                """Free in slices, between which other operations begin."""
                for _ in self.manager.free_in_slices(space, ids + lost):
                    with contextlib.suppress(KVServiceError):
                        self.manager.can_append(space, [0])

            self.during("free", free, self.keys(number, ids + lost))

    def pin(self, number: int) -> None:
        found = [one for one in views(self.manager).values() if one.num_computed >= CONFIG.block_size and not one.extra]
        if found:
            one, space = self.random.choice(found), self.spaces[number]
            self.during("pin", lambda: self.manager.pin(space, one.tokens, ttl_s=10.0))

    def unpin(self, number: int) -> None:
        space = self.spaces[number]
        if space.pins:
            self.during("unpin", lambda: self.manager.unpin(space, next(iter(space.pins))))

    def expire(self, _: int) -> None:
        if self.manager.pins.deadlines:
            self.now += self.random.choice([1.0, 20.0])
            self.during("expire", lambda: self.manager.match_prefix([0]))

    def reset(self, _: int) -> None:
        if self.random.random() < 0.3:
            self.during("reset", self.manager.reset_prefix_cache)

    def touch(self, number: int) -> None:
        if one := next((one for key, one in views(self.manager).items() if key[0] == number), None):
            hashes = chain_hashes(np.array(one.tokens, np.int32), dict(one.extra), CONFIG.block_size)
            self.during("touch", lambda: self.manager.touch(hashes))

    def load(self, number: int) -> None:
        """Bring full blocks of a prompt into the pool from outside. Other operations may run meanwhile."""
        loader = self.manager.loader
        tokens, salt = np.array([*self.prompt(), *self.prompt()], np.int32), self.random.choice(SALTS)
        extra = extra_keys_by_block(salt, "keys", CONFIG.block_size, 64)
        found = self.manager.device.index.match(tokens[:-1], extra)
        missing = loader.missing(tokens, extra, found, self.random.randint(1, 8))
        if missing is None:
            return
        if self.random.random() < 0.2:
            self.during("reset", self.manager.reset_prefix_cache)
            loader = self.manager.loader
        manager, num_kept = self.manager, self.random.choice([0, 0, 5])
        load = self.during("begin_load", lambda: loader.begin_load(missing, num_kept))
        if load is None:
            return
        unfinished = manager.unfinished_device
        np.add.at(unfinished, load.blocks, 1)
        self.pool.reshape(-1, CONFIG.block_size)[load.blocks] = -1
        if self.random.random() < 0.3:
            self.one()
        elif self.random.random() < 0.3:
            self.allocate(number)
            self.quiet()
        if manager is not self.manager:
            return
        kv = content(
            View(tuple(tokens.tolist()), 0, (), (), tuple(sorted(extra.items())), swapped=False, scheduled=False)
        )
        rows = np.array(kv[: len(kv) // CONFIG.block_size * CONFIG.block_size]).reshape(-1, CONFIG.block_size)
        first = len(missing.prefix)
        for i, chain_hash in enumerate(load.missing.chain_hashes):
            self.contents[chain_hash] = rows[first + i].tolist(), load.missing.tokens[i].tolist()
        self.pool.reshape(-1, CONFIG.block_size)[load.blocks] = rows[first : first + len(load)]
        np.subtract.at(unfinished, load.blocks, 1)
        num_loaded = self.random.choice([len(load), len(load), self.random.randint(0, len(load))])
        self.pool.reshape(-1, CONFIG.block_size)[load.blocks[num_loaded:]] = -1
        self.during("end_load", lambda: loader.end_load(load, num_loaded))
        self.manager.loader.mark_copied(self.manager.loader.coldest(3))

    def close(self, number: int) -> None:
        if self.random.random() < 0.4:
            space = self.spaces[number]
            keys = [(number, name) for name in [*space.rows, *space.lost]]
            self.during("quarantine", lambda: self.manager.quarantine_writable(space))
            if (space := self.spaces[number]) in self.manager.namespaces:
                self.during("close", lambda: self.manager.close_namespace(space), keys, closing=number)
            self.closed(number)

    def closed(self, number: int) -> None:
        if all(space.number != number for space in self.manager.namespaces):
            self.open.discard(number)
            self.spaces.pop(number)

    def begin_writing(self, number: int) -> None:
        """Let a process fetch the pool for writing."""
        self.next_id += 1
        self.living.add(writer := self.next_id)
        self.during("add_writer", lambda: self.manager.add_writer(self.spaces[number], writer))

    def take_over(self, number: int) -> None:
        """Another client goes on with the session."""
        self.during("quarantine", lambda: self.manager.quarantine_writable(self.spaces[number]))

    def end_writing(self, _: int) -> None:
        """A process that could write ends, sometimes while the daemon is down."""
        if self.living:
            self.living.discard(writer := self.random.choice(sorted(self.living)))
            if self.random.random() < 0.3:
                self.go_on_from(self.manager.kept_state())
            else:
                self.during("writer_ended", lambda: self.manager.writer_ended(writer))

    def restart_now(self, number: int) -> None:
        """A restart between two operations loses no sequence, but those of a session that was about to be closed."""
        self.quiet()
        if self.random.random() < 0.3:
            self.open.discard(number)
        self.go_on_from(self.manager.kept_state())


def operate(num_seeds: int = 40) -> None:
    """Perform random operations with these many seeds."""
    for seed in range(num_seeds):
        rig = Operations(seed, crash=seed % 3 * 0.15)
        for _ in range(40):
            rig.one()


def operate_shortly() -> None:
    operate(3)
