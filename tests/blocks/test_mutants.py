"""The state machine must detect managers with an injected fault. See also test_integrity.py."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvservice.blocks import SequenceSpace
from kvservice.blocks.growth import GrowthOps
from kvservice.blocks.layers import LayerOps
from kvservice.blocks.prefix import PrefixIndex
from kvservice.blocks.sharing import SharingOps
from kvservice.blocks.swapping import SwapOps
from kvservice.blocks.tier import DeviceTier, Tier
from kvservice.errors import KVServiceError


def machine() -> Any:
    """Load the state machine of test_state_machine, which is not in a package."""
    spec = importlib.util.spec_from_file_location(
        "mutated_state_machine", Path(__file__).with_name("test_state_machine.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.BlockManagerMachine


QUICK = settings(
    max_examples=600,
    stateful_step_count=40,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def no_copy_on_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrowthOps, "_plan_copies", lambda _, blocks: (np.zeros(len(blocks), bool), blocks[:0]))


def everybody_keeps_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last holder's rule applied to every writer that is not alone."""
    original = GrowthOps._plan_copies

    def plan(self: GrowthOps, blocks: Any) -> Any:
        copied, forgotten = original(self, blocks)
        return copied & (self.device.ref_count[blocks] > 2), forgotten

    monkeypatch.setattr(GrowthOps, "_plan_copies", plan)


def copies_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrowthOps, "_require_device_blocks", lambda *_: None, raising=False)


def a_fork_that_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceTier, "hold_active", lambda *_: None)


def a_release_that_frees_shared_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Tier._unhold

    def unhold(self: Tier, blocks: Any, counts: Any) -> Any:
        original(self, blocks, counts)
        return blocks

    monkeypatch.setattr(Tier, "_unhold", unhold)


def a_hash_without_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvservice.blocks.layers as layers
    import kvservice.blocks.prefix as prefix

    original = prefix.block_hash
    for module in (layers, prefix):
        monkeypatch.setattr(module, "block_hash", lambda _, data, extra=b"": original(b"", data, extra))


def extra_keys_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvservice.blocks.layers as layers
    import kvservice.blocks.prefix as prefix

    original = prefix.block_hash
    for module in (layers, prefix):
        monkeypatch.setattr(module, "block_hash", lambda parent, data, _=b"": original(parent, data))


def blocks_shared_before_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LayerOps.check_layer

    def check(self: LayerOps, space: SequenceSpace, step_id: int, layer: int) -> Any:
        step = original(self, space, step_id, layer)
        before = self.sequences.num_computed[step.rows]
        self._commit(step)
        self.sequences.num_computed[step.rows] = before
        return step

    monkeypatch.setattr(LayerOps, "check_layer", check)


def a_hit_that_stays_evictable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceTier, "hold_found", Tier.hold)


def a_hit_on_the_whole_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PrefixIndex.match

    def match(self: PrefixIndex, tokens: Any, extra: Any) -> list[int]:
        whole = tokens.base if isinstance(tokens.base, np.ndarray) and len(tokens.base) == len(tokens) + 1 else tokens
        return original(self, whole, extra)

    monkeypatch.setattr(PrefixIndex, "match", match)


def a_rewritten_block_that_stays_findable(monkeypatch: pytest.MonkeyPatch) -> None:
    original = GrowthOps._copy

    def copy(self: GrowthOps, copying: Any, dst: Any) -> Any:
        kept = type(copying)(copying.rows, copying.entries, copying.src, copying.computed, copying.forgotten[:0])
        return original(self, kept, dst)

    monkeypatch.setattr(GrowthOps, "_copy", copy)


def truncate_that_keeps_what_was_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SharingOps.truncate

    def truncate(self: Any, space: SequenceSpace, ids: Any, lengths: Any) -> None:
        rows = [space.rows[name] for name in ids]
        before = self.sequences.num_computed[rows]
        original(self, space, ids, lengths)
        self.sequences.num_computed[rows] = before

    monkeypatch.setattr(SharingOps, "truncate", truncate)


def swap_in_that_takes_any_block_for_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(self: Any, _: int) -> int:
        return next(iter(self.device.index.blocks.values()), -1)

    monkeypatch.setattr(SwapOps, "_find", find)


MUTANTS = [
    no_copy_on_write,
    everybody_keeps_the_block,
    copies_are_not_counted,
    a_fork_that_holds_nothing,
    a_release_that_frees_shared_blocks,
    a_hash_without_its_parent,
    extra_keys_left_out,
    blocks_shared_before_they_are_computed,
    a_hit_that_stays_evictable,
    a_hit_on_the_whole_prompt,
    a_rewritten_block_that_stays_findable,
    truncate_that_keeps_what_was_computed,
    swap_in_that_takes_any_block_for_found,
]


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_the_machine_catches(mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KVServiceError)):
        run_state_machine_as_test(machine(), settings=QUICK)


def test_the_machine_passes_what_is_no_mutant() -> None:
    """The unmodified manager passes with the settings under which the mutants are detected."""
    run_state_machine_as_test(machine(), settings=QUICK)
