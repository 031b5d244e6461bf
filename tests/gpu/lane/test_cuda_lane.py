"""Lanes over a pool on the GPU. Tensors are in host or GPU memory, of this process or of another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("kvservice._cuda", reason="kvservice was built without CUDA")

import cuda_lane as support
from cuda_lane import DONE, REGION_BYTES, CudaLane, DeviceRegion, check_close, cuda_lane, host_memory
from gpu_peer import download, peer

from kvservice import _cuda
from kvservice.errors import InvalidArgumentError


@pytest.fixture
def lane() -> Iterator[CudaLane]:
    with cuda_lane() as running:
        yield running


def answer(lane: CudaLane, *arguments: object, **options: object) -> tuple[str, str]:
    """Make a call and return reason and field of the answer."""
    reason, field, _ = lane.client.wait(lane.client.submit(*arguments, **options), 30.0)
    return reason, field


@pytest.mark.parametrize("out", ["host", "device"])
@pytest.mark.parametrize("region", ["host", "device"])
@pytest.mark.parametrize("dtype", support.DTYPES)
def test_decode_and_extend(dtype: str, region: str, out: str) -> None:
    with cuda_lane(dtype) as lane:
        places = getattr(lane, region), getattr(lane, out)
        steps = [
            lane.open_step(1, [1, 1, 1], [1, 40, 333]),
            lane.open_step(2, [70, 1, 9], [150, 5, 9]),
            lane.open_step(3, [700], [1000]),  # its query is too large for the fused copy
        ]
        for step in steps:
            for layer in range(lane.num_layers):
                lane.check(step, layer, 16, *places)
        lane.check_pool()
        assert sorted(lane.take_finished()) == [1, 2, 3]


def test_options(lane: CudaLane) -> None:
    """The lane's outputs are compared with the reference's."""
    step = lane.open_step(1, [1, 5], [100, 130])
    lane.check(step, 0, 8, lane.host, lane.device, scale=0.2, sliding_window=30, logits_soft_cap=7.0)
    for index, region in enumerate((lane.host, lane.device)):
        step = lane.open_step(2 + index, [1, 5], [100, 130])
        query, key, value = lane.tensors(step, 8)
        slopes = np.linspace(0.01, 0.5, 8, dtype=np.float32)
        places = lane.put(region, (query, key, value, slopes))
        output, _ = lane.attend(step, 0, query, places, lane.host, alibi_slopes=places[3])
        expected, _ = lane.expected(step, 0, query, key, value, alibi_slopes=slopes)
        check_close(output, expected, support.TOLERANCES["bfloat16"])


def test_block_sparse(lane: CudaLane) -> None:
    """A pattern whose local blocks cover the whole context changes nothing; one with few local blocks does."""
    step, again = lane.open_step(1, [1], [320]), lane.open_step(2, [1], [320])
    query, key, value = lane.tensors(step, 8)
    places = lane.put(lane.host, (query, key, value))
    all_of_it, _ = lane.attend(step, 0, query, places, lane.host, block_sparse=(4, 5, 64, 0, 0))
    expected, _ = lane.expected(step, 0, query, key, value)
    check_close(all_of_it, expected, support.TOLERANCES["bfloat16"])
    little, _ = lane.attend(again, 0, query, places, lane.host, block_sparse=(100, 1, 64, 0, 0))
    lane.expected(again, 0, query, key, value)
    assert np.linalg.norm(little.astype(float) - expected.astype(float)) > 0.1 * np.linalg.norm(expected.astype(float))
    step = lane.open_step(3, [1], [320])
    wrong = answer(lane, 3, 0, True, 8, *places, (lane.host, REGION_BYTES // 2), None, block_sparse=(4, 1, 40, 0, 0))
    assert wrong == ("INVALID_ARGUMENT", "options.block_sparse.block_size")
    assert step.written == bytes(2)
    lane.check_pool()


def test_a_workspace_that_grows() -> None:
    """The outputs before and after are compared with the reference's."""
    with cuda_lane(num_blocks=4000, num_layers=1, head_size=128) as lane:
        lane.check(lane.open_step(1, [1], [20000]), 0, 16, lane.device, lane.device)
        lane.check(lane.open_step(2, [1] * 40, [900] * 40), 0, 16, lane.device, lane.device)


def test_batch_invariance_is_bit_by_bit() -> None:
    with cuda_lane(batch_invariant=True, head_size=128, num_layers=1, num_blocks=600) as lane:
        together = lane.open_step(1, [1] * 7, [900, 100, 200, 300, 400, 500, 600])
        tensors = lane.tensors(together, 8)
        output, _ = lane.attend(together, 0, tensors[0], lane.put(lane.host, tensors), lane.host)
        alone = support.Step(
            2,
            together.slots[:1],
            together.query_lens[:1],
            together.context_lens[:1],
            together.block_tables[:1].copy(),
            None,
            together.addresses,
            bytearray(1),
        )
        arrays = alone.slots, alone.query_lens, alone.context_lens, alone.block_tables
        lane.session.publish(2, alone.written, *arrays, together.addresses)
        first = [tensor[:1] for tensor in tensors]
        again, _ = lane.attend(alone, 0, first[0], lane.put(lane.host, first), lane.host)
        np.testing.assert_array_equal(again[0].view(np.uint16), output[0].view(np.uint16))


