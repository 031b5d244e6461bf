"""Sequences, steps, pins and lost ids in the process that takes the state over."""

from __future__ import annotations

import numpy as np
import pytest
from blocks_calls import mark_layer
from constants import set_constants
from crashes import KeptManager, views

from kvservice.blocks import NUM_COUNTERS, AllocationRequest, BlocksConfig, Recovery, SessionNamespace, chain_hashes
from kvservice.errors import (
    DuplicateSequenceError,
    LayerWrittenError,
    SequenceLostError,
    StaleStepError,
    UnknownPinError,
    UnknownSequenceError,
    UnknownStepError,
)

CONFIG = BlocksConfig(
    num_blocks=32, block_size=4, num_layers=3, num_swap_blocks=8, watermark=0.0, max_sequences=8,
    max_sequence_tokens=32, max_namespaces=4,
)  # fmt: skip


class Daemon:
    """A manager with one namespace, whose process may end."""

    def __init__(self) -> None:
        self.now = 0.0
        self.manager = KeptManager(CONFIG, lambda: self.now)
        self.space: SessionNamespace = self.manager.open_namespace()

    def restart(self, *, with_steps: bool = False) -> Recovery:
        self.manager = KeptManager(CONFIG, lambda: self.now, self.manager.kept_state())
        recovery = self.manager.recover({1: [0] * NUM_COUNTERS}, with_steps=with_steps)
        self.manager.check_integrity()
        self.space = recovery.namespaces[1]
        return recovery

    def allocate(self, sequence_id: int, num_tokens: int = 10) -> None:
        self.manager.allocate(self.space, [AllocationRequest(sequence_id, np.arange(num_tokens) + 100 * sequence_id)])

    def compute(self, *sequence_ids: int) -> None:
        self.manager.mark_all_layers(self.space, self.manager.open_step(self.space, sequence_ids).step_id)


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


def restarted(daemon: Daemon) -> Daemon:
    """Let sequences 1 and 2 exist, and sequence 3 be lost, because its process ended while it was swapped out."""
    for name in (1, 2, 3):
        daemon.allocate(name)
    daemon.compute(1, 2, 3)
    daemon.manager.swap_out(daemon.space, [3])
    assert daemon.restart().num_lost == 1
    return daemon


@pytest.fixture
def lost(daemon: Daemon) -> Daemon:
    return restarted(daemon)


def test_sequences_keep_their_order_and_tokens(daemon: Daemon) -> None:
    for name in (5, 1, 3):
        daemon.allocate(name)
    daemon.compute(5)
    daemon.manager.fork(daemon.space, [5], [2])
    daemon.manager.end_operation()
    before = views(daemon.manager)
    recovery = daemon.restart()
    assert (recovery.num_sequences, recovery.num_lost, recovery.num_ended) == (4, 0, 0)
    assert views(daemon.manager) == before
    assert [one.sequence_id for one in daemon.manager.describe(daemon.space)] == [5, 1, 3, 2]
    assert daemon.manager.match_prefix(np.arange(10) + 500) == 8


def test_an_operation_without_a_remembered_reply_is_undone(daemon: Daemon) -> None:
    daemon.allocate(1)
    daemon.compute(1)
    daemon.manager.append(daemon.space, [1], [7])
    daemon.restart()
    assert daemon.manager.describe(daemon.space)[0].length == 10
    daemon.manager.append(daemon.space, [1], [7])
    daemon.manager.end_operation()
    daemon.restart()
    assert daemon.manager.describe(daemon.space)[0].length == 11


def test_a_lost_sequence_has_an_error_of_its_own(lost: Daemon) -> None:
    with pytest.raises(SequenceLostError) as refused:
        lost.manager.append(lost.space, [1, 3], [7, 7])
    assert (refused.value.field, refused.value.metadata) == ("sequence_ids[1]", {"sequence_id": "3"})
    with pytest.raises(SequenceLostError):
        lost.manager.fork(lost.space, [3], [4])
    assert lost.restart().num_lost == 0
    assert lost.space.lost == {3}


def test_freeing_a_lost_sequence_forgets_it(lost: Daemon) -> None:
    with pytest.raises(UnknownSequenceError):
        lost.manager.free(lost.space, [3, 9])
    lost.manager.free(lost.space, [3, 1])
    assert (list(lost.space.rows), lost.space.lost) == ([2], set())
    lost.restart()
    with pytest.raises(UnknownSequenceError) as refused:
        lost.manager.free(lost.space, [3])
    assert type(refused.value) is UnknownSequenceError


