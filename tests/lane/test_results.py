"""A lane's results are bitwise equal to those of the kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each_row import each_row
from lane_rig import DTYPES, OK, LaneRig, StepArrays, lane

from kvservice import _ext


def check_call(rig: LaneRig, step: StepArrays, layer: int, **options: Any) -> None:
    call = rig.tensors(step, **options)
    output, lse, pool = rig.expected(step, layer, call)
    number, got, got_lse = rig.submit(step.step_id, layer, call)
    assert rig.wait(number) == OK
    assert got.tobytes() == output.tobytes()
    assert got_lse.tobytes() == lse.tobytes()
    assert rig.pool.tobytes() == pool.tobytes()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "window": {"sliding_window": 5},
    "soft cap": {"logits_soft_cap": 3.0},
    "slopes": {"slopes": True},
    "all": {"scale": -0.2, "sliding_window": 7, "logits_soft_cap": 20.0, "slopes": True, "num_heads": 6},
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_calls_are_computed_as_by_the_operations(dtype: str) -> None:
    """The outputs are compared with those of kvservice.ops."""
    with each_row() as row:
        for name, options in OPTIONS.items():
            with row(name), lane(dtype=dtype) as rig:
                step = rig.publish(1, (1, 1, 1), (9, 30, 1))
                check_call(rig, step, 1, **options)
                check_call(rig, step, 0, **options)
                rig.session.retire(1)
                check_call(rig, rig.publish(2, (6, 1, 13, 0), (9, 30, 13, 4)), 1, **options)


def test_batch_invariant_calls_are_computed_one_by_one() -> None:
    shape = {"num_layers": 1, "num_blocks": 512, "block_size": 16, "region_bytes": 4 << 20}
    with lane(batch_invariant=True, **shape) as together, lane(batch_invariant=True, **shape) as apart:
        lens, contexts = (3, 1, 20), (1000, 3000, 20)
        whole = together.publish(1, lens, contexts)
        call = together.tensors(whole)
        number, output, lse = together.submit(1, 0, call)
        assert together.wait(number) == OK
        first_block = first_token = 0
        for step_id, (query_len, context_len) in enumerate(zip(lens, contexts, strict=True)):
            apart.publish(step_id, (query_len,), (context_len,), first_block)
            tokens = slice(first_token, first_token + query_len)
            part = type(call)(call.query[tokens], call.key[tokens], call.value[tokens])
            number, part_output, part_lse = apart.submit(step_id, 0, part)
            assert apart.wait(number) == OK
            assert part_output.tobytes() == output[tokens].tobytes()
            assert part_lse.tobytes() == lse[tokens].tobytes()
            first_block += -(-context_len // 16)
            first_token += query_len


def test_without_log_sum_exp_and_without_tokens() -> None:
    with lane() as rig:
        step = rig.publish(1, (1, 1), (3, 4))
        call = rig.tensors(step)
        output, _, _ = rig.expected(step, 0, call)
        places = [rig.put(call.query), rig.put(call.key), rig.put(call.value), rig.reserve(call.query.nbytes)]
        number = rig.client.submit(1, 0, True, 4, *places, None)
        assert rig.wait(number) == OK
        assert rig.view(places[3], output.shape, output.dtype).tobytes() == output.tobytes()

        rig.publish(2, (0,), (4,))
        number = rig.client.submit(2, 0, False, 4, *places, None)
        assert rig.wait(number) == OK


@pytest.mark.parametrize("spin_us", [0.0, 20.0])
def test_the_ring_wraps_around(spin_us: float) -> None:
    with lane(spin_us=spin_us) as rig:
        for step_id in range(500):
            step = rig.publish(step_id, (1, 2), (1 + step_id % 60, 60))
            call = rig.tensors(step)
            for layer in range(2):
                rig.release_places()
                output, _, _ = rig.expected(step, layer, call)
                number, got, _ = rig.submit(step_id, layer, call)
                assert number == 2 * step_id + layer
                assert rig.wait(number) == OK
                assert got.tobytes() == output.tobytes()
            rig.session.retire(step_id)
        assert rig.take_finished() == list(range(500))
        calls, errors, buckets, seconds = rig.server.stats()
        assert (calls, errors, sum(buckets)) == (1000, 0, 1000)
        assert len(buckets) == len(_ext.LANE_BUCKETS) + 1
        assert seconds > 0


def test_a_full_ring_of_calls_is_answered_in_order() -> None:
    with lane(num_layers=64) as rig:
        step = rig.publish(1, (2, 1), (30, 7))
        calls = [rig.tensors(step) for _ in range(64)]
        expected = [rig.expected(step, layer, call)[0] for layer, call in enumerate(calls)]
        views = [rig.submit(1, layer, call)[1] for layer, call in enumerate(calls)]
        for number in range(64):
            assert rig.wait(number) == OK
            assert views[number].tobytes() == expected[number].tobytes()
        assert rig.take_finished() == [1]


def test_two_processes() -> None:
    code = (
        "import sys, mmap, numpy as np; from kvservice import _ext\n"
        "lane, region = (mmap.mmap(int(fd), 0) for fd in sys.argv[1:3])\n"
        "client = _ext.LaneClient(lane, 20.0)\n"
        "tensors = np.frombuffer(region, np.float32); tensors[:] = np.arange(len(tensors)) % 7 - 3.0\n"
        "for layer in (0, 1):\n"
        "    places = [(int(sys.argv[3]), 16384 * i) for i in range(5)]\n"
        "    assert client.wait(client.submit(1, layer, True, 4, *places), 60.0) == ('', '', '')\n"
        "assert client.wait(client.submit(1, 0, True, 4, *places), 60.0)[:2] == ('LAYER_WRITTEN', 'layer')\n"
    )
    with lane() as rig:
        step = rig.publish(1, (1, 1), (3, 9))
        fd = os.memfd_create("region")
        os.ftruncate(fd, 1 << 17)
        shared = np.memmap(os.fdopen(fd, "r+b", closefd=False), np.float32)
        number = rig.session.add_region(shared.ctypes.data, shared.nbytes)
        command = [sys.executable, "-P", "-c", code, str(rig.fd), str(fd), str(number)]
        root = str(Path(_ext.__file__).parent.parent)
        subprocess.run(command, check=True, timeout=120, pass_fds=(rig.fd, fd), env={**os.environ, "PYTHONPATH": root})
        call = rig.tensors(step)
        values = (np.arange(len(shared)) % 7 - 3.0).astype(np.float32)
        for index, name in enumerate(("query", "key", "value")):
            size = getattr(call, name).size
            getattr(call, name)[...] = values[4096 * index :][:size].reshape(getattr(call, name).shape)
        output, lse, pool = rig.expected(step, 1, call)
        assert shared[3 * 4096 :][: output.size].tobytes() == output.tobytes()
        assert shared[4 * 4096 :][: lse.size].tobytes() == lse.tobytes()
        assert rig.pool.tobytes() == pool.tobytes()
        assert rig.take_finished() == [1]
        os.close(fd)
