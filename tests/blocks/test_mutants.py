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

from kvservice.blocks import SessionNamespace
from kvservice.blocks.advancing import Advancer
from kvservice.blocks.block_pool import BlockPool, CachingBlockPool
from kvservice.blocks.freeing import Reclaimer
from kvservice.blocks.growth import GrowthPlanner
from kvservice.blocks.layers import LayerTracker
from kvservice.blocks.namespaces import LiveStep
from kvservice.blocks.prefix import PrefixIndex
from kvservice.blocks.rearranging import Rearranger
from kvservice.blocks.swapping import Swapper
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
    monkeypatch.setattr(GrowthPlanner, "_plan_copies", lambda _, blocks: (np.zeros(len(blocks), bool), blocks[:0]))


def everybody_keeps_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last holder's rule applied to every writer that is not alone."""
    original = GrowthPlanner._plan_copies

    def plan(self: GrowthPlanner, blocks: Any) -> Any:
        copied, unindexed = original(self, blocks)
        return copied & (self._device.ref_count[blocks] > 2), unindexed

    monkeypatch.setattr(GrowthPlanner, "_plan_copies", plan)


def copies_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CachingBlockPool, "require_available", lambda *_: None)


def a_fork_that_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CachingBlockPool, "incref_active", lambda *_: None)


def a_beam_that_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Rearranger._move

    def move(self: Rearranger, *arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BlockPool, "incref", lambda *_: None)
            original(self, *arguments)

    monkeypatch.setattr(Rearranger, "_move", move)


def a_release_that_frees_shared_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    original = BlockPool._drop_references

    def drop(self: BlockPool, blocks: Any, counts: Any) -> Any:
        original(self, blocks, counts)
        return blocks

    monkeypatch.setattr(BlockPool, "_drop_references", drop)


def a_hash_without_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvservice.blocks.layers as layers
    import kvservice.blocks.prefix as prefix
    import kvservice.chain_hash as chain_hash

    original = chain_hash.block_hash
    for module in (layers, prefix):
        monkeypatch.setattr(module, "block_hash", lambda _, data, extra=b"": original(b"", data, extra))


def extra_keys_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvservice.blocks.layers as layers
    import kvservice.blocks.prefix as prefix
    import kvservice.chain_hash as chain_hash

    original = chain_hash.block_hash
    for module in (layers, prefix):
        monkeypatch.setattr(module, "block_hash", lambda parent, data, _=b"": original(parent, data))


def blocks_shared_before_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LayerTracker.check_layer

    def check(self: LayerTracker, namespace: SessionNamespace, step_id: int, layer: int) -> Any:
        step = original(self, namespace, step_id, layer)
        before = self._sequences.num_computed[step.rows]
        self.commit_rows(step.rows, step.context_lens)
        self._sequences.num_computed[step.rows] = before
        return step

    monkeypatch.setattr(LayerTracker, "check_layer", check)


def a_hit_that_stays_evictable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CachingBlockPool, "incref_found", BlockPool.incref)


def a_hit_on_the_whole_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PrefixIndex.match

    def match(self: PrefixIndex, tokens: Any, extra: Any) -> list[int]:
        whole = tokens.base if isinstance(tokens.base, np.ndarray) and len(tokens.base) == len(tokens) + 1 else tokens
        return original(self, whole, extra)

    monkeypatch.setattr(PrefixIndex, "match", match)


def a_rewritten_block_that_stays_findable(monkeypatch: pytest.MonkeyPatch) -> None:
    original = GrowthPlanner._copy

    def copy(self: GrowthPlanner, copies: Any, dst: Any) -> Any:
        kept = type(copies)(copies.rows, copies.entries, copies.src, copies.computed, copies.unindexed[:0])
        return original(self, kept, dst)

    monkeypatch.setattr(GrowthPlanner, "_copy", copy)


def truncate_that_keeps_what_was_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Reclaimer.truncate

    def truncate(self: Any, namespace: SessionNamespace, ids: Any, lengths: Any, unindex: bool) -> None:
        rows = [namespace.rows[name] for name in ids]
        before = self._sequences.num_computed[rows]
        original(self, namespace, ids, lengths, unindex)
        self._sequences.num_computed[rows] = before

    monkeypatch.setattr(Reclaimer, "truncate", truncate)


def swap_in_that_takes_any_block_for_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(self: Any, _: int) -> int:
        return next(iter(self._device.index.blocks.values()), -1)

    monkeypatch.setattr(Swapper, "_find", find)


def a_follower_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def supersede(self: SessionNamespace, step_ids: Any) -> None:
        for step_id in step_ids:
            self.steps.pop(step_id, None)

    monkeypatch.setattr(SessionNamespace, "supersede", supersede)


def a_follower_that_commits_without_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveStep, "tokens_known", True)


def a_follower_that_begins_at_the_computed_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Advancer, "_begin_after", lambda *_: np.zeros(0, np.int64))


MUTANTS = [
    no_copy_on_write,
    everybody_keeps_the_block,
    copies_are_not_counted,
    a_fork_that_holds_nothing,
    a_beam_that_holds_nothing,
    a_release_that_frees_shared_blocks,
    a_hash_without_its_parent,
    extra_keys_left_out,
    blocks_shared_before_they_are_computed,
    a_hit_that_stays_evictable,
    a_hit_on_the_whole_prompt,
    a_rewritten_block_that_stays_findable,
    truncate_that_keeps_what_was_computed,
    swap_in_that_takes_any_block_for_found,
    a_follower_that_does_not_end,
    a_follower_that_commits_without_its_tokens,
    a_follower_that_begins_at_the_computed_tokens,
]


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_the_machine_catches(mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KVServiceError)):
        run_state_machine_as_test(machine(), settings=QUICK)


def test_the_machine_passes_what_is_no_mutant() -> None:
    """The unmodified manager passes with the settings under which the mutants are detected."""
    run_state_machine_as_test(machine(), settings=QUICK)
