"""Helpers of the block manager's tests: a full snapshot of a manager, and a small manager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from manager_state import full_state

from kvservice.blocks import BlockManager, BlocksConfig, SessionNamespace


@pytest.fixture
def snapshot() -> Callable[[BlockManager], dict[str, Any]]:
    return full_state


@pytest.fixture
def make() -> Callable[..., tuple[BlockManager, SessionNamespace]]:
    """Return a manager of 32 blocks of 4 tokens and 2 layers, with 16 swap blocks, no watermark and one namespace."""

    def make(clock: Callable[[], float] | None = None, **changes: Any) -> tuple[BlockManager, SessionNamespace]:
        sizes = {"num_blocks": 32, "block_size": 4, "num_layers": 2, "num_swap_blocks": 16, "watermark": 0.0}
        config = BlocksConfig(**{**sizes, "max_sequences": 16, "max_sequence_tokens": 256, **changes})
        manager = BlockManager(config, clock=clock) if clock else BlockManager(config)
        return manager, manager.open_namespace()

    return make
