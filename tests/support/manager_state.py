"""All state of a block manager as plain values."""

from __future__ import annotations

from typing import Any

from kvservice.blocks import BlockManager, SessionNamespace


def _pool_state(pool: Any) -> dict[str, Any]:
    return {
        "ref_count": pool.ref_count.tolist(),
        "free": pool.free_blocks().tolist(),
        "token_ids": pool.token_ids.tolist(),
        "hashes": list(pool.hashes),
        "counts": (pool.num_active, pool.num_shared, pool.num_free),
    }


def _space_state(space: SessionNamespace) -> dict[str, Any]:
    steps = {step_id: (id(entry.plan), bytes(entry.written)) for step_id, entry in space.steps.items()}
    pins = {pin_id: blocks.tolist() for pin_id, blocks in space.pins.items()}
    return {"rows": dict(space.rows), "steps": steps, "pins": pins, "last": (space.last_step_id, space.last_pin_id)}


def full_state(manager: BlockManager) -> dict[str, Any]:
    """Return all state that an operation may change, as plain values."""
    device = manager.device
    return {
        "device": _pool_state(device),
        "swap": _pool_state(manager.swap),
        "index": dict(device.index.blocks),
        "indexed": device.indexed.tolist(),
        "pinned": device.pinned.tolist(),
        "evictable": device.evictable.blocks().tolist(),
        "tables": manager.sequences.block_tables.tolist(),
        "states": manager.sequences.states.tolist(),
        "free_rows": list(manager.sequences.free_rows),
        "extra_keys": dict(manager.sequences.extra_keys.by_row),
        "pin_counts": manager.pins.counts.tolist(),
        "deadlines": len(manager.pins.deadlines),
        "spaces": [_space_state(space) for space in sorted(manager.namespaces, key=id)],
        "stats": manager.stats(),
    }
