"""Batches that are made while the one before is computed."""

from __future__ import annotations

import pytest
from each_row import each_row
from schedule_rig import EngineRig, make_rig

from kvservice.errors import DuplicateSequenceError, FailedPreconditionError, InvalidArgumentError
from kvservice.scheduler import PreemptionMode, QueueOrder, Report, check_integrity


def filled(rig: EngineRig, count: int, prompt: int = 6, **options: int) -> EngineRig:
    """Add requests with different prompts."""
    for i in range(count):
        rig.add(i, range(100 * i, 100 * i + prompt), **options)
    return rig


def sizes(rig: EngineRig) -> list[tuple[int, int]]:
    """Return (decodes, tokens) of each batch."""
    return [(batch.num_decodes, batch.num_tokens) for batch in rig.batches if batch.step is not None]


def test_decodes_go_on_before_their_tokens_are_reported() -> None:
    """The tokens are those of a run without it, and no step is lost between the decodes."""
    with each_row() as row:
        for late in (False, True):
            for lookahead in (0, 3):
                with row((late, lookahead)):
                    rig = filled(make_rig(lookahead=lookahead), 3, max_tokens=10)
                    rig.late = late
                    rig.run_ahead()
                    rig.check_outputs()
                    assert sorted(rig.finished) == [0, 1, 2]
                    assert sizes(rig) == [(0, 18), *[(3, 3)] * 9]
                    assert rig.manager.stats().sequences == 0


def test_prompts_go_on_in_chunks() -> None:
    rig = filled(make_rig(max_step_tokens=5), 1, prompt=18, max_tokens=3)
    first, second = rig.begin(), rig.begin()
    assert (first.num_tokens, second.num_tokens) == (5, 5)
    assert first.step is not None
    assert second.step is not None
    assert second.step.context_lens.tolist() == [10]
    rig.settle()
    rig.run_ahead()
    rig.check_outputs()
    assert rig.finished == [0]


def test_new_prompts_join_a_batch_ahead() -> None:
    rig = filled(make_rig(), 1, max_tokens=6)
    rig.step()
    rig.begin()
    rig.add(7, range(700, 706), max_tokens=3)
    ahead = rig.begin()
    assert (ahead.num_decodes, ahead.num_tokens) == (1, 7)
    rig.settle()
    rig.run_ahead()
    rig.check_outputs()


def test_a_request_with_its_last_token_is_not_in_the_next_batch() -> None:
    rig = filled(make_rig(), 2, max_tokens=5)
    rig.add(7, range(700, 706), max_tokens=2)
    rig.step()
    assert rig.begin().sampled.tolist() == [0, 1, 7]
    assert rig.begin().sampled.tolist() == [0, 1]
    rig.settle()
    assert rig.finished == [7]


def test_a_request_that_ends_by_itself_is_computed_in_vain() -> None:
    """It ends with the report of the first batch, and the second one keeps its blocks until its own report."""
    rig = filled(make_rig(), 2, max_tokens=9, stop=2)
    rig.stops[1] = 9
    rig.step()
    first, second = rig.begin(), rig.begin()
    assert second.sampled.tolist() == [0, 1]
    rig.end(first)
    assert rig.finished == [0]
    with pytest.raises(DuplicateSequenceError):
        rig.add(0, [1, 2])
    check_integrity(rig.engine)
    with pytest.raises(InvalidArgumentError) as caught:
        rig.engine.update(Report(second.number, [5, 6]))
    assert caught.value.field == "token_ids"
    rig.end(second)
    assert rig.manager.stats().sequences == 1
    rig.run_ahead()
    rig.check_outputs()


def test_the_tokens_of_a_sequence_that_ended_are_cached() -> None:
    rig = filled(make_rig(), 1, prompt=7, max_tokens=9, stop=2)
    rig.run_ahead()
    tokens = [*rig.prompts[0], *rig.outputs[0]]
    assert rig.manager.match_prefix([*tokens[:8], 1]) == 8
    assert rig.manager.match_prefix([*tokens, 0, 0, 0, 0]) == 8


