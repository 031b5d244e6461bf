"""The limits on one operation of the block manager: what could exceed them is refused when it is added, or waits."""

from __future__ import annotations

from typing import Any

import pytest
from each_row import each_row
from schedule_rig import EngineRig, make_rig

from kvservice.errors import InvalidArgumentError, QuotaExceededError
from kvservice.scheduler import Request

LIMITS: dict[str, Any] = {"max_request_blocks": 48, "max_request_tokens": 150}
SETTINGS: dict[str, Any] = {"max_running": 8, "max_step_tokens": 64, "long_prefill_tokens": 8}


def rig_of(blocks: dict[str, Any], **settings: Any) -> EngineRig:
    return make_rig(400, blocks, **settings)


def test_long_prompts_take_turns_within_the_blocks_of_one_step() -> None:
    """Eight prompts of 25 blocks are computed in chunks; a step may have 48 blocks in all."""
    rig = rig_of(LIMITS, **SETTINGS)
    for number in range(8):
        rig.add(number, range(1000 * number, 1000 * number + 100), max_tokens=6)
    rig.run()
    assert sorted(rig.finished) == list(range(8))
    rig.check_outputs()


def test_every_admitted_prompt_reserves_its_lookahead_at_once() -> None:
    """A prompt that is admitted is in the step, so that no block of its lookahead is promised to others."""
    rig = rig_of(LIMITS | {"max_request_blocks": 100}, **SETTINGS, lookahead=12)
    for number in range(8):
        rig.add(number, range(1000 * number, 1000 * number + 100), max_tokens=6)
    while rig.engine.queues.requests:
        before = set(rig.engine.queues.prefilling)
        batch = rig.step()
        started = set(rig.engine.queues.prefilling) - before
        assert batch.step is None or started <= set(batch.step.sequence_ids.tolist())
    assert sorted(rig.finished) == list(range(8))
    rig.check_outputs()


def test_the_longest_request_runs_beside_decodes() -> None:
    rig = rig_of(LIMITS, **SETTINGS)
    for number in range(7):
        rig.add(number, range(1000 * number, 1000 * number + 5), max_tokens=20)
    rig.step()
    rig.add(9, range(9000, 9000 + 120), max_tokens=8)
    rig.run()
    assert sorted(rig.finished) == [*range(7), 9]
    rig.check_outputs()


LIMITED: list[tuple[Any, ...]] = [
    ({"max_request_blocks": 40}, "max_request_blocks"),
    ({"max_request_tokens": 110}, "max_request_tokens"),
]


def test_requests_beyond_the_limits_of_an_operation_are_refused() -> None:
    with each_row() as row:
        for options, limit in LIMITED:
            with row((options, limit)):
                rig = rig_of(LIMITS | options, **SETTINGS)
                rig.engine.add(Request(1, range(80), 16))
                with pytest.raises(QuotaExceededError) as caught:
                    rig.engine.add(Request(2, range(80), 32))
                assert (caught.value.field, caught.value.metadata["limit"]) == ("max_tokens", limit)


def test_a_prompt_leaves_room_for_the_lookahead() -> None:
    rig = rig_of({"max_sequence_tokens": 64}, lookahead=4)
    with pytest.raises(InvalidArgumentError) as caught:
        rig.engine.add(Request(1, range(60), 1))
    assert caught.value.field == "token_ids"
    rig.add(1, 59, max_tokens=1)
    rig.run()
    assert rig.finished == [1]


def test_budgets_beyond_the_limits_of_an_operation_are_refused() -> None:
    with each_row() as row:
        for settings in ({"max_step_tokens": 151}, {"max_running": 24}):
            with row(settings):
                with pytest.raises(QuotaExceededError) as caught:
                    rig_of(LIMITS, **SETTINGS | settings)
                assert caught.value.field == next(iter(settings))


def test_a_step_admits_a_limited_number_of_requests() -> None:
    rig = make_rig(1000, {"max_sequences": 1000}, max_running=900)
    for number in range(600):
        rig.add(number, [number], max_tokens=2)
    batches = [rig.step() for _ in range(3)]
    assert [len(batch.sampled) - batch.num_decodes for batch in batches] == [256, 256, 88]
    rig.run()
    assert len(rig.finished) == 600
