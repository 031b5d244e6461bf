"""Lane calls that are answered when their kernels are launched; the client's stream waits for the lane's event."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

pytest.importorskip("kvservice._cuda", reason="kvservice was built without CUDA")

import lane_by_event
from cuda_lane import DONE, REGION_BYTES, CudaLane, DeviceRegion, HostRegion, Step, cuda_lane, host_memory, start_client
from gpu_peer import Peer, peer

from kvservice import _cuda
from kvservice.devices.compute import Compute
from kvservice.devices.cuda_lanes import CudaLaneSession

NUM_LAYERS, NUM_HEADS = 32, 8
HALF = REGION_BYTES // 2
Tensors = Sequence[np.ndarray]


@pytest.fixture
def lane() -> Iterator[CudaLane]:
    with cuda_lane(num_layers=NUM_LAYERS) as running:
        warm_up(running)
        yield running


@pytest.fixture
def client() -> Iterator[Peer]:
    with peer() as other:
        yield other


def connect(lane: CudaLane, client: Peer, fd: int, num_bytes: int = REGION_BYTES) -> int:
    """Register the client's memory as a region and connect the client to the lane that was opened last."""
    client.send_fd(fd)
    handle = client.run(start_client, num_bytes)
    client.run(lane_by_event.client_open_event, lane.servers[-1].event_handle)
    return lane.add_region(DeviceRegion(_cuda.IpcMemory(0, handle, num_bytes)))


def open_step(lane: CudaLane) -> Step:
    return lane.open_step(0, [1] * 4, [700] * 4)


def warm_up(lane: CudaLane) -> None:
    """Launch each kernel once, because the first launch of a kernel synchronizes the device."""
    step = lane.open_step(-2, [1] * 4, [700] * 4)
    tensors = lane.tensors(step, NUM_HEADS)
    answered(lane, step, tensors, lane.host)
    answered(lane, lane.reopen(step, -1), tensors, lane.device)
    assert sorted(lane.session.take_finished()) == [-2, -1]
    for layer in range(NUM_LAYERS):
        lane.expected(step, layer, *tensors)


def answered(lane: CudaLane, step: Step, tensors: Tensors, region: int, **options: Sequence[object]) -> np.ndarray:
    """Return the outputs of all layers of such a step. Each call is waited for."""
    places = lane.put(region, tensors)
    outputs = []
    for layer in range(NUM_LAYERS):
        chosen = {name: value[layer] for name, value in options.items()}
        outputs.append(lane.attend(step, layer, tensors[0], places, region, **chosen)[0])
    return np.stack(outputs)


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


def test_a_stream_of_another_process_goes_on_when_the_call_is_done(lane: CudaLane, client: Peer) -> None:
    """128 consecutive calls exceed the number of calls that may be in flight."""
    fd, _ = lane.open_lane()
    region = connect(lane, client, fd)
    first = open_step(lane)
    steps = [first, *(lane.reopen(first, number) for number in range(1, 4))]
    tensors = [lane.tensors(step, NUM_HEADS) for step in steps]
    lane.hold_back()
    numbers = [step.number for step in steps]
    assert client.run(lane_by_event.client_attend, numbers, NUM_LAYERS, region, tensors)
    found = client.run(lane_by_event.client_copies, tensors[0][0]).reshape(4, NUM_LAYERS, *tensors[0][0].shape)
    assert lane.session.take_finished() == numbers
    for number, triple in enumerate(tensors):
        again = lane.reopen(first, 10 + number)
        assert_same(found[number], answered(lane, again, triple, lane.device))
    for triple in tensors:  # the slots hold the last triple
        for layer in range(NUM_LAYERS):
            lane.expected(first, layer, *triple)
    lane.check_pool()


def test_each_call_has_its_own_slopes(lane: CudaLane) -> None:
    step = open_step(lane)
    tensors = lane.tensors(step, NUM_HEADS)
    slopes = [np.full(NUM_HEADS, 0.003 * (layer + 1), np.float32) for layer in range(NUM_LAYERS)]
    places = lane.put(lane.host, [*tensors, *slopes])
    query, options = tensors[0], {"alibi_slopes": places[3:]}
    lane.hold_back()
    to = lane.device, HALF
    at = [*lane_by_event.submit(lane.client, 0, NUM_LAYERS, places[:3], query, to, **options)]
    lane.stream.synchronize()
    found = np.stack([lane.get((lane.device, offset), query.shape, query.dtype) for offset in at])
    again = lane.reopen(step, 1)
    expected = [
        lane.attend(again, layer, query, places[:3], lane.device, alibi_slopes=options["alibi_slopes"][layer])[0]
        for layer in range(NUM_LAYERS)
    ]
    assert_same(found, np.stack(expected))
    plain = answered(lane, lane.reopen(step, 2), tensors, lane.device)
    assert all((one != other).any() for one, other in zip(found, plain, strict=True))


