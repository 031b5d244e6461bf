"""Namespaces of the block store."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class NamespaceIdentity:
    """Everything that the bytes of a block depend on besides its key, see StoreNamespace, and the session's tenant."""

    model: str
    weights: str
    dtype: str
    layout: str
    block_bytes: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    key_algorithm: str
    tenant: str


@dataclass
class NamespaceCounters:
    """Blocks since the start: `hits` and `misses` of lookups, `read` by gets and leases, `stored`, and `corrupt` ones
    whose checksum was wrong. `refused` counts blocks for which there was no room."""

    hits: int = 0
    misses: int = 0
    read: int = 0
    stored: int = 0
    refused: int = 0
    corrupt: int = 0


@dataclass(eq=False)
class StoredNamespace:
    """A namespace with its number in the index. `num_users` counts the sessions that have it open, and the calls that
    clear it; without any, and without blocks, it can be replaced."""

    identity: NamespaceIdentity
    number: int
    quota_bytes: int
    first_block: int
    block_stride: int
    blocks_per_slab: int
    num_users: int = 0
    counters: NamespaceCounters = field(default_factory=NamespaceCounters)

    @property
    def block_bytes(self) -> int:
        return self.identity.block_bytes
