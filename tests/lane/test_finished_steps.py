"""Lanes report the steps that they finish: to `take`, before the client sees the completion, and by an eventfd."""

from __future__ import annotations

import mmap
import select
from typing import Any

import pytest
from lane_rig import OK, SESSION_NUMBER, TIMEOUT_S, LaneRig, lane

from kvservice import _ext
from kvservice.errors import InvalidArgumentError


def is_readable(finished: _ext.FinishedSteps, timeout_s: float = 0.0) -> bool:
    return bool(select.select([finished.descriptor], [], [], timeout_s)[0])


def finish(rig: LaneRig, step_id: int) -> None:
    step = rig.publish(step_id, (1,), (5,))
    call = rig.tensors(step)
    for layer in range(rig.num_layers):
        rig.release_places()
        assert rig.call(step_id, layer, call) == OK


def test_whoever_has_seen_the_completion_finds_the_step() -> None:
    with lane() as rig:
        for step_id in range(300):
            finish(rig, step_id)
            assert rig.finished.take() == [(SESSION_NUMBER, step_id)]


def test_a_later_process_finds_the_steps_that_a_client_saw_finished() -> None:
    with lane() as rig:
        for step_id in range(1, 20):
            finish(rig, step_id)
            assert rig.kept_ids[step_id % 8] == step_id
        step = rig.publish(20, (1,), (5,))
        assert rig.call(20, 0, rig.tensors(step)) == OK
        assert sorted(rig.kept_ids) == [*range(12, 20)], "a layer of step 20 is missing"


def test_the_descriptor_is_readable_until_the_steps_are_taken() -> None:
    with lane() as rig:
        step = rig.publish(1, (1,), (5,))
        call = rig.tensors(step)
        assert rig.call(1, 0, call) == OK
        assert not is_readable(rig.finished), "a layer is missing"
        assert rig.call(1, 1, call) == OK
        assert is_readable(rig.finished, TIMEOUT_S)
        rig.release_places()
        finish(rig, 2)
        assert is_readable(rig.finished)
        assert rig.take_finished() == [1, 2]
        # The lane signals the second step after its completion, perhaps only now; then nothing is left to signal.
        rig.server.close()
        assert not is_readable(rig.finished)
        assert rig.take_finished() == []


def test_a_step_that_ended_meanwhile_is_taken_once() -> None:
    with lane() as rig:
        finish(rig, 1)
        rig.session.retire(1)
        assert rig.take_finished() == [1]
        assert rig.take_finished() == []


def test_sessions_share_the_queue_and_are_distinguished() -> None:
    with lane() as rig:
        other = _ext.LaneSession(rig.num_layers, rig.finished, 2**40)
        number = other.add_region(rig.region.ctypes.data, len(rig.region))
        assert number == rig.region_number
        first, rig.session = rig.session, other
        server = _ext.LaneServer(memory := lane_memory(), other, rig.executor, 20.0, rig.faults.append)
        client, rig.client = rig.client, _ext.LaneClient(memory, 20.0)
        finish(rig, 1)
        rig.session, rig.client = first, client
        rig.release_places()
        finish(rig, 1)
        assert rig.finished.take() == [(2**40, 1), (SESSION_NUMBER, 1)]
        server.close()


def lane_memory() -> memoryview:
    """Return memory for a lane, aligned to a page."""
    return memoryview(mmap.mmap(-1, _ext.LANE_BYTES))


def test_the_number_of_a_session_is_checked() -> None:
    number: Any
    for number in (None, 1.5, 2**63):
        with pytest.raises(InvalidArgumentError, match="number"):
            _ext.LaneSession(2, _ext.FinishedSteps(), number)
