"""Helpers of the block manager's tests: a full snapshot of a manager, and a small manager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvservice.blocks import BlockManager, BlocksConfig, SequenceSpace
from kvservice.blocks.tier import Tier


def _tier_state(tier: Tier) -> dict[str, Any]:
    return {
        "ref_count": tier.ref_count.tolist(),
        "free": tier.free_blocks().tolist(),
        "token_ids": tier.token_ids.tolist(),
        "hashes": list(tier.hashes),
        "counts": (tier.num_active, tier.num_shared, tier.num_free),
    }


def _space_state(space: SequenceSpace) -> dict[str, Any]:
    steps = {step_id: (id(entry.plan), bytes(entry.written)) for step_id, entry in space.steps.items()}
    pins = {pin_id: blocks.tolist() for pin_id, blocks in space.pins.items()}
    return {"rows": dict(space.rows), "steps": steps, "pins": pins, "last": (space.last_step_id, space.last_pin_id)}


def full_state(manager: BlockManager) -> dict[str, Any]:
    """Return all state that an operation may change, as plain values."""
    device = manager.device
    return {
        "device": _tier_state(device),
        "swap": _tier_state(manager.swap),
        "index": dict(device.index.blocks),
        "indexed": device.indexed.tolist(),
        "pinned": device.pinned.tolist(),
        "evictable": device.evictable.blocks().tolist(),
        "tables": manager.block_tables.tolist(),
        "meta": manager.meta.tolist(),
        "free_rows": list(manager.sequences.free_rows),
        "extra_keys": dict(manager.sequences.extra_keys),
        "pin_counts": manager.pin_counts.tolist(),
        "deadlines": len(manager.pin_deadlines),
        "spaces": [_space_state(space) for space in sorted(manager.spaces, key=id)],
        "stats": manager.stats(),
    }


@pytest.fixture
def snapshot() -> Callable[[BlockManager], dict[str, Any]]:
    return full_state


@pytest.fixture
def make() -> Callable[..., tuple[BlockManager, SequenceSpace]]:
    """Return a manager of 32 blocks of 4 tokens and 2 layers, with 16 swap blocks, no watermark and one namespace."""

    def make(clock: Callable[[], float] | None = None, **changes: Any) -> tuple[BlockManager, SequenceSpace]:
        sizes = {"num_blocks": 32, "block_size": 4, "num_layers": 2, "num_swap_blocks": 16, "watermark": 0.0}
        config = BlocksConfig(**{**sizes, "max_sequences": 16, "max_sequence_tokens": 256, **changes})
        manager = BlockManager(config, clock=clock) if clock else BlockManager(config)
        return manager, manager.open_space()

    return make
