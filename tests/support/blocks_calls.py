"""Calls of the block manager as the daemon makes them, in one piece."""

from __future__ import annotations

from collections.abc import Sequence

from kvservice.blocks import AllocationRequest, AllocStatus, BlockManager, SessionNamespace, finish


def can_allocate(manager: BlockManager, space: SessionNamespace, requests: Sequence[AllocationRequest]) -> AllocStatus:
    return finish(manager.can_allocate_in_slices(space, requests))


def mark_layer(manager: BlockManager, space: SessionNamespace, step_id: int, layer: int) -> bool:
    """Record that a layer is written. Returns whether that commits the step."""
    return manager.mark_part(space, step_id, layer, manager.check_part(space, step_id, layer, 0, 0))
