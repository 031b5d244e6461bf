"""All tests below need a CUDA device; without one they are skipped with the reason. Run them with `pytest -m gpu`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kvservice.ops import cuda

HERE = Path(__file__).parent


def missing() -> str | None:
    if importlib.util.find_spec("kvservice._cuda") is None:
        return "kvservice was built without CUDA"
    return None if cuda.available() else "no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
