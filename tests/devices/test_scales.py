"""The scales of an FP8 cache: valid and refused files. `check_types` of cuda_rig compares what is stored with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_rig import Rig
from each_row import each_row
from fake_cuda import FakeCuda
from kv_model import HEAD_SIZE

from kvservice.errors import InvalidArgumentError

EACH = [[0.5, 1.0, 2.0], [3.0, 4.0, 5.0]]
REFUSED = [
    "{",
    "[1.0]",
    '{"scale": 1.0}',
    '{"k_scale": "x"}',
    '{"k_scale": [1.0, 2.0, 3.0]}',
    '{"k_scale": [[1.0, 2.0], [1.0, 2.0]]}',
    '{"k_scale": [[1.0, 2.0, 3.0], [1.0]]}',
    '{"k_scale": 0.0}',
    '{"v_scale": [1.0, -1.0]}',
    '{"v_scale": NaN}',
    '{"v_scale": Infinity}',
    '{"v_scale": null}',
    '{"v_scale": {}}',
]


def opened(file: Path | None) -> Rig:
    """Open an engine over a pool of two layers of three heads, in FP8."""
    sizes: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 3, "num_blocks": 8, "dtype": "float16"}
    return Rig(kv_cache_dtype="fp8", kv_scales=str(file or ""), **sizes)


def scales_of(rig: Rig, fake: FakeCuda) -> Any:
    """Return the scales that the kernels get: [K and V][layer][head]."""
    step = rig.open_step(0, 3)
    found = []
    for layer in range(2):
        tensors = [np.ones((3, heads, HEAD_SIZE), np.float16) for heads in (6, 3, 3)]
        rig.attend(step, layer, *tensors)
        call = fake.launched[-1]
        found.append([fake.array(pointer, (3,), np.float32).tolist() for pointer in (call.k_scale, call.v_scale)])
    rig.device.close()
    return [list(part) for part in zip(*found, strict=True)]


def test_one_for_all_for_each_layer_or_for_each_head(tmp_path: Path, fake: FakeCuda) -> None:
    file = tmp_path / "scales.json"
    with each_row() as row:
        for value, expected in ((0.25, [[0.25] * 3] * 2), ([0.5, 2.0], [[0.5] * 3, [2.0] * 3]), (EACH, EACH)):
            with row(value):
                file.write_text(json.dumps({"v_scale": value}))
                assert scales_of(opened(file), fake) == [[[1.0] * 3] * 2, expected]


def test_no_file_is_one(fake: FakeCuda) -> None:
    assert scales_of(opened(None), fake) == [[[1.0] * 3] * 2] * 2


@pytest.mark.usefixtures("fake")
def test_what_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "scales.json"
    with each_row() as row:
        for text in REFUSED:
            with row(text):
                file.write_text(text)
                with pytest.raises(InvalidArgumentError) as refused:
                    opened(file)
                assert refused.value.field == "kv_scales"
    with pytest.raises(InvalidArgumentError, match=r"absent\.json"):
        opened(tmp_path / "absent.json")
