"""The benchmark's pool and its float64 attention, against the CPU operations: what they say, the device is held to."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvservice import ops
from kvservice.bench.attention_cuda import DeviceBenchOptions
from kvservice.bench.cuda_harness import K_SCALE, MAX_ERROR, Inputs, keys_and_values, make_inputs, relative_error

SMALL: Any = {"num_heads": 6, "num_kv_heads": 2, "head_size": 32}
ANY = DeviceBenchOptions().selected()[0]
DECODE = replace(ANY, kind="decode", dtype="bfloat16", contexts=(1, 16, 17, 40), query_len=1, **SMALL)
EXTEND = replace(ANY, kind="extend", dtype="bfloat16", contexts=(40, 40), query_len=20, **SMALL)
FLOAT8 = replace(DECODE, dtype="float8_e4m3fn")


@pytest.fixture(params=[DECODE, EXTEND], ids=["decode", "extend"])
def inputs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Inputs:
    monkeypatch.setattr(type(ANY), "num_layers", 2)
    return make_inputs(request.param, seed=0, with_pages=True, device="cpu")


def as_numpy(tensor: torch.Tensor) -> npt.NDArray[np.generic]:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def attend(inputs: Inputs, layer: int, **options: float) -> torch.Tensor:
    lens: Any = [as_numpy(array) for array in (inputs.query_lens, inputs.block_tables, inputs.context_lens)]
    values: Any = options
    out: Any = ops.attention(as_numpy(inputs.pool), layer, as_numpy(inputs.query), *lens, **values)
    return torch.from_numpy(np.asarray(out, np.float32))


def test_the_pool_is_laid_out_as_the_operations_read_it(inputs: Inputs) -> None:
    table, length = inputs.block_tables[-1], inputs.shape.contexts[-1]
    slots = (table.long()[:, None] * 16 + torch.arange(16)).flatten()[:length]
    read = ops.read_kv(as_numpy(inputs.pool), 1, slots.numpy(), head_size=inputs.shape.head_size)
    for expected, got in zip(read, keys_and_values(inputs, 1, inputs.shape.num_seqs - 1), strict=True):
        assert np.array_equal(as_numpy(got.transpose(0, 1).contiguous()), expected)


def test_the_pages_hold_the_same(inputs: Inputs) -> None:
    assert inputs.pages is not None
    seq = inputs.shape.num_seqs - 1
    paged = inputs.pages[1][inputs.block_tables[seq, : inputs.shape.blocks[seq]].long()]
    for which, expected in enumerate(keys_and_values(inputs, 1, seq)):
        flat = paged[:, which].transpose(0, 1).flatten(1, 2)[:, : inputs.shape.contexts[seq]]
        assert torch.equal(flat, expected)


def test_a_right_result_passes(inputs: Inputs) -> None:
    for layer in (0, 1):
        assert relative_error(inputs, layer, attend(inputs, layer)) < MAX_ERROR / 2


def test_wrong_results_do_not_pass(inputs: Inputs) -> None:
    right = attend(inputs, 0)
    swapped_heads, unwritten, scaled = right.clone(), right.clone(), attend(inputs, 0, scale=0.2)
    swapped_heads[-1, [0, 1]] = right[-1, [1, 0]]
    unwritten[0, 0, 0] = math.nan
    for wrong in (attend(inputs, 1), swapped_heads, unwritten, scaled, attend(inputs, 0, sliding_window=39)):
        assert not relative_error(inputs, 0, wrong) <= MAX_ERROR


def test_an_8_bit_pool_is_what_it_holds_times_its_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(ANY), "num_layers", 2)
    inputs = make_inputs(FLOAT8, seed=0, with_pages=True, device="cpu")
    out = torch.zeros(inputs.query.shape)
    for seq in range(FLOAT8.num_seqs):
        keys, values = (kv.float() for kv in keys_and_values(inputs, 1, seq))
        assert float((keys * K_SCALE).std()) == pytest.approx(1.0, abs=0.1)
        for head in range(FLOAT8.num_heads):
            logits = inputs.query[seq, head].float() @ keys[head // 3].T * K_SCALE / math.sqrt(32)
            out[seq, head] = logits.softmax(-1) @ values[head // 3]
    assert relative_error(inputs, 1, out) < 1e-4
    assert relative_error(inputs, 0, out) > MAX_ERROR
