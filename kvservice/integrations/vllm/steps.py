"""The message that the connector's scheduler side sends to its worker sides in each step of vLLM."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockLoad:
    """The blocks of a request that are loaded before it continues. `keys[i]` belongs to `block_ids[i]`."""

    request_id: str
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class BlockSave:
    """Blocks that are full after this step. `keys[i]` belongs to `block_ids[i]`."""

    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class ConnectorStep:
    """`overwritten` are the blocks that got a new owner in this step, so their bytes change."""

    loads: tuple[BlockLoad, ...] = ()
    saves: tuple[BlockSave, ...] = ()
    overwritten: frozenset[int] = frozenset()
