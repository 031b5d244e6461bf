"""Ordering of the CUDA device's streams. The fake streams run work that no event orders at the worst time, and the
content shows the error. See `fake_cuda`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from constants import set_constants
from cuda_churn import CONFIG, run_churn
from fake_cuda import FakeCuda
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from kv_machine import NUM_SESSIONS, KVMachine
from kv_systems import EngineSystem

COMMON: dict[str, Any] = {
    "stateful_step_count": 40,
    "phases": [Phase.generate],
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": False,
}


@pytest.fixture(params=["on the loop", "in threads"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether calls are launched and awaited inline or by threads."""
    if request.param == "in threads":
        set_constants(monkeypatch, "kvservice.devices", INLINE_S=-1.0)
    return request.param


def run_machine(new_fake: Callable[[], FakeCuda], max_examples: int) -> None:
    def machine() -> KVMachine:
        new_fake()
        return KVMachine(lambda: EngineSystem(CONFIG, NUM_SESSIONS, check_integrity=False))

    searching = settings(max_examples=max_examples, derandomize=True, report_multiple_bugs=False, **COMMON)
    run_state_machine_as_test(cast(Any, machine), settings=searching)


@pytest.mark.usefixtures("way")
def test_content_is_right_in_an_order(new_fake: Callable[[], FakeCuda]) -> None:
    """The machine fails if a block has other bytes than the model expects."""
    run_machine(new_fake, 8)


@pytest.mark.slow
@pytest.mark.usefixtures("way")
def test_content_is_right_in_every_order(new_fake: Callable[[], FakeCuda]) -> None:
    """The machine fails if a block has other bytes than the model expects."""
    run_machine(new_fake, 40)


@pytest.mark.usefixtures("way")
def test_content_is_right_when_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The churn fails if a block has other bytes than were written."""
    run_churn(40, monkeypatch)