def test_common_blocks_are_read_once() -> None:
    """There are enough sequences with a long common prefix to use the shared-prefix (cascade) kernel."""
    num_seqs, num_common = 128, 90
    with cuda_lane(num_blocks=400, num_layers=1, num_kv_heads=8, head_size=128) as lane:
        for number, region in enumerate((lane.host, lane.device)):
            step = lane.open_step(number, [1] * num_seqs, [1450] * num_seqs, num_common=num_common)
            lane.check(step, 0, 16, region, region)
        lane.check_pool()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_an_8_bit_pool_with_scales(dtype: str) -> None:
    """Results are bitwise equal to those of the kernels, with separate FP8 scales for each layer and head."""
    with cuda_lane("bfloat16", cache=dtype, num_layers=3, head_size=128) as lane:
        for number, lens in enumerate(([1, 1, 1], [40, 2, 1])):
            step = lane.open_step(number, lens, [90, 60, 300])
            for layer in (2, 0, 1):
                tensors = lane.tensors(step, 8)
                expected = lane.from_kernels(step, layer, *tensors)
                output, _ = lane.attend(step, layer, tensors[0], lane.put(lane.host, tensors), lane.host)
                np.testing.assert_array_equal(output.view(np.uint16), expected.view(np.uint16))
                assert np.linalg.norm(output.astype(float)) > 0
        np.testing.assert_array_equal(
            download(lane.pool.pointer, lane.pool_bytes), download(lane.twin.pointer, lane.pool_bytes)
        )