def test_a_free_in_slices_without_a_remembered_reply_may_be_repeated(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other operations begin between its slices."""
    set_constants(monkeypatch, "kvservice.blocks", SLICE_BLOCKS=4)
    for name in (1, 2, 3):
        daemon.allocate(name)
    for _ in daemon.manager.free_in_slices(daemon.space, [1, 2]):
        daemon.manager.can_append(daemon.space, [3])
    daemon.restart()
    assert (list(daemon.space.rows), daemon.space.lost) == ([3], {1, 2})
    daemon.manager.free(daemon.space, [1, 2])
    assert (list(daemon.space.rows), daemon.space.lost) == ([3], set())
    for name in (4, 5):
        daemon.allocate(name)
    daemon.manager.free(daemon.space, [4, 5])
    daemon.manager.end_operation()
    daemon.restart()
    assert (list(daemon.space.rows), daemon.space.lost) == ([3], set())


def test_a_lost_id_may_be_used_again() -> None:
    """check_used_again fails if it is refused, or lost for ever."""
    for forked in (False, True):
        check_used_again(restarted(Daemon()), forked)


def check_used_again(lost: Daemon, forked: bool) -> None:
    def create() -> None:
        if forked:
            lost.manager.fork(lost.space, [1], [3])
        else:
            lost.allocate(3)

    create()
    assert lost.space.lost == set()
    lost.restart()
    assert (3 in lost.space, 3 in lost.space.lost) == (False, True), "no reply said that it was created"
    create()
    with pytest.raises(DuplicateSequenceError):
        lost.allocate(3)
    lost.manager.end_operation()
    lost.restart()
    assert (3 in lost.space, 3 in lost.space.lost) == (True, False)


def test_closed_sessions_and_schedulers_end(daemon: Daemon) -> None:
    """Their full blocks stay cached."""
    tokens = np.arange(10, dtype=np.int32)
    other = daemon.manager.open_namespace()
    daemon.manager.allocate(other, [AllocationRequest(1, tokens + 50)])
    daemon.manager.mark_all_layers(other, daemon.manager.open_step(other, [1]).step_id)
    daemon.manager.pin(other, tokens + 50, ttl_s=9.0)
    found = daemon.manager.find_prompt(2, tokens, {}, chain_hashes(tokens, {}, CONFIG.block_size))
    daemon.manager.allocate_found(daemon.space, [found])
    daemon.compute(2)
    daemon.manager.fork(daemon.space, [2], [4])
    daemon.manager.end_operation()
    recovery = daemon.restart()
    assert (recovery.num_sequences, recovery.num_lost, recovery.num_ended) == (0, 0, 3)
    assert (recovery.num_cached_blocks, recovery.num_pins) == (4, 0)
    assert [daemon.manager.match_prefix(prompt) for prompt in (tokens, tokens + 50)] == [8, 8]


def test_pins_keep_their_time(daemon: Daemon) -> None:
    daemon.allocate(1)
    daemon.compute(1)
    tokens = np.arange(10) + 100
    first = daemon.manager.pin(daemon.space, tokens, ttl_s=10.0).pin_id
    second = daemon.manager.pin(daemon.space, tokens, ttl_s=30.0).pin_id
    daemon.now = 5.0
    assert daemon.restart().num_pins == 2
    daemon.now = 11.0
    with pytest.raises(UnknownPinError):
        daemon.manager.unpin(daemon.space, first)
    daemon.restart()
    daemon.manager.unpin(daemon.space, second)
    assert daemon.restart().num_pins == 0
    assert daemon.manager.pin(daemon.space, tokens, ttl_s=1.0).pin_id == 3


def test_steps_end_with_a_killed_process(daemon: Daemon) -> None:
    daemon.allocate(1)
    step_id = daemon.manager.open_step(daemon.space, [1]).step_id
    daemon.manager.save_steps()
    daemon.manager.end_operation()
    daemon.restart()
    with pytest.raises(StaleStepError, match="the daemon was restarted"):
        mark_layer(daemon.manager, daemon.space, step_id, 0)
    with pytest.raises(UnknownStepError):
        mark_layer(daemon.manager, daemon.space, step_id + 1, 0)
    assert daemon.manager.open_step(daemon.space, [1]).step_id == step_id + 1


def test_saved_steps_go_on_in_the_next_process(daemon: Daemon) -> None:
    """Written layers and parts are written, and a repeated append returns the step."""
    for name in (1, 2):
        daemon.allocate(name)
    step = daemon.manager.open_step(daemon.space, [1, 2])
    mark_layer(daemon.manager, daemon.space, step.step_id, 0)
    part = daemon.manager.check_part(daemon.space, step.step_id, 1, 0, 7)
    daemon.manager.mark_part(daemon.space, step.step_id, 1, part)
    daemon.allocate(3)
    daemon.compute(3)
    appended = daemon.manager.append(daemon.space, [3], [7, 8], [2], [10])
    daemon.manager.end_operation()
    assert daemon.manager.save_steps() == 2
    assert daemon.restart(with_steps=True).num_steps == 2

    again = daemon.space.live_step(step.step_id).plan
    for attribute in ("sequence_ids", "rows", "query_lens", "context_lens", "slot_mapping", "block_tables"):
        assert getattr(again, attribute).tolist() == getattr(step, attribute).tolist()
        assert getattr(again, attribute).dtype == getattr(step, attribute).dtype
    with pytest.raises(LayerWrittenError):
        daemon.manager.check_part(daemon.space, step.step_id, 0, 0, 0)
    with pytest.raises(LayerWrittenError):
        daemon.manager.check_part(daemon.space, step.step_id, 1, 0, 7)
    rest = daemon.manager.check_part(daemon.space, step.step_id, 1, 7, 0)
    assert not daemon.manager.mark_part(daemon.space, step.step_id, 1, rest)
    assert mark_layer(daemon.manager, daemon.space, step.step_id, 2)
    repeated = daemon.manager.append(daemon.space, [3], [7, 8], [2], [10])
    assert (repeated.step_id, repeated.slot_mapping.tolist()) == (appended.step_id, appended.slot_mapping.tolist())
    assert daemon.restart(with_steps=True).num_steps == 0, "they were saved for one restart"


def test_steps_of_schedulers_and_steps_that_follow_are_not_saved(daemon: Daemon) -> None:
    tokens = np.arange(10, dtype=np.int32)
    found = daemon.manager.find_prompt(1, tokens, {}, chain_hashes(tokens, {}, CONFIG.block_size))
    daemon.manager.allocate_found(daemon.space, [found])
    daemon.manager.open_step(daemon.space, [1])
    daemon.allocate(2)
    first = daemon.manager.open_step(daemon.space, [2])
    daemon.manager.advance(daemon.space, [2], [0], [1], follows=first.step_id)
    daemon.manager.end_operation()
    assert daemon.manager.save_steps() == 0
    assert daemon.restart(with_steps=True).num_steps == 0


def test_the_order_of_eviction_is_kept(daemon: Daemon) -> None:
    for name in (1, 2, 3):
        daemon.allocate(name)
    daemon.compute(1, 2, 3)
    for name in (2, 1):
        daemon.manager.free(daemon.space, [name])
    daemon.manager.touch(chain_hashes(np.arange(4, dtype=np.int32) + 200, {}, 4))
    daemon.manager.end_operation()
    before = daemon.manager.device.evictable.blocks().tolist()
    assert len(before) == 4
    daemon.restart()
    assert daemon.manager.device.evictable.blocks().tolist() == before


def finish_by_lane(daemon: Daemon, step_id: int) -> None:
    """Do what a lane does, without the event loop, which would commit the step."""
    written = daemon.manager.hand_to_lane(daemon.space, step_id)
    assert written is not None
    written[:] = b"\1" * CONFIG.num_layers
    finished = daemon.manager.finished_ids(daemon.space)
    finished[step_id % len(finished)] = step_id


def test_a_step_that_a_lane_has_finished_is_committed(daemon: Daemon) -> None:
    for name in (1, 2, 3):
        daemon.allocate(name)
    finished = daemon.manager.open_step(daemon.space, [1, 2], [10, 5])
    unfinished = daemon.manager.open_step(daemon.space, [3])
    finish_by_lane(daemon, finished.step_id)
    daemon.manager.hand_to_lane(daemon.space, unfinished.step_id)
    daemon.manager.end_operation()
    daemon.restart()
    assert [one.num_computed for one in daemon.manager.describe(daemon.space)] == [10, 5, 0]
    assert daemon.manager.match_prefix(np.arange(10) + 100) == 8, "its full blocks can be shared"
    with pytest.raises(StaleStepError):
        daemon.space.live_step(finished.step_id)
    daemon.restart()
    assert [one.num_computed for one in daemon.manager.describe(daemon.space)] == [10, 5, 0]


def test_a_finished_step_that_was_replaced_is_not_committed_again(daemon: Daemon) -> None:
    daemon.allocate(1)
    step = daemon.manager.open_step(daemon.space, [1])
    finish_by_lane(daemon, step.step_id)
    daemon.manager.commit_written(daemon.space, step.step_id)
    daemon.manager.truncate(daemon.space, [1], [6])
    daemon.manager.append(daemon.space, [1], [7, 8], [2])
    daemon.manager.end_operation()
    daemon.restart()
    assert [(one.length, one.num_computed) for one in daemon.manager.describe(daemon.space)] == [(8, 6)]


def test_finished_steps_of_a_closed_namespace_mean_nothing_to_the_next_one(daemon: Daemon) -> None:
    daemon.allocate(1)
    step = daemon.manager.open_step(daemon.space, [1])
    finish_by_lane(daemon, step.step_id)
    daemon.manager.close_namespace(daemon.space)
    daemon.space = daemon.manager.open_namespace(1)
    daemon.allocate(1)
    assert daemon.manager.open_step(daemon.space, [1]).step_id == step.step_id
    daemon.manager.end_operation()
    daemon.restart()
    assert daemon.manager.describe(daemon.space)[0].num_computed == 0
