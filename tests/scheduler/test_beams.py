"""Beams of a request: they run in lock-step, continue one another, and are preempted together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from each_row import each_row
from schedule_rig import EngineRig, beams_alone, make_rig

from kvservice.blocks import AllocationRequest
from kvservice.errors import InvalidArgumentError, OutOfBlocksError, QuotaExceededError
from kvservice.scheduler import PreemptionMode, Report, Request, ScheduledBatch

PROMPT = list(range(10))


def sampled(batch: ScheduledBatch) -> list[int]:
    return batch.sampled.tolist()


def run(rig: EngineRig) -> None:
    """Run to the end. No step has some beams of a request and not the others."""
    rig.run()
    rig.check_outputs()
    for batch in rig.batches:
        for request_id in rig.beams:
            last = [len(rig.outputs[request_id + sample]) for sample in range(rig.widths[request_id])]
            mine = [name for name in sampled(batch) if request_id <= name < request_id + rig.widths[request_id]]
            assert not mine or len(mine) == len(last) or len(set(last)) > 1


def test_beams_continue_one_another() -> None:
    rig = make_rig()
    rig.add(1, PROMPT, max_tokens=8, width=4, beams=True)
    run(rig)
    outputs = [rig.outputs[name] for name in (1, 2, 3, 4)]
    assert outputs == beams_alone(PROMPT, [8] * 4)
    assert len({tuple(output[:4]) for output in outputs}) < 4  # some of them come from the same beam
    assert rig.computed_tokens == 10 + 4 * 7
    assert rig.manager.stats().sequences == 0


def test_a_beam_that_ends_leaves_the_others() -> None:
    rig = make_rig()
    rig.add(1, PROMPT, max_tokens=8, width=3, beams=True, stop_lengths=[12, 18, 15])
    rig.run()
    rig.check_outputs()
    assert [len(rig.outputs[name]) for name in (1, 2, 3)] == [2, 8, 5]


def test_beams_are_preempted_and_come_back_together() -> None:
    with each_row() as row:
        for mode, swapped in ((PreemptionMode.RECOMPUTE, False), (PreemptionMode.SWAP, True)):
            with row((mode, swapped)):
                rig = make_rig(
                    16,
                    {"num_swap_blocks": 20},
                    reserve_steps=0,
                    max_stalled_fraction=0.0,
                    max_step_tokens=20,
                    preemption=mode,
                )
                rig.add(1, range(100, 136), max_tokens=24)
                rig.add(5, PROMPT, max_tokens=9, width=3, beams=True)
                run(rig)
                preempted = [one for batch in rig.batches for one in batch.preempted]
                assert [one.sequence_id for one in preempted][:3] == [5, 6, 7]
                assert {one.swapped for one in preempted} == {swapped}
                assert sorted(rig.finished) == [1, 5]


def test_beams_wait_for_those_that_are_recomputed() -> None:
    """After a preemption without a prefix cache, the prefills of the beams end in different steps."""
    rig = make_rig(
        14, {"enable_prefix_caching": False}, reserve_steps=0, max_stalled_fraction=0.0, max_step_tokens=7,
        preemption=PreemptionMode.RECOMPUTE,
    )  # fmt: skip
    rig.add(1, range(100, 132), max_tokens=16)
    rig.add(5, PROMPT, max_tokens=7, width=2, beams=True)
    run(rig)
    assert any(batch.preempted for batch in rig.batches)
    assert sorted(rig.finished) == [1, 5]


def test_a_step_with_too_small_a_budget_has_no_beam() -> None:
    rig = make_rig()
    rig.add(1, PROMPT, max_tokens=4, width=3, beams=True)
    rig.add(9, range(50, 54), max_tokens=4)
    rig.step()
    assert sampled(rig.step(max_step_tokens=2)) == [9]
    assert sampled(rig.step(max_step_tokens=3)) == [1, 2, 3]
    run(rig)


def test_beams_stall_together() -> None:
    rig = make_rig(6, reserve_steps=0, max_stalled_fraction=1.0)
    rig.add(1, range(100, 108), max_tokens=3)
    rig.add(5, range(8), max_tokens=2, width=2, beams=True)
    rig.step()
    other = rig.manager.open_namespace()
    rig.manager.allocate(other, [AllocationRequest(1, np.arange(500, 501))])
    batch = rig.step()
    assert (sampled(batch), batch.num_stalled) == ([1], 2)
    run(rig)


def test_beams_without_room_for_their_sequences_wait_together() -> None:
    rig = make_rig(blocks={"max_sequences": 3})
    rig.add(1, PROMPT, max_tokens=4, width=3, beams=True)
    batch = rig.begin()
    other = rig.manager.open_namespace()
    rig.manager.allocate(other, [AllocationRequest(1, np.arange(500, 504))])
    rig.end(batch)
    assert rig.step().counts == (1, 0, 0)
    rig.manager.close_namespace(other)
    run(rig)
    assert rig.finished == [1]


def test_parked_beams_without_the_first_one() -> None:
    """The first beam ends with its first token, while there is no room for the others."""
    rig = make_rig(blocks={"max_sequences": 3})
    rig.add(1, PROMPT, max_tokens=4, width=3, beams=True, stop_lengths=[11, 14, 14])
    batch = rig.begin()
    other = rig.manager.open_namespace()
    rig.manager.allocate(other, [AllocationRequest(1, np.arange(500, 504)), AllocationRequest(2, np.arange(600, 604))])
    rig.end(batch)
    rig.step()
    rig.manager.close_namespace(other)
    rig.run()
    rig.check_outputs()
    assert rig.finished == [1]


def test_an_aborted_request_ends_all_its_beams() -> None:
    rig = make_rig(16, reserve_steps=0, max_stalled_fraction=0.0)
    rig.add(1, range(100, 136), max_tokens=12)
    rig.add(5, PROMPT, max_tokens=9, width=3, beams=True)
    while not any(batch.preempted for batch in rig.batches):
        rig.step()
    rig.abort(5)
    assert len(rig.engine) == 1
    rig.run()
    assert rig.finished == [1]


def beams_in_batch() -> tuple[EngineRig, ScheduledBatch]:
    rig = make_rig()
    rig.add(1, PROMPT, max_tokens=4, width=2, beams=True)
    rig.add(5, PROMPT, max_tokens=4, width=2, beams=True)
    rig.add(9, PROMPT, max_tokens=4, width=2)
    while len(sampled(batch := rig.begin())) < 6:
        rig.end(batch)
    assert sampled(batch) == [1, 2, 5, 6, 9, 10]
    return rig, batch


BAD_PARENTS: list[tuple[Any, ...]] = [
    ([1, 2, 5, 6, 9], "parents"),
    ([1, 2, 5, 6, 9, 9], "parents[5]"),
    ([5, 2, 5, 6, 9, 10], "parents[0]"),
    ([1, 3, 5, 6, 9, 10], "parents[1]"),
    ([1, -1, 5, 6, 9, 10], "parents[1]"),
    ([1.5] * 6, "parents"),
]


def test_bad_parents_change_nothing() -> None:
    with each_row() as row:
        for parents, field in BAD_PARENTS:
            with row((parents, field)):
                rig, batch = beams_in_batch()
                with pytest.raises(InvalidArgumentError) as refused:
                    rig.engine.update(Report(batch.number, [0] * 6, parents=parents))
                assert refused.value.field == field
                rig.end(batch)
                run(rig)


def test_what_can_never_run_together_is_refused() -> None:
    rig = make_rig(10, max_step_tokens=4, max_running=8)
    with pytest.raises(OutOfBlocksError) as refused:
        rig.engine.add(Request(1, PROMPT, 6, width=3, beams=True))
    assert (refused.value.never, refused.value.required, refused.value.field) == (True, 12, "width")
    with pytest.raises(InvalidArgumentError) as wide:
        rig.engine.add(Request(1, [1], 2, width=5, beams=True))
    assert wide.value.field == "width"
    with pytest.raises(InvalidArgumentError) as odd:
        rig.engine.add(Request(1, [1], 2, width=2, beams=1))  # type: ignore[arg-type]
    assert odd.value.field == "beams"
    small = make_rig(blocks={"max_request_blocks": 20}, max_running=4)
    with pytest.raises(QuotaExceededError) as much:
        small.engine.add(Request(1, PROMPT, 6, width=3, beams=True))
    assert much.value.metadata["limit"] == "max_request_blocks"
    rig.engine.add(Request(1, PROMPT, 6, width=3))
