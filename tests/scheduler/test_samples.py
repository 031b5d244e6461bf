"""Requests with several samples: one prefill, then sequences that decode, stall, wait and end one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from each_row import each_row
from schedule_rig import EngineRig, make_rig

from kvservice.blocks import AllocationRequest
from kvservice.errors import DuplicateSequenceError, InvalidArgumentError
from kvservice.scheduler import Request


def held_blocks(rig: EngineRig) -> int:
    stats = rig.manager.stats()
    return stats.active_blocks + stats.shared_blocks


def test_samples_share_one_prefill_and_get_the_tokens_that_each_gets_alone() -> None:
    rig = make_rig()
    rig.add(1, 10, max_tokens=6, width=3)
    first = rig.step()
    assert first.num_tokens == 10
    assert (first.sampled.tolist(), first.sampled_rows.tolist()) == ([1, 2, 3], [0, 0, 0])
    assert held_blocks(rig) == 3
    second = rig.step()
    assert second.step is not None
    assert len(second.step.copies) == 2  # the last of the three keeps the block
    rig.run()
    rig.check_outputs()
    assert rig.finished == [1]
    assert len({tuple(rig.outputs[name]) for name in (1, 2, 3)}) == 3
    assert rig.computed_tokens == 10 + 3 * 5


def test_each_sample_ends_at_its_stop_length() -> None:
    rig = make_rig()
    rig.add(1, 10, max_tokens=6, width=4, stop_lengths=[13, 11, 40, 12])
    rig.run()
    assert [len(rig.outputs[name]) for name in (1, 2, 3, 4)] == [3, 1, 6, 2]
    rig.check_outputs()


def test_a_request_whose_samples_all_end_at_the_first_token_is_over() -> None:
    rig = make_rig()
    rig.add(1, 10, max_tokens=1, width=3)
    rig.step()
    assert rig.finished == [1]
    assert len(rig.engine) == len(rig.namespace) == 0


def test_a_request_waits_for_places_for_all_its_samples() -> None:
    rig = make_rig(max_running=4)
    rig.add(1, 5, max_tokens=4, width=2)
    rig.add(2 + 8, range(50, 55), max_tokens=2, width=3)
    assert rig.step().counts == (1, 2, 0)
    rig.run()
    assert rig.finished == [1, 10]
    assert all(batch.counts.running <= 4 for batch in rig.batches)


def test_a_sample_without_room_for_its_sequence_waits() -> None:
    rig = make_rig(blocks={"max_sequences": 3})
    rig.add(1, 8, max_tokens=4, width=3)
    batch = rig.begin()
    other = rig.manager.open_namespace()
    rig.manager.allocate(other, [AllocationRequest(1, np.arange(500, 504))])
    rig.end(batch)
    assert rig.step().counts == (1, 2, 0)
    rig.manager.close_namespace(other)
    rig.run()
    rig.check_outputs()
    assert rig.finished == [1]


def test_copies_of_shared_blocks_are_counted_before_the_step() -> None:
    rig = make_rig(3, reserve_steps=0, max_stalled_fraction=1.0)
    rig.add(1, 6, max_tokens=2, width=3)
    rig.step()
    batch = rig.step()
    assert batch.num_stalled == 2
    assert batch.step is not None
    assert (batch.step.sequence_ids.tolist(), len(batch.step.copies)) == ([1], 1)
    rig.run()
    rig.check_outputs()


def test_lookahead_blocks_are_reserved_for_each_sample() -> None:
    rig = make_rig(lookahead=6)
    rig.add(1, 6, max_tokens=6, width=2)
    rig.step()
    assert held_blocks(rig) == 2
    rig.step()
    assert held_blocks(rig) == 1 + 2 * 3
    rig.run()
    rig.check_outputs()


def test_an_abort_ends_running_and_waiting_samples() -> None:
    rig = make_rig(4, reserve_steps=0, max_stalled_fraction=0.0)
    rig.add(1, 12, max_tokens=4, width=3)
    rig.step()
    batch = rig.begin()
    assert batch.counts == (2, 1, 0)
    rig.abort(1)
    rig.end(batch)
    assert rig.finished == [1]
    assert len(rig.engine) == len(rig.namespace) == 0


def test_the_ids_of_all_samples_are_reserved_until_the_request_is_over() -> None:
    rig = make_rig()
    rig.add(5, 6, max_tokens=3, width=3, stop_lengths=[7, 20, 20])
    for _ in range(2):
        for request in (Request(7, [1], 1), Request(5, [1], 1), Request(3, [1], 1, width=3)):
            with pytest.raises(DuplicateSequenceError) as refused:
                rig.engine.add(request)
            assert refused.value.field == "request_id"
        rig.step()
    rig.run()
    rig.add(7, 6)
    rig.run()


BAD_SAMPLES: list[tuple[Any, ...]] = [
    ({"width": 0}, "width"),
    ({"width": 6}, "width"),
    ({"width": True}, "width"),
    ({"width": 2, "stop_lengths": [9]}, "stop_lengths"),
    ({"width": 2, "stop_lengths": [9, 4]}, "stop_lengths[1]"),
    ({"width": 2, "stop_lengths": "ab"}, "stop_lengths"),
    ({"request_id": 2**63 - 2, "width": 3}, "request_id"),
]


def test_bad_samples_are_refused() -> None:
    with each_row() as row:
        for options, field in BAD_SAMPLES:
            with row((options, field)):
                rig = make_rig(max_running=5)
                with pytest.raises(InvalidArgumentError) as refused:
                    rig.engine.add(Request(**{"request_id": 1, "token_ids": [1, 2, 3, 4], "max_tokens": 5, **options}))
                assert refused.value.field == field
                assert len(rig.engine) == 0
