"""Quarantine: blocks that a process may still write after its session was lost wait for its end."""

from __future__ import annotations

import functools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from blocks_calls import can_allocate
from crashes import KeptManager, Seen, traced

from kvservice.blocks import (
    NUM_COUNTERS,
    AllocationRequest,
    AllocStatus,
    BlockManager,
    BlocksConfig,
    KeptMaps,
    SessionNamespace,
    StepPlan,
    TenantQuota,
)
from kvservice.errors import OutOfBlocksError, QuotaExceededError, ResourceExhaustedError, StaleStepError

CONFIG = BlocksConfig(
    num_blocks=24, block_size=4, num_layers=1, num_swap_blocks=12, watermark=0.0, max_sequences=9,
    max_sequence_tokens=64, max_namespaces=4,
)  # fmt: skip
FROZEN, OTHER = 901, 902


def made(state: Any = None) -> KeptManager:
    return KeptManager(CONFIG, lambda: 0.0, state)


def allocate(manager: KeptManager, space: SessionNamespace, name: int, num_tokens: int, first: int = 0) -> None:
    manager.allocate(space, [AllocationRequest(name, np.arange(first, first + num_tokens))])


def compute(manager: KeptManager, space: SessionNamespace, name: int, num_tokens: int, first: int = 0) -> None:
    allocate(manager, space, name, num_tokens, first)
    manager.mark_all_layers(space, manager.open_step(space, [name]).step_id)


def blocks_of(manager: KeptManager, space: SessionNamespace, name: int) -> list[int]:
    (found,) = manager.describe(space, [name], include_blocks=True)
    assert found.block_ids is not None
    return [int(block) for block in found.block_ids]


def held(manager: KeptManager) -> list[int]:
    manager.check_integrity()
    blocks: list[int] = np.flatnonzero(manager.quarantine.held).tolist()
    assert manager.stats().quarantined_blocks == len(blocks)
    return blocks


def free(manager: KeptManager) -> int:
    return manager.stats().free_blocks


def lose(manager: KeptManager, space: SessionNamespace) -> tuple[int, set[int]]:
    """Close a session as one whose client may go on."""
    found = manager.quarantine_writable(space)
    manager.close_namespace(space)
    return found


def test_what_is_computed_is_not_written_any_more() -> None:
    """One sequence is whole, of one a block is partly computed, and of one nothing is."""
    manager = made()
    space = manager.open_namespace()
    manager.add_writer(space, FROZEN)
    compute(manager, space, 1, 8)
    compute(manager, space, 2, 10, first=100)
    manager.append(space, [2], [7])
    allocate(manager, space, 3, 5, first=200)
    writable = blocks_of(manager, space, 2)[2:] + blocks_of(manager, space, 3)
    assert lose(manager, space) == (3, {FROZEN})
    assert held(manager) == sorted(writable)
    stats = manager.stats()
    assert (stats.active_blocks, stats.cached_blocks, stats.free_blocks) == (3, 4, CONFIG.num_blocks - 7)
    assert manager.writer_ended(FROZEN) == 3
    assert held(manager) == []
    assert free(manager) == CONFIG.num_blocks - 4


def test_lookahead_and_steps_ahead_are_writable() -> None:
    manager = made()
    space = manager.open_namespace()
    manager.add_writer(space, FROZEN)
    compute(manager, space, 1, 8)
    step = manager.open_ahead(space, [1], 9)
    manager.commit_ahead(space, step.step_id, [5] * 5, num_steps=4)
    lookahead = blocks_of(manager, space, 1)
    assert len(lookahead) == 5
    assert lose(manager, space) == (2, {FROZEN})
    assert held(manager) == sorted(lookahead[3:]), "13 tokens are computed"


def test_swapped_sequences_have_no_blocks_that_a_process_may_write() -> None:
    manager = made()
    space = manager.open_namespace()
    manager.add_writer(space, FROZEN)
    allocate(manager, space, 1, 6)
    manager.swap_out(space, [1])
    assert lose(manager, space) == (0, set())
    assert (held(manager), free(manager)) == ([], CONFIG.num_blocks)


