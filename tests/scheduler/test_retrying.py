"""Retried batches: an engine that lost its step computes the same tokens, and little of it again."""

from __future__ import annotations

import numpy as np
import pytest
from each_row import each_row
from schedule_rig import EngineRig, make_rig

from kvservice.blocks import AllocationRequest
from kvservice.errors import FailedPreconditionError, StaleStepError
from kvservice.scheduler import Report, ScheduledBatch


def sizes(batch: ScheduledBatch) -> dict[int, int]:
    assert batch.step is not None
    return dict(zip(batch.step.sequence_ids.tolist(), batch.step.query_lens.tolist(), strict=True))


def mixed(write: bool) -> tuple[EngineRig, ScheduledBatch]:
    """Return a batch of a decode, the last chunk of a prompt with two samples, and a chunk."""
    rig = make_rig(max_step_tokens=12)
    rig.add(1, 6, max_tokens=5)
    rig.add(2, range(100, 110), max_tokens=5, width=2)
    rig.add(4, range(200, 220), max_tokens=5)
    rig.step()
    batch = rig.begin(write)
    assert sizes(batch) == {1: 1, 2: 4, 4: 7}
    return rig, batch


def test_a_step_that_was_not_written_is_opened_again() -> None:
    rig, batch = mixed(write=False)
    again = rig.retry()
    assert sizes(again) == sizes(batch)
    assert again.number == batch.number + 1
    assert again.sampled.tolist() == batch.sampled.tolist() == [1, 2, 3]
    assert again.sampled_rows.tolist() == [0, 1, 1]
    assert batch.step is not None
    with pytest.raises(StaleStepError):
        rig.namespace.live_step(batch.step.step_id)
    with pytest.raises(FailedPreconditionError):
        rig.engine.update(Report(batch.number, [1, 2, 3]))
    rig.end(again)
    rig.run()
    rig.check_outputs()


def test_of_a_computed_step_only_the_last_tokens_are_computed_again() -> None:
    rig, _ = mixed(write=True)
    again = rig.retry()
    assert sizes(again) == {1: 1, 2: 1}
    assert again.sampled_rows.tolist() == [0, 1, 1]
    rig.end(again)
    assert sizes(rig.begin()) == {1: 1, 2: 1, 3: 1, 4: 9}


def test_a_step_can_be_lost_many_times() -> None:
    rig, batch = mixed(write=True)
    for write in (False, True, False, True, True):
        batch = rig.retry()
        if write:
            rig.write(batch)
    rig.end(batch)
    rig.run()
    rig.check_outputs()
    assert sorted(rig.finished) == [1, 2, 4]


def test_without_a_batch_there_is_nothing_to_retry() -> None:
    rig = make_rig()
    assert rig.engine.retry() is None
    rig.add(1, 6)
    rig.step()
    assert rig.engine.retry() is None


def test_a_batch_of_computed_chunks_needs_no_retry() -> None:
    rig = make_rig(max_step_tokens=4)
    rig.add(1, 6, max_tokens=3)
    rig.begin()
    rig.abort(1)
    again = rig.retry()
    assert again.step is None
    assert len(rig.engine) == 0
    rig.add(2, range(100, 106), max_tokens=3)
    rig.begin()
    assert rig.retry().step is None
    rig.run()
    rig.check_outputs()


def test_a_retry_without_blocks_for_its_copies_preempts() -> None:
    """Others share the last blocks meanwhile, which are full. So they are copied before they are written again."""
    with each_row() as row:
        for shared, left, preempted in (((1,), [1], [2]), ((1, 2), [], [2, 1])):
            with row((shared, left, preempted)):
                rig = make_rig(4 + len(shared), reserve_steps=0)
                rig.add(1, range(100, 108), max_tokens=3)
                rig.add(2, range(200, 208), max_tokens=3)
                rig.begin()
                other = rig.manager.open_namespace()
                for name in shared:
                    rig.manager.allocate(other, [AllocationRequest(name, np.arange(100 * name, 100 * name + 9))])
                assert rig.manager.device.num_available == 0
                again = rig.retry()
                assert [one.sequence_id for one in again.preempted] == preempted
                assert (again.step.sequence_ids.tolist() if again.step else []) == left
                assert again.sampled.tolist() == left
                rig.end(again)
                rig.manager.close_namespace(other)
                rig.run()
                rig.check_outputs()
