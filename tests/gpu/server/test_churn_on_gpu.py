"""Many concurrent short-lived clients, as on the CPU. Some of them use GPU memory."""

from __future__ import annotations

import pytest
from test_churn import OPTIONS, SECONDS, come_and_go

_cuda = pytest.importorskip("kvservice._cuda", reason="kvservice was built without CUDA")
pytest.importorskip("torch", reason="torch is not installed")


@pytest.mark.timeout(180 + 2 * SECONDS)
def test_clients_that_come_and_go_leave_nothing() -> None:
    """GPU memory in use is compared in MiB."""
    come_and_go(OPTIONS | {"device": "cuda"}, lambda: int(_cuda.memory_info(0)[0]) >> 20)
