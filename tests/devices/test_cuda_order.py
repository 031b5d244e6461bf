"""Ordering of the CUDA device's streams. The fake streams run work that no event orders at the worst time, and the
content shows the error. See `fake_cuda`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, cast

import fake_cuda
import numpy as np
import pytest
from fake_cuda import DeadlockError, FakeCuda
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from kv_churn import Churn
from kv_machine import NUM_SESSIONS, KVMachine
from kv_model import POOL
from kv_systems import EngineSystem

from kvservice.config import ServeConfig
from kvservice.devices import compute, open_device
from kvservice.devices.arena import Arena
from kvservice.devices.compute import Compute
from kvservice.devices.copies import Copies
from kvservice.engine import CacheEngine
from kvservice.errors import InternalError, InvalidArgumentError

CONFIG = ServeConfig.model_validate(POOL | {"device": "cuda", "max_message_mib": 1, "allow_client_shm": "off"})
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
        monkeypatch.setattr(compute, "INLINE_S", -1.0)
    return request.param


def run_machine(new_fake: Callable[[], FakeCuda], max_examples: int) -> None:
    def machine() -> KVMachine:
        new_fake()
        return KVMachine(lambda: EngineSystem(CONFIG, NUM_SESSIONS, check_integrity=False))

    searching = settings(max_examples=max_examples, derandomize=True, report_multiple_bugs=False, **COMMON)
    run_state_machine_as_test(cast(Any, machine), settings=searching)


@pytest.mark.usefixtures("way")
def test_content_is_right_in_every_order(new_fake: Callable[[], FakeCuda]) -> None:
    """The machine fails if a block has other bytes than the model expects."""
    run_machine(new_fake, 40)


def run_churn(new_fake: Callable[[], FakeCuda], num_runs: int) -> None:
    for seed in range(num_runs):
        new_fake()
        config = CONFIG.model_copy(update={"enable_prefix_caching": False})
        engine = CacheEngine(config, open_device(config))
        try:
            asyncio.run(Churn(engine, seed).run(60))
        finally:
            with contextlib.suppress(DeadlockError):
                engine.device.close()


@pytest.mark.usefixtures("way")
def test_content_is_right_when_nobody_waits(new_fake: Callable[[], FakeCuda]) -> None:
    """The churn fails if a block has other bytes than were written."""
    run_churn(new_fake, 40)


Patch = Callable[[pytest.MonkeyPatch], None]


def computing_does_not_wait_for_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Copies, "let_compute_wait", lambda *_: None)


def readers_do_not_wait_for_copies(patch: pytest.MonkeyPatch) -> None:
    right = Copies.to_wait_for
    patch.setattr(Copies, "to_wait_for", lambda self, reads, writes: right(self, reads[:0].ravel(), writes))


def writers_do_not_wait_for_copies(patch: pytest.MonkeyPatch) -> None:
    right = Copies.to_wait_for
    patch.setattr(Copies, "to_wait_for", lambda self, reads, writes: right(self, reads, writes[:0]))


def writers_wait_only_for_copies_that_write(patch: pytest.MonkeyPatch) -> None:
    right = Copies.to_wait_for
    nothing = np.zeros(0, np.int64)
    patch.setattr(
        Copies, "to_wait_for", lambda self, reads, writes: right(self, reads, nothing) + right(self, writes, nothing)
    )


def copies_do_not_wait_for_computing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Copies, "_wait_for_compute", lambda *_: None)


def copies_do_not_wait_for_copies(patch: pytest.MonkeyPatch) -> None:
    right = Copies._wait

    def wait(self: Copies, stream: Any, copies: Any) -> None:
        if stream is self._compute:
            right(self, stream, copies)

    patch.setattr(Copies, "_wait", wait)


def copies_forget_the_swap_tier(patch: pytest.MonkeyPatch) -> None:
    right = Copies._copy

    def copy(self: Copies, *rest: Any) -> None:
        self.swap.last_touch[:] = 0
        right(self, *rest)

    patch.setattr(Copies, "_copy", copy)


def copies_forget_the_pool(patch: pytest.MonkeyPatch) -> None:
    right = Copies._copy

    def copy(self: Copies, *rest: Any) -> None:
        touched = self.pool.last_touch.copy()
        self.pool.last_touch[:] = 0
        right(self, *rest)
        self.pool.last_touch = np.maximum(self.pool.last_touch, touched)

    patch.setattr(Copies, "_copy", copy)


def copies_are_thought_done(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Copies, "_drop_completed", lambda self: self._copies.clear())


def results_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fake_cuda.Event, "synchronize", lambda _: None)


def room_is_given_back_at_launch(patch: pytest.MonkeyPatch) -> None:
    right = Compute._launch

    def launch(self: Compute, call: Any) -> Any:
        in_flight = right(self, call)
        self.arena.release(in_flight.buffer)
        return in_flight

    patch.setattr(Compute, "_launch", launch)


def room_overlaps(patch: pytest.MonkeyPatch) -> None:
    right = Arena._place

    def place(self: Arena, num_bytes: int) -> int | None:
        return 0 if right(self, num_bytes) is not None else None

    patch.setattr(Arena, "_place", place)


def tables_are_freed_at_once(patch: pytest.MonkeyPatch) -> None:
    right = Compute.upload_tables

    def upload(self: Compute, tables: Any, *rest: Any) -> None:
        right(self, tables, *rest)
        self._cuda.fill_async(tables.pointer, 255, tables.num_bytes, self._cuda.Stream(0).handle)

    patch.setattr(Compute, "upload_tables", upload)


MUTANTS: list[Patch] = [
    computing_does_not_wait_for_copies,
    readers_do_not_wait_for_copies,
    writers_do_not_wait_for_copies,
    writers_wait_only_for_copies_that_write,
    copies_do_not_wait_for_computing,
    copies_do_not_wait_for_copies,
    copies_forget_the_swap_tier,
    copies_forget_the_pool,
    copies_are_thought_done,
    results_are_not_waited_for,
    room_is_given_back_at_launch,
    room_overlaps,
    tables_are_freed_at_once,
]


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_wait_that_is_left_out_is_found_out(
    mutate: Patch, monkeypatch: pytest.MonkeyPatch, new_fake: Callable[[], FakeCuda]
) -> None:
    monkeypatch.setattr(compute, "INLINE_S", -1.0)
    mutate(monkeypatch)
    # The kernels refuse invalid tables, which faults the device. The rarest mutant shows in about one run of 150.
    with pytest.raises((AssertionError, InvalidArgumentError, InternalError)):
        run_churn(new_fake, 3000)
