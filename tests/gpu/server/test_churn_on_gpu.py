"""Many clients that come and go at once, as on the CPU, and some of them with memory of the GPU."""

from __future__ import annotations

import pytest
from test_churn import OPTIONS, SECONDS, come_and_go

_cuda = pytest.importorskip("kvservice._cuda", reason="kvservice was built without CUDA")
pytest.importorskip("torch", reason="torch is not installed")


@pytest.mark.timeout(180 + 2 * SECONDS)
def test_clients_that_come_and_go_leave_nothing() -> None:
    """The GPU's memory is looked at to a MiB."""
    come_and_go(OPTIONS | {"device": "cuda"}, lambda: int(_cuda.memory_info(0)[0]) >> 20)