def test_a_block_that_forks_share_waits_once() -> None:
    manager = made()
    space = manager.open_namespace()
    manager.add_writer(space, FROZEN)
    allocate(manager, space, 1, 6)
    manager.fork(space, [1], [2])
    assert lose(manager, space) == (2, {FROZEN})
    assert len(held(manager)) == 2


@pytest.mark.parametrize("end", ["no writer", "ended before", "promised", "computed"])
def test_nothing_waits_if_nobody_writes(end: str) -> None:
    manager = made()
    space = manager.open_namespace()
    if end != "no writer":
        manager.add_writer(space, FROZEN)
    (compute if end == "computed" else allocate)(manager, space, 1, 8)
    if end == "ended before":
        manager.writer_ended(FROZEN)
    if end == "promised":
        manager.quarantine.forget_writers(space.number)
    assert lose(manager, space) == (0, set())
    assert (held(manager), free(manager) + manager.stats().cached_blocks) == ([], CONFIG.num_blocks)


def test_the_last_of_several_processes_counts() -> None:
    manager = made()
    space = manager.open_namespace()
    for writer in (FROZEN, OTHER):
        manager.add_writer(space, writer)
    allocate(manager, space, 1, 6)
    assert lose(manager, space) == (2, {FROZEN, OTHER})
    assert manager.writer_ended(OTHER) == 0
    assert len(held(manager)) == 2
    assert manager.writer_ended(FROZEN) == 2


