"""Namespaces of the block store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvservice.store.figures import NamespaceCounters

# The key algorithm of blocks of the daemon's pool. Clients cannot open namespaces with it.
POOL_KEYS: Final = "kvservice pool"


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

    def is_rank_beside(self, other: NamespaceIdentity) -> bool:
        """Whether the other namespace has another part of the same blocks: that of another rank."""
        same = ("model", "weights", "dtype", "tp_size", "pp_size", "key_algorithm", "tenant")
        return (self.tp_rank, self.pp_rank) != (other.tp_rank, other.pp_rank) and all(
            getattr(self, name) == getattr(other, name) for name in same
        )

    @property
    def outlives_daemon(self) -> bool:
        """Whether values may go to tiers that outlive the daemon: blocks of the pool only if their weights have a
        name."""
        return bool(self.weights) or self.key_algorithm != POOL_KEYS


@dataclass(eq=False)
class StoredNamespace:
    """A namespace with its number in the index. `num_users` counts the sessions that have it open, and the calls that
    clear it; without any, and without leased or reserved blocks, it can be replaced. `num_quarantined` blocks wait for
    the end of a lost writer; the index counts them as leased."""

    identity: NamespaceIdentity
    # The counters of its model, or of all models beyond the first ones.
    counters: NamespaceCounters
    number: int
    quota_bytes: int
    first_block: int
    block_stride: int
    blocks_per_slab: int
    num_users: int = 0
    num_quarantined: int = 0

    @property
    def block_bytes(self) -> int:
        return self.identity.block_bytes