def test_several_lanes_at_once(lane: CudaLane) -> None:
    """The launches of the lanes interleave on one stream and share workspace and staging memory."""
    num_rounds, num_lanes = 40, 4
    lanes = [
        (
            lane.add_region(DeviceRegion(_cuda.DeviceMemory(0, REGION_BYTES)))
            if i % 2
            else lane.add_region(support.HostRegion()),
            lane.open_lane()[1],
        )
        for i in range(num_lanes)
    ]
    lens = [[1] * 3, [30, 1], [1], [9] * 4]
    jobs = []
    for number in range(num_rounds * num_lanes):
        which = number % num_lanes
        step = lane.open_step(number, lens[which], [60 + 7 * which] * len(lens[which]))
        tensors = lane.tensors(step, 8)
        jobs.append((which, step, tensors))
    errors: list[BaseException] = []
    # Steps write blocks that other steps read, so only results on data of a single lane are compared.
    results: dict[int, np.ndarray] = {}

    def work(which: int) -> None:
        region, client = lanes[which]
        try:
            for mine, step, tensors in jobs:
                if mine == which:
                    places = lane.put(region, tensors)
                    results[step.number] = lane.attend(step, 1, tensors[0], places, region, client)[1]
        except BaseException as error:
            errors.append(error)

    before = lane.host_pool.copy()
    threads = [threading.Thread(target=work, args=(which,)) for which in range(num_lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(results) == len(jobs)
    assert all(np.isfinite(lse).all() for lse in results.values())
    # All written slots have new values and nothing else changed. The order of two writes to the same slot is undefined.
    pool = download(lane.pool.pointer, before.nbytes).view(before.dtype).reshape(before.shape)
    touched = np.unique(np.concatenate([step.slots // lane.block_size for _, step, _ in jobs]))
    untouched = np.setdiff1d(np.arange(lane.num_blocks), touched)
    np.testing.assert_array_equal(pool[untouched].view(np.uint16), before[untouched].view(np.uint16))
    np.testing.assert_array_equal(pool[:, 0].view(np.uint16), before[:, 0].view(np.uint16))


def test_lanes_that_share_nothing_get_what_they_would_alone() -> None:
    with cuda_lane(num_blocks=400) as lane:
        whole = lane.open_step(10, [1] * 8 + [20] * 8, [200] * 16)
        parts = []
        for i in range(4):
            rows = slice(4 * i, 4 * i + 4)
            lens = whole.query_lens[rows]
            first = int(whole.query_lens[: 4 * i].sum())
            slots = whole.slots[first : first + int(lens.sum())]
            parts.append((slots, lens, whole.context_lens[rows], whole.block_tables[rows].copy()))
        clients = [(lane.add_region(support.HostRegion()), lane.open_lane()[1]) for _ in range(4)]
        found: dict[int, list[tuple[np.ndarray, int]]] = {i: [] for i in range(4)}
        jobs = []
        for number in range(20):
            for i, arrays in enumerate(parts):
                memory, addresses = support.upload_all(arrays)
                key = 100 + 4 * number + i
                tables = (*addresses, 0, int(arrays[1].max()))
                step = support.Step(key, *arrays, memory, tables, bytearray(2))
                lane.session.publish(key, step.written, *arrays, tables)
                jobs.append((i, step, lane.tensors(step, 8)))

        def work(which: int) -> None:
            region, client = clients[which]
            for i, step, tensors in jobs:
                if i == which:
                    output, _ = lane.attend(step, 1, tensors[0], lane.put(region, tensors), region, client)
                    found[which].append((output, step.number))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for which in range(4):
            mine = [(step, tensors) for i, step, tensors in jobs if i == which]
            assert len(found[which]) == len(mine)
            for (step, tensors), (output, _) in zip(mine, found[which], strict=True):
                expected, _ = lane.expected(step, 1, *tensors)
                check_close(output, expected, support.TOLERANCES["bfloat16"])
        lane.check_pool()


def test_memory_that_is_not_page_locked_is_refused(lane: CudaLane) -> None:
    step = lane.open_step(1, [1], [20])
    places = lane.put(lane.host, lane.tensors(step, 8))
    _, mapping, data = host_memory(REGION_BYTES)
    number = lane.session.add_region(data.ctypes.data, data.nbytes)
    good, bad = (lane.host, REGION_BYTES // 2), (number, 0)
    for index, field in enumerate(("query", "key", "value", "output_place", "lse_place")):
        wrong = [*places, good, None]
        wrong[index] = bad
        assert answer(lane, 1, 0, True, 8, *wrong) == ("INVALID_ARGUMENT", field)
    assert step.written == bytes(2)
    lane.check_pool()
    lane.check(step, 0, 8, lane.host, lane.host)
    lane.session.remove_region(number)
    del data, mapping


def test_a_step_without_device_tables_is_a_fault_of_the_daemon() -> None:
    lane = CudaLane()
    try:
        step = lane.open_step(1, [1], [20], on_device=False)
        places = lane.put(lane.host, lane.tensors(step, 8))
        assert answer(lane, 1, 0, True, 8, *places, (lane.host, REGION_BYTES // 2), None)[0] == "INTERNAL"
        lane.servers[0].close()
        assert len(lane.faults) == 1
    finally:
        lane.close()


def test_wrong_executors_are_refused() -> None:
    sizes = {"num_blocks": 1, "num_layers": 1, "num_kv_heads": 1, "head_size": 64, "block_size": 16}
    there = {"device": 0, "stream": 0, "pool": 0, "scales": 0, "pool_dtype": 2, "dtype": 2}
    good: dict[str, Any] = sizes | there | {"batch_invariant": False, "workspace_bytes": 1 << 16, "spin_us": 0.0}
    wrong = {
        "pool_dtype": ("pool", 9),
        "dtype": ("dtype", -1),
        "workspace_bytes": ("workspace_bytes", 65535),
        "spin_us": ("spin_us", -1.0),
    }
    for name, (field, value) in wrong.items():
        with pytest.raises(InvalidArgumentError) as caught:
            _cuda.CudaLaneExecutor(**(good | {name: value}))
        assert caught.value.field == field


def test_a_client_in_another_process_with_its_own_memory(lane: CudaLane) -> None:
    """Its outputs and the pool are compared with the reference's."""
    with peer() as client:
        client.send_fd(lane.fd)
        handle = client.run(support.start_client, REGION_BYTES)
        region = lane.add_region(DeviceRegion(_cuda.IpcMemory(0, handle, REGION_BYTES)))
        for number in range(3):
            step = lane.open_step(number, [1, 20], [77, 130])
            for layer in range(lane.num_layers):
                tensors = lane.tensors(step, 8)
                output = client.run(support.client_attend, number, layer, region, tensors)
                expected, _ = lane.expected(step, layer, *tensors)
                check_close(output, expected, support.TOLERANCES["bfloat16"])
        lane.check_pool()


@pytest.mark.alone
def test_a_client_killed_with_calls_in_flight_harms_nobody(lane: CudaLane) -> None:
    _, honest = lane.open_lane()
    before = int(_cuda.memory_info(0)[0])
    for number in range(0, 12, 4):
        with peer() as client:
            fd, _ = lane.open_lane()
            client.send_fd(fd)
            handle = client.run(support.start_client, 2 << 30)
            memory = DeviceRegion(_cuda.IpcMemory(0, handle, 2 << 30))
            region = lane.add_region(memory)
            flooded = lane.open_step(number, [1] * 3, [300] * 3)
            assert client.run(support.client_flood, number, region, 8) == 64
            client.kill()
            step = lane.open_step(number + 1, [1], [50])
            tensors = lane.tensors(step, 8)
            output, _ = lane.attend(step, 0, tensors[0], lane.put(lane.host, tensors), lane.host, honest)
            assert np.isfinite(output.astype(np.float32)).all()
            lane.servers.pop().close()
            lane.session.retire(flooded.number)
            lane.session.remove_region(region)
            lane.regions.pop(region).close()
    assert int(_cuda.memory_info(0)[0]) > before - (3 << 30)
    assert lane.client.wait(lane.client.submit(99, 0, True, 8, *[(lane.host, 0)] * 4, None), 30.0) != DONE
