"""Descriptions of requests. The rig compares them with the model before every step of every other test."""

from __future__ import annotations

import pytest
from schedule_rig import EngineRig, alone, make_rig

from kvservice.errors import InvalidArgumentError, UnknownSequenceError
from kvservice.scheduler import Phase, PreemptionMode


def phases(rig: EngineRig) -> dict[int, Phase]:
    return {one.request_id: one.phase for one in rig.engine.describe()}


def test_a_request_is_described_in_every_phase() -> None:
    rig = make_rig(
        9, {"num_swap_blocks": 10}, max_step_tokens=20, reserve_steps=0, max_stalled_fraction=0.0,
        preemption=PreemptionMode.SWAP,
    )  # fmt: skip
    rig.add(1, range(16), max_tokens=9)
    rig.add(2, range(100, 115), max_tokens=9)
    rig.add(3, range(200, 203), max_tokens=9)
    rig.step()
    assert phases(rig) == {1: Phase.DECODING, 2: Phase.PREFILLING, 3: Phase.WAITING}
    rig.check_descriptions()
    for _ in range(3):
        rig.step()
    assert phases(rig)[2] is Phase.SWAPPED
    rig.check_descriptions()


def test_a_finished_sample_is_described_until_its_request_is_over() -> None:
    rig = make_rig()
    rig.add(4, 5, max_tokens=4, width=2, stop_lengths=[7, 9])
    for _ in range(3):
        rig.step()
    (request,) = rig.engine.describe([4])
    assert [one.finished for one in request.samples] == [True, False]
    assert request.samples[0].token_ids.tolist() == [*range(5), *alone(list(range(5)), 2)]
    rig.run()
    assert rig.engine.describe() == []


def test_descriptions_are_paged_and_named() -> None:
    rig = make_rig()
    for i in range(5):
        rig.add(i, range(10 * i, 10 * i + 3))
    assert [one.request_id for one in rig.engine.describe(first=1, limit=2)] == [1, 2]
    assert [one.request_id for one in rig.engine.describe(first=9)] == []
    assert [one.request_id for one in rig.engine.describe([3, 0])] == [3, 0]


def test_unknown_requests_cannot_be_described() -> None:
    rig = make_rig()
    rig.add(1, 3, width=2)
    for request_id in (2, 7):
        with pytest.raises(UnknownSequenceError) as refused:
            rig.engine.describe([1, request_id])
        assert refused.value.field == "request_ids[1]"
    with pytest.raises(InvalidArgumentError, match="negative"):
        rig.engine.describe([-1])