def test_host_memory_that_is_given_up_after_the_answer() -> None:
    """The memory stays pinned, and the device writes to it, until the calls are done."""
    compute = Compute(_cuda, 0)
    with cuda_lane(num_layers=NUM_LAYERS, stream=compute.stream) as lane:
        warm_up(lane)
        session = CudaLaneSession(_cuda, NUM_LAYERS, compute)
        session.native = lane.session
        memory = HostRegion(page_locked=False)
        number = session.add_region(memory.pointer, REGION_BYTES)
        lane.regions[number] = memory
        step = open_step(lane)
        tensors = lane.tensors(step, NUM_HEADS)
        places, query = lane.put(number, tensors), tensors[0]
        lane.hold_back()
        at = [*lane_by_event.submit(lane.client, 0, NUM_LAYERS, places, query, (number, HALF))]
        assert not lane.stream.idle()
        session.remove_region(number)
        found = np.stack([lane.get((number, offset), query.shape, query.dtype) for offset in at])
        assert_same(found, answered(lane, lane.reopen(step, 1), tensors, lane.host))
        late = lane.client.submit(0, 0, False, NUM_HEADS, *places, (number, HALF), None, by_event=True)
        assert lane.client.wait(late, 30.0)[:2] == ("UNKNOWN_REGION", "query")


def test_device_memory_that_is_given_up_after_the_answer(lane: CudaLane, client: Peer) -> None:
    fd, _ = lane.open_lane()
    region = connect(lane, client, fd)
    step = open_step(lane)
    tensors = lane.tensors(step, NUM_HEADS)
    lane.hold_back()
    assert client.run(lane_by_event.client_attend, [0], NUM_LAYERS, region, [tensors])
    lane.session.remove_region(region)
    lane.regions.pop(region).close()
    found = client.run(lane_by_event.client_outputs, tensors[0])
    assert_same(found, answered(lane, lane.reopen(step, 1), tensors, lane.device))


def test_a_lane_is_closed_when_its_calls_are_done(lane: CudaLane) -> None:
    step = open_step(lane)
    tensors = lane.tensors(step, NUM_HEADS)
    places, query = lane.put(lane.device, tensors), tensors[0]
    lane.hold_back()
    at = [*lane_by_event.submit(lane.client, 0, NUM_LAYERS, places, query, (lane.device, HALF))]
    assert not lane.stream.idle()
    lane.servers[0].close()
    assert lane.stream.idle()
    found = np.stack([lane.get((lane.device, offset), query.shape, query.dtype) for offset in at])
    _, lane.client = lane.open_lane()
    assert_same(found, answered(lane, lane.reopen(step, 1), tensors, lane.device))


def test_a_client_killed_after_the_answer_harms_nobody(lane: CudaLane) -> None:
    before = int(_cuda.memory_info(0)[0])
    step = open_step(lane)
    for number in range(1, 7, 2):
        with peer() as client:
            fd, _ = lane.open_lane()
            region = connect(lane, client, fd, 2 << 30)
            killed = lane.reopen(step, number)
            tensors = lane.tensors(killed, NUM_HEADS)
            lane.hold_back()
            assert client.run(lane_by_event.client_attend, [number], NUM_LAYERS, region, [tensors])
            client.kill()
        # The K/V of this step are in the pool. The next step writes to the same slots.
        assert lane.session.take_finished() == [number]
        lane.stream.synchronize()
        for layer in range(NUM_LAYERS):
            lane.expected(killed, layer, *tensors)
        lane.check_pool()
        honest = lane.reopen(step, number + 1)
        lane.check(honest, 0, NUM_HEADS, lane.host, lane.device)
        lane.servers.pop().close()
        lane.session.retire(number)
        lane.session.remove_region(region)
        lane.regions.pop(region).close()
    assert int(_cuda.memory_info(0)[0]) > before - (3 << 30)


def test_a_lane_without_an_event_refuses(lane: CudaLane) -> None:
    memory = host_memory(_cuda.LANE_BYTES)[1]
    server = _cuda.LaneServer(memory, lane.session, lane.executor, 50.0, lane.faults.append)
    assert server.event_handle == b""
    client = _cuda.LaneClient(memory, 50.0)
    step = open_step(lane)
    places = lane.put(lane.host, lane.tensors(step, NUM_HEADS))
    call = 0, 0, False, NUM_HEADS, *places, (lane.host, HALF), None
    reason, field, _ = client.wait(client.submit(*call, by_event=True), 30.0)
    assert (reason, field) == ("INVALID_ARGUMENT", "completion")
    assert step.written == bytes(NUM_LAYERS)
    assert client.wait(client.submit(*call), 30.0) == DONE
    server.close()
