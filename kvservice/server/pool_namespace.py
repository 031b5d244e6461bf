"""The namespace of the block store for blocks of the daemon's own pool."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kvservice.blocks.slices import finish
from kvservice.config import ServeConfig
from kvservice.errors import InvalidArgumentError, QuotaExceededError
from kvservice.store import BlockStore, NamespaceIdentity, StoredNamespace
from kvservice.store.namespaces import POOL_KEYS

# The name of the model if the configuration names none.
UNNAMED = "pool"


def pool_identity(config: ServeConfig) -> NamespaceIdentity:
    """Return the identity of the pool's blocks: everything that their bytes depend on besides their chain hashes.
    Tenants are in the chain hashes, as extra keys, because that is how the pool keeps them apart."""
    layout = config.layout
    sizes = f"{layout.num_layers} layers, {layout.num_kv_heads} heads of {layout.head_size}"
    return NamespaceIdentity(
        model=_model_name(config),
        weights=config.weights,
        dtype=f"{config.dtype}, cache {layout.dtype}, scales {_digest(config.kv_scales)}",
        layout=f"{POOL_KEYS}, {sizes}, blocks of {layout.block_size}",
        block_bytes=layout.block_bytes,
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        key_algorithm=POOL_KEYS,
        tenant="",
    )


def _model_name(config: ServeConfig) -> str:
    """Return the name of the model: what precedes the revision of a snapshot, or the name of its directory."""
    name, _, revision = config.weights.partition("@")
    if revision:
        return name
    path = Path(config.model)
    return (path.parent if path.suffix else path).absolute().name or UNNAMED if config.model else UNNAMED


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else "1"


class PoolNamespace:
    """The namespace, which is opened when it is first needed and stays open."""

    def __init__(self, identity: NamespaceIdentity, blocks: BlockStore) -> None:
        self.identity = identity
        self._blocks = blocks
        self._namespace: StoredNamespace | None = None

    def find(self) -> StoredNamespace | None:
        """Return the namespace if it is open, or if it was kept with the store."""
        if self._namespace is None and any(one.identity == self.identity for one in self._blocks):
            self._namespace = self._blocks.open(self.identity)
        return self._namespace

    def open(self) -> StoredNamespace | None:
        """Open the namespace. Returns None if the store has no place for it, or if its blocks are too large."""
        if self.find() is None:
            try:
                finish(self._blocks.make_place(self.identity))
                self._namespace = self._blocks.open(self.identity)
            except (InvalidArgumentError, QuotaExceededError):
                return None
        return self._namespace
