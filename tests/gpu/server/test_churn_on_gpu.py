"""Many concurrent short-lived clients, as on the CPU. Some of them use GPU memory."""

from __future__ import annotations

import pytest
from cpu_tests import load

_cuda = pytest.importorskip("kvservice._cuda", reason="kvservice was built without CUDA")
pytest.importorskip("torch", reason="torch is not installed")

churn = load("server/test_churn.py")


@pytest.mark.alone
@pytest.mark.timeout(180 + 2 * churn.SECONDS)
def test_clients_that_come_and_go_leave_nothing() -> None:
    """GPU memory in use is compared in MiB."""
    churn.come_and_go(churn.OPTIONS | {"device": "cuda"}, lambda: int(_cuda.memory_info(0)[0]) >> 20)
