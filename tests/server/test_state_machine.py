"""The daemon and its engine alone against a model of plain lists. Mutated engines must fail the comparison."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, cast

import numpy as np
import pytest
from each_row import each_row
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from kv_machine import NUM_SESSIONS, KVMachine
from kv_model import POOL
from kv_systems import DaemonSystem, EngineSystem
from todays_part import ENTRIES

from kvservice import chain_hash, ops
from kvservice.blocks import AllocationRequest, BlockManager, StepPlan
from kvservice.client import KVClient, PoolStats
from kvservice.client.transports.region import RegionTransport
from kvservice.config import ServeConfig
from kvservice.devices import open_device
from kvservice.errors import KVServiceError
from kvservice.launch import Daemon

# Finding a failure takes seconds, but shrinking it takes minutes, so the shrink phase is disabled.
COMMON: dict[str, Any] = {
    "stateful_step_count": 40,
    "phases": [Phase.generate],
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": False,
}


@pytest.fixture(scope="module")
def small_daemon() -> Iterator[Daemon]:
    with Daemon(**POOL, share_pool="write") as running:
        yield running


TRANSPORTS = {"inline": 20, "region": 12, "lane": 16, "mapped": 16}


def run_against_daemon(daemon: Daemon, transport: Any, examples: int) -> PoolStats:
    with KVClient(daemon.address, transport=transport) as client:

        def machine() -> KVMachine:
            return KVMachine(lambda: DaemonSystem(client, NUM_SESSIONS))

        run_state_machine_as_test(
            cast(Any, machine), settings=settings(max_examples=examples, derandomize=True, **COMMON)
        )
        stats = client.stats()
    assert (stats.sequences, stats.sessions, stats.used_swap_blocks, stats.pinned_blocks) == (0, 0, 0, 0)
    return stats


@pytest.mark.slow
@pytest.mark.third
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_daemon(small_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    monkeypatch.setattr(RegionTransport, "staged_bytes_min", 0)  # even the smallest tensors use a region
    stats = run_against_daemon(small_daemon, transport, TRANSPORTS[transport])
    for counter in (
        "cow_copies",
        "swapped_out_blocks",
        "swapped_in_blocks",
        "evicted_blocks",
        "prefix_cache_hit_tokens",
    ):
        assert getattr(stats, counter) > 0, f"the machine never came to {counter}"


@pytest.mark.brief
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_daemon_for_a_while(small_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    monkeypatch.setattr(RegionTransport, "staged_bytes_min", 0)  # even the smallest tensors use a region
    stats = run_against_daemon(small_daemon, transport, 3)
    assert min(stats.cow_copies, stats.swapped_out_blocks, stats.swapped_in_blocks) > 0


def run_against_engine(changes: dict[str, Any], examples: int) -> None:
    config = ServeConfig.model_validate(POOL | changes)

    def machine() -> KVMachine:
        return KVMachine(lambda: EngineSystem(config, NUM_SESSIONS))

    run_state_machine_as_test(cast(Any, machine), settings=settings(max_examples=examples, **COMMON))


ENGINES: list[dict[str, Any]] = [{}, {"enable_prefix_caching": False}, {"watermark": 0.3}]


@pytest.mark.slow
def test_engine() -> None:
    """The machine fails if a block has other bytes than the model expects."""
    with each_row() as row:
        for changes in ENGINES:
            with row(changes):
                run_against_engine(changes, 40)


@pytest.mark.brief
def test_engine_for_a_while() -> None:
    """The machine fails if a block has other bytes than the model expects."""
    with each_row() as row:
        for changes in ENGINES:
            with row(changes):
                run_against_engine(changes, 8)


Patch = Callable[[pytest.MonkeyPatch], None]


def cpu_device() -> Any:
    """Return the class of the device."""
    device = open_device(ServeConfig.model_validate(POOL))
    device.close()
    return type(device)


def no_copy_on_write(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cpu_device(), "copy", lambda *_: None)


def no_swap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cpu_device(), "swap_out", lambda *_: None)
    patch.setattr(cpu_device(), "swap_in", lambda *_: None)


def wrong_layer(patch: pytest.MonkeyPatch) -> None:
    right = ops.write_kv
    patch.setattr(ops, "write_kv", lambda pool, layer, *rest: right(pool, 1 - layer, *rest))


def read_of_the_wrong_layer(patch: pytest.MonkeyPatch) -> None:
    right = ops.read_kv
    patch.setattr(ops, "read_kv", lambda pool, layer, *rest, **named: right(pool, 1 - layer, *rest, **named))


def attention_in_the_wrong_layer(patch: pytest.MonkeyPatch) -> None:
    right = ops.attention
    patch.setattr(ops, "attention", lambda pool, layer, *rest, **named: right(pool, 1 - layer, *rest, **named))


def rolled_tables(patch: pytest.MonkeyPatch) -> None:
    right = StepPlan.block_tables.func  # type: ignore[attr-defined]
    rolled = cached_property(lambda step: np.ascontiguousarray(np.roll(right(step), 1, axis=1)))
    rolled.__set_name__(StepPlan, "block_tables")
    patch.setattr(StepPlan, "block_tables", rolled)


def last_token_lost(patch: pytest.MonkeyPatch) -> None:
    right = ops.write_kv
    patch.setattr(ops, "write_kv", lambda p, n, slots, k, v: right(p, n, slots[:-1], k[:-1], v[:-1]))


def context_one_short(patch: pytest.MonkeyPatch) -> None:
    right = ops.attention
    patch.setattr(
        ops,
        "attention",
        lambda p, n, q, lens, tables, context, **named: right(
            p, n, q, lens, tables, np.maximum(context - 1, lens).astype(np.int32), **named
        ),
    )


def hashes_without_their_past(patch: pytest.MonkeyPatch) -> None:
    right = hashlib.sha256
    is_root = re.compile(b"kvservice chain root").match
    # What is hashed begins with the 32 bytes of the parent's hash.
    patch.setattr(chain_hash, "sha256", lambda data: right(data if is_root(data) else data[32:]))


def extra_keys_forgotten(patch: pytest.MonkeyPatch) -> None:
    right = BlockManager.allocate
    patch.setattr(
        BlockManager,
        "allocate",
        lambda self, space, requests: right(
            self, space, [AllocationRequest(one.sequence_id, one.token_ids) for one in requests]
        ),
    )


def batches_that_are_not_atomic(patch: pytest.MonkeyPatch) -> None:
    right = BlockManager.allocate
    patch.setattr(
        BlockManager,
        "allocate",
        lambda self, space, requests: [one for request in requests for one in right(self, space, [request])],
    )


MUTANTS: list[Patch] = [
    no_copy_on_write,
    no_swap,
    wrong_layer,
    read_of_the_wrong_layer,
    attention_in_the_wrong_layer,
    rolled_tables,
    last_token_lost,
    context_one_short,
    hashes_without_their_past,
    extra_keys_forgotten,
    batches_that_are_not_atomic,
]


@pytest.mark.slow
def test_a_wrong_engine_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its behavior can reveal it, because the integrity checks of the bookkeeping are disabled here. A run
    looks for a third of them."""
    with each_row() as row:
        for mutate in MUTANTS:
            with row(mutate.__name__), monkeypatch.context() as patch:
                mutate(patch)
                if mutate in MUTANTS[ENTRIES]:
                    check_it_is_found_out()


def check_it_is_found_out() -> None:
    config = ServeConfig.model_validate(POOL)

    def machine() -> KVMachine:
        return KVMachine(lambda: EngineSystem(config, NUM_SESSIONS, check_integrity=False))

    searching = settings(max_examples=400, derandomize=True, report_multiple_bugs=False, **COMMON)
    with pytest.raises((AssertionError, KVServiceError)):
        run_state_machine_as_test(cast(Any, machine), settings=searching)
