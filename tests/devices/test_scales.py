"""The scales of an FP8 cache: valid and refused files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvservice.devices.scales import load_scales
from kvservice.errors import InvalidArgumentError

EACH = [[0.5, 1.0, 2.0], [3.0, 4.0, 5.0]]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.25, [[0.25] * 3] * 2), ([0.5, 2.0], [[0.5] * 3, [2.0] * 3]), (EACH, EACH)],
)
def test_one_for_all_for_each_layer_or_for_each_head(tmp_path: Path, value: Any, expected: Any) -> None:
    file = tmp_path / "scales.json"
    file.write_text(json.dumps({"v_scale": value}))
    scales = load_scales(str(file), 2, 3)
    assert scales.dtype == np.float32
    assert scales.tolist() == [[[1.0] * 3] * 2, expected]


def test_no_file_is_one() -> None:
    assert load_scales("", 2, 3).tolist() == [[[1.0] * 3] * 2] * 2


@pytest.mark.parametrize(
    "text",
    [
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
    ],
)
def test_what_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "scales.json"
    file.write_text(text)
    with pytest.raises(InvalidArgumentError) as refused:
        load_scales(str(file), 2, 3)
    assert refused.value.field == "kv_scales"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"absent\.json"):
        load_scales(str(tmp_path / "absent.json"), 2, 3)
