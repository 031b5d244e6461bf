"""The daemon and its engine alone against a model of plain lists. Mutated engines must fail the comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from kv_machine import NUM_SESSIONS, KVMachine
from kv_model import POOL
from kv_systems import DaemonSystem, EngineSystem

import kvservice.blocks.allocation
import kvservice.blocks.layers
import kvservice.blocks.prefix
import kvservice.chain_hash
from kvservice import ops
from kvservice.blocks.plans import StepPlan
from kvservice.client import KVClient
from kvservice.client.transports.base import TransportName
from kvservice.client.transports.region import RegionTransport
from kvservice.config import ServeConfig
from kvservice.devices.cpu import CpuDevice
from kvservice.engine import CacheEngine
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


@pytest.mark.parametrize(("transport", "examples"), [("inline", 20), ("region", 12), ("lane", 16), ("mapped", 16)])
def test_daemon(small_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, transport: TransportName, examples: int) -> None:
    monkeypatch.setattr(RegionTransport, "staged_bytes_min", 0)  # even the smallest tensors use a region
    with KVClient(small_daemon.address, transport=transport) as client:

        def machine() -> KVMachine:
            return KVMachine(lambda: DaemonSystem(client, NUM_SESSIONS))

        run_state_machine_as_test(
            cast(Any, machine), settings=settings(max_examples=examples, derandomize=True, **COMMON)
        )
        stats = client.stats()
    assert (stats.sequences, stats.sessions, stats.used_swap_blocks, stats.pinned_blocks) == (0, 0, 0, 0)
    for counter in (
        "cow_copies",
        "swapped_out_blocks",
        "swapped_in_blocks",
        "evicted_blocks",
        "prefix_cache_hit_tokens",
    ):
        assert getattr(stats, counter) > 0, f"the machine never came to {counter}"


@pytest.mark.parametrize("changes", [{}, {"enable_prefix_caching": False}, {"watermark": 0.3}], ids=str)
def test_engine(changes: dict[str, Any]) -> None:
    """The machine fails if a block has other bytes than the model expects."""
    config = ServeConfig.model_validate(POOL | changes)

    def machine() -> KVMachine:
        return KVMachine(lambda: EngineSystem(config, NUM_SESSIONS))

    run_state_machine_as_test(cast(Any, machine), settings=settings(max_examples=40, **COMMON))


Patch = Callable[[pytest.MonkeyPatch], None]


def no_copy_on_write(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheEngine, "_copy_on_write", lambda *_: None)


def no_swap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CpuDevice, "swap_out", lambda *_: None)
    patch.setattr(CpuDevice, "swap_in", lambda *_: None)


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
    right = kvservice.chain_hash.block_hash
    for module in (kvservice.blocks.prefix, kvservice.blocks.layers):
        patch.setattr(module, "block_hash", lambda _, *rest: right(b"", *rest))


def extra_keys_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kvservice.blocks.allocation, "extra_keys_by_block", lambda *_: {})


def batches_that_are_not_atomic(patch: pytest.MonkeyPatch) -> None:
    right = kvservice.blocks.BlockManager.allocate
    patch.setattr(
        kvservice.blocks.BlockManager,
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


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_wrong_engine_is_found_out(mutate: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its behavior can reveal it, because the integrity checks of the bookkeeping are disabled here."""
    mutate(monkeypatch)
    config = ServeConfig.model_validate(POOL)

    def machine() -> KVMachine:
        return KVMachine(lambda: EngineSystem(config, NUM_SESSIONS, check_integrity=False))

    searching = settings(max_examples=400, derandomize=True, report_multiple_bugs=False, **COMMON)
    with pytest.raises((AssertionError, KVServiceError)):
        run_state_machine_as_test(cast(Any, machine), settings=searching)