def test_an_abort_waits_for_the_last_batch_that_has_the_request() -> None:
    rig = filled(make_rig(), 2, max_tokens=9)
    rig.step()
    first, second = rig.begin(), rig.begin()
    rig.abort(0)
    rig.end(first)
    assert rig.finished == []
    third = rig.begin()
    assert third.sampled.tolist() == [1]
    rig.end(second)
    assert rig.finished == [0]
    rig.settle()
    rig.run_ahead()
    rig.check_outputs()


def test_an_aborted_prompt_gets_no_more_chunks() -> None:
    rig = filled(make_rig(max_step_tokens=4), 1, prompt=18)
    rig.begin()
    rig.abort(0)
    assert rig.begin().step is None
    rig.settle()
    assert rig.finished == [0]
    assert rig.manager.stats().sequences == 0


def test_samples_start_after_the_report_of_their_prompt() -> None:
    rig = make_rig()
    rig.add(0, range(6), max_tokens=4, width=3)
    first = rig.begin()
    assert first.sampled.tolist() == [0, 1, 2]
    assert rig.begin().step is None
    rig.settle()
    rig.run_ahead()
    rig.check_outputs()
    assert rig.finished == [0]


def test_nothing_is_preempted_while_a_batch_is_in_flight() -> None:
    """A batch ahead that would need it has no step, and the batch after the report preempts."""
    with each_row() as row:
        for preemption in PreemptionMode:
            with row(preemption):
                rig = filled(
                    make_rig(7, {"num_swap_blocks": 8}, preemption=preemption, max_stalled_fraction=0.0),
                    3,
                    max_tokens=12,
                )
                rig.late = True
                rig.run_ahead()
                rig.check_outputs()
                assert sorted(rig.finished) == [0, 1, 2]
                made_ahead = [batch for batch in rig.batches if batch.step is None]
                assert made_ahead
                assert not any(batch.preempted for batch in made_ahead)
                assert any(batch.preempted for batch in rig.batches)


def test_an_urgent_request_preempts_after_the_report() -> None:
    rig = filled(make_rig(8, order=QueueOrder.PRIORITY), 3, max_tokens=6, priority=1)
    rig.step()
    rig.begin()
    rig.add(7, range(700, 720), max_tokens=3, priority=0)
    assert rig.begin().step is None
    rig.settle()
    assert rig.begin().preempted
    rig.settle()
    rig.run_ahead()
    rig.check_outputs()


def test_two_batches_are_in_flight_at_most() -> None:
    rig = filled(make_rig(), 1, max_tokens=9)
    rig.step()
    rig.begin()
    with pytest.raises(FailedPreconditionError):
        rig.engine.schedule()
    second = rig.begin()
    with pytest.raises(FailedPreconditionError):
        rig.engine.schedule(ahead=True)
    with pytest.raises(FailedPreconditionError):
        rig.engine.update(Report(second.number, [1]))
    rig.settle()
    rig.run_ahead()
    rig.check_outputs()


def test_a_description_has_the_reported_tokens_only() -> None:
    rig = filled(make_rig(), 2, max_tokens=6)
    while len(rig.engine):
        rig.step_ahead()
        rig.check_descriptions()
    assert sorted(rig.finished) == [0, 1]


def test_a_retry_takes_the_batch_ahead_back() -> None:
    """The oldest batch is opened again, whether the lost steps were computed or not."""
    with each_row() as row:
        for late in (False, True):
            with row(late):
                rig = filled(make_rig(max_step_tokens=9), 2, max_tokens=8)
                rig.late = late
                rig.add(7, range(700, 720), max_tokens=4)
                while len(rig.engine):
                    first, second = rig.begin(), rig.begin()
                    again = rig.retry()
                    assert again.number == max(first.number, second.number) + 1
                    rig.settle()
                    check_integrity(rig.engine)
                    rig.manager.check_integrity()
                rig.check_outputs()
                assert sorted(rig.finished) == [0, 1, 7]
