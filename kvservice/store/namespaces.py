"""Namespaces of the block store, and their figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

# ---- the store's figures for the namespaces of one model


class EngineFigures(NamedTuple):
    """An engine reports these of itself: how many requests have loads in flight, and as counters since its start the
    tokens that it looked up and found, and blocks."""

    loads_in_flight: int = 0
    prompt_tokens: int = 0
    found_tokens: int = 0
    blocks_loaded: int = 0
    blocks_not_loaded: int = 0
    blocks_saved: int = 0
    blocks_not_saved: int = 0
    blocks_skipped: int = 0


@dataclass(slots=True)
class ModelFigures:
    """Figures over all namespaces of a model: gauges, then counters of blocks since the start.

    The namespaces count in one object, whose gauges stay 0: `hits` and `misses` of lookups, `read` by gets and leases,
    `stored`, `evicted` from namespaces that are closed, `refused` because there was no room, `corrupt` ones, removed
    because their checksum was wrong, and `removed` by clients. The first missing block of each lookup is counted by the
    reason, see GhostKeys. What is reported as `evicted` includes open namespaces.
    """

    namespaces: int = 0
    blocks: int = 0
    leased: int = 0
    reserved: int = 0
    quarantined: int = 0
    used_bytes: int = 0
    quota_bytes: int = 0

    hits: int = 0
    misses: int = 0
    read: int = 0
    read_bytes: int = 0
    stored: int = 0
    stored_bytes: int = 0
    evicted: int = 0
    refused: int = 0
    corrupt: int = 0
    removed: int = 0
    evicted_misses: int = 0
    not_whole_misses: int = 0
    other_namespace_misses: int = 0
    never_stored_misses: int = 0


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
    counters: ModelFigures
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