def test_who_takes_a_session_over_writes_into_copies() -> None:
    """The steps of the client before end. The next step has blocks that the process before cannot write, and the
    computed tokens of a block that both have are copied."""
    manager = made()
    space = manager.open_namespace()
    manager.add_writer(space, FROZEN)
    compute(manager, space, 1, 6)
    before = manager.append(space, [1], [9, 9, 9], [3])
    frozen = blocks_of(manager, space, 1)
    assert manager.quarantine_writable(space) == (2, {FROZEN})
    assert held(manager) == sorted(frozen[1:])
    with pytest.raises(StaleStepError):
        manager.mark_all_layers(space, before.step_id)
    manager.add_writer(space, OTHER)
    step = manager.open_step(space, [1])
    assert step.copies.src.tolist() == [frozen[1]], "the next block has no computed tokens"
    assert not set(held(manager)) & {int(slot) // 4 for slot in step.slot_mapping}
    manager.mark_all_layers(space, step.step_id)
    # Each process has its own blocks.
    manager.append(space, [1], [8])
    own = blocks_of(manager, space, 1)[2:]
    assert lose(manager, space) == (1, {OTHER})
    assert held(manager) == sorted(frozen[1:] + own)
    manager.writer_ended(FROZEN)
    assert held(manager) == own


def test_a_session_that_goes_on_holds_a_block_that_waits_no_second_time() -> None:
    """Nobody has opened a step there since."""
    manager = made()
    space = manager.open_namespace()
    manager.add_writer(space, FROZEN)
    allocate(manager, space, 1, 6)
    assert manager.quarantine_writable(space) == (2, {FROZEN})
    manager.add_writer(space, OTHER)
    assert lose(manager, space) == (0, set())
    assert manager.writer_ended(FROZEN) == 2
    assert (held(manager), free(manager)) == ([], CONFIG.num_blocks)


def test_who_takes_over_from_a_process_that_has_ended_goes_on_with_its_steps() -> None:
    manager = made()
    space = manager.open_namespace()
    manager.add_writer(space, FROZEN)
    allocate(manager, space, 1, 6)
    step = manager.open_step(space, [1])
    manager.writer_ended(FROZEN)
    assert manager.quarantine_writable(space) == (0, set())
    manager.mark_all_layers(space, step.step_id)
    assert dict(manager.kept.writers) == {}


def test_a_session_remembers_no_process_that_has_ended() -> None:
    """Its client may fetch the pool with a new process again and again."""
    manager = made()
    space = manager.open_namespace()
    for writer in range(1, 100):
        manager.add_writer(space, writer)
        manager.writer_ended(writer)
    manager.add_writer(space, FROZEN)
    kept = len(manager.kept.writers[space.number])
    manager.add_writer(space, OTHER)
    assert len(manager.kept.writers[space.number]) == kept + 8


class Full(dict[int, bytes]):
    """No memory is left for a value."""

    def __setitem__(self, key: int, value: bytes) -> None:
        raise ResourceExhaustedError("full")


def test_blocks_wait_also_if_there_is_no_memory_to_keep_that(caplog: pytest.LogCaptureFixture) -> None:
    manager = BlockManager(CONFIG, kept=KeptMaps(quarantine=Full()))
    for writer in (FROZEN, OTHER):
        space = manager.open_namespace()
        manager.add_writer(space, writer)
        manager.allocate(space, [AllocationRequest(1, np.arange(6))])
        assert manager.quarantine_writable(space) == (2, {writer})
        manager.close_namespace(space)
    assert caplog.messages == ["2 blocks are in quarantine until the daemon restarts, no longer: full"] * 2
    manager.check_integrity()
    assert [manager.writer_ended(writer) for writer in (OTHER, FROZEN)] == [2, 2]
    assert manager.stats().free_blocks == CONFIG.num_blocks


def test_blocks_that_a_version_without_quarantine_has_used_do_not_wait() -> None:
    manager = made()
    space = manager.open_namespace()
    manager.add_writer(space, FROZEN)
    allocate(manager, space, 1, 8)
    lose(manager, space)
    records, waiting = dict(manager.kept.quarantine), held(manager)
    manager.writer_ended(FROZEN)
    space = manager.open_namespace()
    compute(manager, space, 1, 4)
    used = blocks_of(manager, space, 1)
    assert set(used) < set(waiting)
    manager.end_operation()
    manager.kept.quarantine.update(records)
    after = made(manager.kept_state())
    after.recover({space.number: [0] * NUM_COUNTERS}, living=[FROZEN])
    assert held(after) == sorted(set(waiting) - set(used))
    assert after.writer_ended(FROZEN) == 1
    held(after)


def test_calls_tell_what_is_left() -> None:
    manager = made()
    lost, space = manager.open_namespace(), manager.open_namespace()
    manager.add_writer(lost, FROZEN)
    allocate(manager, lost, 1, 64)
    lose(manager, lost)
    left = [AllocationRequest(1, np.arange(4 * 8))]
    more = [AllocationRequest(2, np.arange(4 * 9))]
    assert [can_allocate(manager, space, one) for one in (left, more)] == [AllocStatus.OK, AllocStatus.LATER]
    with pytest.raises(OutOfBlocksError):
        manager.allocate(space, more)
    manager.allocate(space, left)
    assert not set(held(manager)) & set(blocks_of(manager, space, 1))
    manager.writer_ended(FROZEN)
    manager.free(space, [1])
    manager.allocate(space, more)


def tenants(manager: KeptManager) -> None:
    manager.set_tenants({"a": 0, "b": 0})


def opened(manager: KeptManager, tenant: str, max_blocks: int) -> SessionNamespace:
    space = manager.open_namespace()
    space.quota = TenantQuota(tenant, max_blocks, None)
    space.quota.namespaces.add(space)
    return space


def test_a_tenant_holds_no_more_than_its_quota_with_sessions_that_it_gives_up() -> None:
    manager = made()
    tenants(manager)
    for writer in range(1, 4):
        space = opened(manager, "a", 6)
        manager.add_writer(space, writer)
        if writer < 3:
            allocate(manager, space, 1, 12, first=100 * writer)
        else:
            with pytest.raises(QuotaExceededError):
                allocate(manager, space, 1, 1)
        lose(manager, space)
    assert len(held(manager)) == 6
    others = opened(manager, "b", 24)
    allocate(manager, others, 1, 64)
    assert manager.writer_ended(1) == 3
    allocate(manager, opened(manager, "a", 6), 1, 12)
    # It counts after a restart, too.
    manager.end_operation()
    after = made(manager.kept_state())
    after.recover({}, living={2, 3})
    tenants(after)
    assert len(held(after)) == 3
    with pytest.raises(QuotaExceededError):
        allocate(after, opened(after, "a", 6), 1, 16)
    after.writer_ended(2)
    allocate(after, opened(after, "a", 6), 1, 16)
    held(after)


def test_a_restart_hands_no_block_out_that_waits() -> None:
    """Not in a state of any line of what happens, nor while another recovery of it is under way."""
    manager = made()
    space = manager.open_namespace()
    manager.add_writer(space, FROZEN)
    compute(manager, space, 1, 6)
    manager.append(space, [1], [9, 9, 9], [3])
    allocate(manager, space, 2, 3, first=50)
    manager.end_operation()
    writable = sorted(blocks_of(manager, space, 1)[1:] + blocks_of(manager, space, 2))
    _, states = traced(manager, lambda: lose(manager, space), Seen())
    assert len(states) > 4
    for state in states:
        after = made(state)
        _, between = traced(after, functools.partial(after.recover, {}, living=[FROZEN]), Seen())
        assert held(after) == writable
        for one in between:
            again = made(one)
            again.recover({}, living=[FROZEN])
            assert held(again) == writable
        assert after.writer_ended(FROZEN) == 3
        assert (held(after), free(after)) == ([], CONFIG.num_blocks - 1)
        dead = made(state)
        dead.recover({})
        assert (held(dead), free(dead)) == ([], CONFIG.num_blocks - 1)


def test_sequences_that_an_interrupted_operation_loses_wait_for_the_step_before_it() -> None:
    """A step follows one that its client is about to write, and copies a shared block of another sequence. Without its
    process in between, both sequences are lost."""
    manager = made()
    space = manager.open_namespace()
    manager.add_writer(space, FROZEN)
    allocate(manager, space, 1, 6)
    compute(manager, space, 2, 6, first=50)
    manager.fork(space, [2], [3])
    step = manager.open_step(space, [1])
    writable = {int(slot) // CONFIG.block_size for slot in step.slot_mapping}
    manager.end_operation()

    def follow() -> None:
        manager.advance(space, [1, 3], [0, 7], [1, 1], follows=step.step_id)

    _, states = traced(manager, follow, Seen())
    num_lost = 0
    for state in states:
        after = made(state)
        _, between = traced(after, functools.partial(recover, after, space), Seen())
        for one in (after, *map(made, between)):
            if one is not after:
                recover(one, space)
            (found,) = one.namespaces
            used = set(blocks_of(one, found, 1)) if 1 in found else set()
            assert writable <= used | set(held(one))
            num_lost += 1 not in found
    assert num_lost > 4


def recover(manager: KeptManager, space: SessionNamespace) -> None:
    manager.recover({space.number: [0] * NUM_COUNTERS}, living=[FROZEN])


@pytest.mark.parametrize("lost", ["scheduled", "torn"])
def test_sequences_that_a_restart_ends_wait_for_the_client_that_may_be_in_a_step(lost: str) -> None:
    manager = made()
    space = manager.open_namespace()
    manager.add_writer(space, FROZEN)
    allocate(manager, space, 1, 6)
    manager.open_step(space, [1])
    allocate(manager, space, 2, 6, first=50)
    writable = blocks_of(manager, space, 1)
    if lost == "scheduled":
        manager.sequences.states[space.rows[1], -1] |= 1
    else:
        manager.unfinished_device[writable[0]] = 1
    manager.end_operation()
    after = made(manager.kept_state())
    recovery = after.recover({space.number: [0] * NUM_COUNTERS}, living=[FROZEN])
    assert recovery.num_ended == 1
    assert held(after) == sorted(writable)
    # The session goes on with the same process.
    assert after.quarantine.writers(space.number) == {FROZEN}
    assert lose(after, recovery.namespaces[space.number]) == (2, {FROZEN})


# ---- processes that are stopped, and go on, at random: a model


class Process:
    """A client of a session. It writes each slot that a step gives it, now or later, and what it writes names the
    process and the step."""

    def __init__(self, name: int) -> None:
        self.name = name
        # Slots that it has not written yet, each with its K/V, by sequence.
        self.pending: dict[int, dict[int, int]] = {}


class Rig:
    """Sessions of a manager, each with a process that writes to the pool. `pool` int64[slots] is the K/V."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.manager = made()
        self.pool = np.zeros(CONFIG.num_blocks * CONFIG.block_size, np.int64)
        self.numbers, self.next_name = iter(range(1, 1 << 30)), 1
        self.processes: dict[int, Process] = {}
        self.spaces: dict[int, SessionNamespace] = {}
        # Processes that are stopped, and whose sessions are lost.
        self.stopped: list[Process] = []
        # The K/V of the computed tokens, by session and sequence, and the steps that are open.
        self.content: dict[tuple[int, int], list[int]] = {}
        self.steps: dict[int, list[StepPlan]] = {}
        self.counts: Counter[str] = Counter()

    def new_process(self) -> Process:
        return Process(next(self.numbers))

    def open(self) -> None:
        if len(self.spaces) == 3:
            return
        space = self.manager.open_namespace()
        self.begin(space)

    def begin(self, space: SessionNamespace) -> None:
        """Let a new process have the session."""
        process = self.new_process()
        self.manager.add_writer(space, process.name)
        self.spaces[space.number], self.processes[space.number] = space, process
        self.steps[space.number] = []

    def some(self) -> tuple[int, SessionNamespace]:
        number = self.random.choice(list(self.spaces))
        return number, self.spaces[number]

    def names(self, number: int) -> list[int]:
        return [name for session, name in self.content if session == number]

    # ---- what clients do

    def allocate(self) -> None:
        number, space = self.some()
        name, self.next_name = self.next_name, self.next_name + 1
        tokens = np.arange(self.random.randint(1, 14)) + 1000 * name
        self.manager.allocate(space, [AllocationRequest(name, tokens, (), self.random.randint(0, 3))])
        self.content[number, name] = []

    def step(self) -> None:
        """Open a step over a sequence. The process writes all of it, some, or nothing before it commits."""
        number, space = self.some()
        if not (names := self.names(number)):
            return
        name = self.random.choice(names)
        (found,) = self.manager.describe(space, [name])
        if found.swapped:
            return
        if found.num_computed < found.length:
            step = self.manager.open_step(space, [name])
        else:
            step = self.manager.append(space, [name], [self.random.randint(0, 9)])
        self.copy(step)
        process, value = self.processes[number], next(self.numbers)
        process.pending[name] = {int(slot): value for slot in step.slot_mapping}
        if self.random.random() < 0.3:  # it is in the middle of the step
            self.write_some(process)
            return
        self.write_all(process, name)
        self.manager.mark_all_layers(space, step.step_id)
        self.content[number, name] += [value] * len(step.slot_mapping)

    def copy(self, step: StepPlan) -> None:
        blocks = self.pool.reshape(-1, CONFIG.block_size)
        blocks[step.copies.dst] = blocks[step.copies.src]

    def resting(self, number: int, *, swapped: bool = False) -> list[int]:
        """Return the sequences in no step."""
        found = self.manager.describe(self.spaces[number])
        pending = self.processes[number].pending
        return [one.sequence_id for one in found if one.swapped == swapped and not pending.get(one.sequence_id)]

    def fork(self) -> None:
        number, space = self.some()
        if names := self.resting(number):
            parent, child = self.random.choice(names), self.next_name
            self.manager.fork(space, [parent], [child])
            self.next_name += 1
            self.content[number, child] = list(self.content[number, parent])

    def free(self) -> None:
        number, space = self.some()
        if names := self.names(number):
            name = self.random.choice(names)
            self.manager.free(space, [name])
            del self.content[number, name]
            self.processes[number].pending.pop(name, None)  # its client has asked for it

    def swap(self) -> None:
        """Move a sequence without computed tokens, which has no K/V to copy, to the swap tier, or back."""
        number, space = self.some()
        if names := [name for name in self.resting(number) if not self.content[number, name]]:
            self.manager.swap_out(space, self.random.sample(names, 1))
        elif names := self.resting(number, swapped=True):
            self.manager.submitted(self.manager.swap_in(space, self.random.sample(names, 1)))

    def write_some(self, process: Process) -> None:
        for slots in process.pending.values():
            for slot in [slot for slot in slots if self.random.random() < 0.5]:
                self.pool[slot] = slots.pop(slot)

    def write_all(self, process: Process, name: int) -> None:
        for slot, value in process.pending.pop(name).items():
            self.pool[slot] = value

    # ---- what goes wrong

    def lose(self) -> None:
        """A process is stopped, and its session is lost."""
        number, space = self.some()
        self.manager.quarantine_writable(space)
        self.manager.close_namespace(space)
        self.stopped.append(self.processes.pop(number))
        self.forget(number)

    def close(self) -> None:
        """A client closes its session, and writes no more."""
        number, space = self.some()
        self.manager.quarantine.forget_writers(number)
        assert self.manager.quarantine_writable(space) == (0, set())
        self.manager.close_namespace(space)
        self.manager.writer_ended(self.processes.pop(number).name)
        self.forget(number)

    def forget(self, number: int) -> None:
        del self.spaces[number], self.steps[number]
        for name in self.names(number):
            del self.content[number, name]

    def take_over(self) -> None:
        """Another process resumes the session of one that is stopped."""
        number, space = self.some()
        self.manager.quarantine_writable(space)
        self.stopped.append(self.processes[number])
        self.begin(space)

    def go_on(self) -> None:
        """A stopped process writes some of its slots, or all, and is stopped again."""
        if self.stopped:
            process = self.random.choice(self.stopped)
            self.write_some(process)
            self.counts["written late"] += 1

    def end(self) -> None:
        if self.stopped:
            process = self.stopped.pop(self.random.randrange(len(self.stopped)))
            self.counts["released"] += self.manager.writer_ended(process.name)

    def restart(self) -> None:
        """Kill the daemon. Open steps end; their clients may be in the middle of one."""
        self.manager.end_operation()
        living = {process.name for process in (*self.stopped, *self.processes.values())}
        after = made(self.manager.kept_state())
        recovery = after.recover({number: [0] * NUM_COUNTERS for number in self.spaces}, living=living)
        self.manager, self.spaces = after, dict(recovery.namespaces)

    # ---- what holds

    def check(self) -> None:
        self.manager.check_integrity()
        for (number, name), values in self.content.items():
            (found,) = self.manager.describe(self.spaces[number], [name], include_blocks=True)
            assert found.num_computed == len(values)
            if not found.swapped:
                assert found.block_ids is not None
                blocks = self.pool.reshape(-1, CONFIG.block_size)[found.block_ids]
                assert blocks.reshape(-1)[: len(values)].tolist() == values

    def run(self, num_operations: int) -> None:
        often = [self.allocate, self.step, self.step, self.step, self.fork, self.free, self.swap, self.go_on]
        seldom = [self.lose, self.take_over, self.close, self.end, self.restart]
        for _ in range(num_operations):
            self.open()
            operation = self.random.choice(often if self.random.random() < 0.8 else seldom)
            try:
                operation()
                self.counts[operation.__name__] += 1
            except (OutOfBlocksError, QuotaExceededError):
                self.counts["refused"] += 1
                self.end()
            self.check()
        while self.spaces:
            self.lose()
        while self.stopped:
            self.end()
        self.check()
        stats = self.manager.stats()
        assert (stats.quarantined_blocks, stats.active_blocks, stats.shared_blocks) == (0, 0, 0)
        assert (dict(self.manager.kept.quarantine), dict(self.manager.kept.writers)) == ({}, {})


def run_all() -> Counter[str]:
    """Return how often each operation happened."""
    counts: Counter[str] = Counter()
    for seed in range(6):
        rig = Rig(seed)
        rig.run(250)
        counts += rig.counts
    return counts


def test_stopped_processes_change_no_byte_of_others() -> None:
    counts = run_all()
    assert min(counts[name] for name in ("written late", "released", "lose", "take_over", "restart")) > 10


def test_the_model_finds_blocks_that_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeptManager, "quarantine_writable", lambda *_: (0, set()))
    with pytest.raises(AssertionError):
        run_all()
