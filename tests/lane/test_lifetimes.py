"""Steps, regions and lanes that are removed while calls are in flight; several lanes at the same time."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from lane_rig import OK, TIMEOUT_S, LaneRig, StepArrays, lane
from lane_ring import COMPLETED

from kvservice import _ext
from kvservice.errors import ConnectionLostError
from kvservice.telemetry.tables import BUCKETS_S

# A call of these shapes takes tens of milliseconds.
SLOW = {"num_layers": 2, "head_size": 64, "block_size": 16, "num_blocks": 256, "region_bytes": 16 << 20}


NUM_WAITING = 16


def slow_step(rig: LaneRig) -> StepArrays:
    return rig.publish(1, (512,), (4096,))


def wait_until(condition: Callable[[], Any]) -> None:
    while not condition():
        pass


def test_buckets_are_those_of_the_other_calls() -> None:
    assert _ext.LANE_BUCKETS == BUCKETS_S
    assert _ext.LANE_BYTES % 4096 == 0


@pytest.mark.parametrize("what", ["step", "region"])
def test_what_a_call_uses_goes_when_it_is_done(what: str) -> None:
    with lane(**SLOW) as rig:
        step = slow_step(rig)
        call = rig.tensors(step)
        output, _, _ = rig.expected(step, 1, call)
        number, got, _ = rig.submit(1, 1, call)
        wait_until(lambda: step.written[1])
        if what == "step":
            rig.session.retire(1)
        else:
            rig.session.remove_region(rig.region_number)
        assert got.tobytes() == output.tobytes()
        assert rig.wait(number) == OK
        assert rig.call(1, 0, call)[0] == {"step": "STALE_STEP", "region": "UNKNOWN_REGION"}[what]


def test_several_may_wait_for_the_same_to_go() -> None:
    with lane(**SLOW) as rig, ThreadPoolExecutor(6) as threads:
        step = slow_step(rig)
        call = rig.tensors(step)
        number, _, _ = rig.submit(1, 1, call)
        wait_until(lambda: step.written[1])
        going = [threads.submit(rig.session.retire, 1) for _ in range(3)]
        going += [threads.submit(rig.session.remove_region, rig.region_number) for _ in range(3)]
        for gone in going:
            gone.result(TIMEOUT_S)
        assert rig.wait(number) == OK


def test_a_step_and_its_arrays_live_until_it_is_retired() -> None:
    with lane() as rig:
        step = rig.publish(1, (1,), (5,))
        call = rig.tensors(step)
        output, _, _ = rig.expected(step, 0, call)
        rig.publish(2, (1,), (5,), first_block=8)
        with pytest.raises(BufferError):
            step.written.append(0)
        kept = step.written
        del step
        gc.collect()
        number, got, _ = rig.submit(1, 0, call)
        assert rig.wait(number) == OK
        assert got.tobytes() == output.tobytes()
        rig.session.retire(1)
        kept.append(0)


def test_closing_ends_a_wait_and_is_done_once() -> None:
    with lane(**SLOW | {"region_bytes": 64 << 20}) as rig, ThreadPoolExecutor(1) as threads:
        # There are too many calls to compute all of them before the lane is closed.
        steps = [rig.publish(number, (512,), (4096,)) for number in range(1, NUM_WAITING + 1)]
        call = rig.tensors(steps[0])
        output, _, _ = rig.expected(steps[0], 0, call)
        (first, got, _), *_, (last, _, _) = [rig.submit(number, 0, call) for number in range(1, NUM_WAITING + 1)]
        waiting = threads.submit(rig.client.wait, last, TIMEOUT_S)
        wait_until(lambda: steps[0].written[0])
        rig.server.close()
        assert rig.server.closed
        with pytest.raises(ConnectionLostError, match="closed"):
            waiting.result(TIMEOUT_S)
        assert got.tobytes() == output.tobytes()
        assert rig.wait(first) == OK  # the answer came before the lane ended
        assert 1 <= rig.server.stats()[0] < NUM_WAITING
        rig.server.close()
        with pytest.raises(ConnectionLostError, match="closed"):
            rig.submit(1, 1, call)


def test_a_sleeping_server_is_closed_and_dropped() -> None:
    """The test would hang if the sleeping thread were not woken."""
    for _ in range(20):
        with lane(spin_us=0.0) as rig:
            rig.publish(1, (1,), (5,))
            server = _ext.LaneServer(lane_memory(), rig.session, rig.executor, 0.0, print)
            del server


def lane_memory() -> Any:
    memory = np.zeros(_ext.LANE_BYTES + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + _ext.LANE_BYTES]


def test_time_runs_out() -> None:
    with lane(**SLOW) as rig:
        step = slow_step(rig)
        number, _, _ = rig.submit(1, 0, rig.tensors(step))
        wait_until(lambda: step.written[0])
        assert rig.client.wait(number, 0.0) is None
        assert rig.wait(number) == OK


def test_many_calls_of_some_lanes_do_not_keep_another_waiting() -> None:
    """Eight consecutive calls on one lane finish among the first of 64 queued calls on each of two other lanes."""
    shape = {"num_layers": 64, "head_size": 64, "block_size": 16, "num_blocks": 80, "region_bytes": 16 << 20}
    with lane(**shape) as flood, lane(shared_with=flood, **shape) as second, lane(shared_with=flood, **shape) as other:
        single = other.tensors(other.publish(1, (1,), (256,), first_block=64))
        numbers = {}
        for rig, first_block in ((flood, 0), (second, 32)):
            call = rig.tensors(rig.publish(1, (256,), (512,), first_block))
            tensors = [rig.put(call.query), rig.put(call.key), rig.put(call.value), rig.reserve(call.query.nbytes)]
            numbers[rig] = [rig.client.submit(1, layer, False, 4, *tensors, None) for layer in range(64)]
        for layer in range(8):
            assert other.call(1, layer, single) == OK
        for rig in numbers:
            assert rig.word(COMPLETED)[0] < 40  # 8 on an idle machine
        for rig, sent in numbers.items():  # closing the lanes ends the other calls
            assert [rig.wait(number) for number in sent[:12]] == [OK] * 12


def test_a_step_is_finished_by_the_lane_that_is_done_last() -> None:
    with lane(**SLOW) as rig:
        memory = lane_memory()
        server = _ext.LaneServer(memory, rig.session, rig.executor, 20.0, rig.faults.append)
        client = _ext.LaneClient(memory, 20.0)
        step = slow_step(rig)
        call = rig.tensors(step)
        query, key, value = rig.put(call.query), rig.put(call.key), rig.put(call.value)
        output = rig.reserve(call.query.nbytes)
        first = rig.client.submit(1, 0, False, 4, query, key, value, output, None)
        wait_until(lambda: step.written[0])
        last = client.submit(1, 1, False, 4, query, key, value, output, None)
        wait_until(lambda: step.written[1])
        assert rig.wait(first) == OK
        assert client.wait(last, TIMEOUT_S) == OK
        assert rig.take_finished() == [1]
        server.close()


def test_lanes_of_one_session_finish_a_step_together() -> None:
    with lane(num_layers=64) as rig:
        memory = lane_memory()
        server = _ext.LaneServer(memory, rig.session, rig.executor, 20.0, rig.faults.append)
        client = _ext.LaneClient(memory, 20.0)
        for step_id in range(1, 21):
            rig.release_places()
            call = rig.tensors(rig.publish(step_id, (1,), (5,)))
            query, key, value = rig.put(call.query), rig.put(call.key), rig.put(call.value)
            output = rig.reserve(call.query.nbytes)
            sent = [
                (end, end.submit(step_id, layer, True, 4, query, key, value, output, None))
                for layer in range(64)
                for end in (rig.client, client)
                if layer % 2 == (end is client) or layer % 8 == 0
            ]
            answers = [end.wait(number, TIMEOUT_S) for end, number in sent]
            assert sum(answer == OK for answer in answers) == 64
            assert {answer[0] for answer in answers if answer} == {"", "LAYER_WRITTEN"}
            assert rig.take_finished() == [step_id]
            rig.session.retire(step_id)
        server.close()


@pytest.mark.timeout(20)  # a lost wake-up costs 0.1 s each, 80 s in all
def test_both_sides_sleep_and_wake() -> None:
    with lane(spin_us=0.0) as rig:
        for step_id in range(400):
            rig.release_places()
            call = rig.tensors(rig.publish(step_id, (1,), (5,)))
            number, _, _ = rig.submit(step_id, 0, call)
            with ThreadPoolExecutor(1) as threads:
                assert threads.submit(rig.wait, number).result(TIMEOUT_S) == OK
        assert rig.server.stats()[:2] == (400, 0)
