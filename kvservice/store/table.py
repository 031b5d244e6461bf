"""The namespaces of the store by identity, and the figures of their models."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kvservice.errors import InvalidArgumentError, QuotaExceededError
from kvservice.store.index import KeyIndex
from kvservice.store.namespaces import ModelFigures, NamespaceIdentity, StoredNamespace
from kvservice.store.records import NamespaceRecord, StoreRecords

# The records of a slab take a page at least.
_RECORDS_BYTES_MIN = 4096
# The name of all models beyond the first ones.
OTHER_MODELS = "other"


@dataclass(frozen=True)
class StoreConfig:
    """Sizes and limits. `num_bytes` is the memory of all slabs, `capacity_bytes` the part of it for blocks.
    `quota_bytes` is the most bytes of values of a namespace, which may ask for less. Figures are kept for the first
    `max_models` models, and for all others together."""

    num_bytes: int
    capacity_bytes: int
    slab_bytes: int
    max_namespaces: int
    quota_bytes: int
    max_lease_s: float
    max_models: int

    @property
    def slab_capacity_bytes(self) -> int:
        """The part of a slab for blocks."""
        return self.capacity_bytes * self.slab_bytes // self.num_bytes


class NamespaceTable:
    """The namespaces, at most `max_namespaces`. See BlockStore for the methods with the same names."""

    def __init__(self, config: StoreConfig, index: KeyIndex, records: StoreRecords) -> None:
        self._config, self._index, self._records = config, index, records
        # Namespaces in the order in which they were last opened or left.
        self._namespaces: dict[NamespaceIdentity, StoredNamespace] = {}
        # Counters by model. They outlive its namespaces.
        self._counters: dict[str, ModelFigures] = {}
        # The most namespaces of a tenant, by the tenant of their identities.
        self.tenant_limits: Mapping[str, int] = {}

    def __iter__(self) -> Iterator[StoredNamespace]:
        return iter(self._namespaces.values())

    def latest(self, most: int) -> Iterator[StoredNamespace]:
        """Yield at most so many namespaces, those first that were opened or left last."""
        return itertools.islice(reversed(self._namespaces.values()), most)

    def has_place(self, identity: NamespaceIdentity) -> bool:
        there_is_room = len(self._namespaces) < self._config.max_namespaces and not self._is_full(identity.tenant)
        return identity in self._namespaces or there_is_room

    def _is_full(self, tenant: str) -> bool:
        """Return whether a tenant has as many namespaces as it may, or more because its limit was lowered."""
        limit = self.tenant_limits.get(tenant)
        return limit is not None and self.by_tenant()[tenant] >= limit

    def by_tenant(self) -> Counter[str]:
        """Return the number of namespaces of each tenant, or of those who share."""
        return Counter(one.identity.tenant for one in self)

    def has(self, namespace: StoredNamespace) -> bool:
        return self._namespaces.get(namespace.identity) is namespace

    def open(self, identity: NamespaceIdentity, quota_bytes: int) -> StoredNamespace:
        assert self.has_place(identity)
        self._check(identity, quota_bytes)
        namespace = self._namespaces.get(identity) or self._create(identity)
        namespace.num_users += 1
        self._use(namespace)
        self.set_quota(namespace, quota_bytes)
        return namespace

    def leave(self, namespace: StoredNamespace) -> None:
        namespace.num_users -= 1
        self._use(namespace)

    def set_quota(self, namespace: StoredNamespace, quota_bytes: int) -> None:
        self._check(namespace.identity, quota_bytes)
        quota_bytes = min(quota_bytes, self._config.quota_bytes)
        if quota_bytes not in (0, namespace.quota_bytes):
            namespace.quota_bytes = quota_bytes
            self._records.namespaces[namespace.number] = NamespaceRecord(namespace.identity, quota_bytes)
            self._index.set_quota(namespace.number, quota_bytes)

    def least_useful(self, tenant: str) -> StoredNamespace:
        """Return a namespace without users and without blocks in use: the first one that has no blocks, or else the
        least recently used one. It is one of this tenant if that has as many as it may. Raises QuotaExceededError if
        there is none."""
        is_full = self._is_full(tenant)
        found = [one for one in self if not one.num_users and (one.identity.tenant == tenant or not is_full)]
        stats = {one: self._index.stats(one.number) for one in found}
        unused = [one for one, figures in stats.items() if not figures.num_leased and not figures.num_reserved]
        if not unused and is_full:
            limit, used = self.tenant_limits[tenant], self.by_tenant()[tenant]
            raise QuotaExceededError(
                f"tenant {tenant} has {used} of max_store_namespaces {limit}, all in use, and 1 more is needed",
                tenant=tenant, limit="max_store_namespaces", value=limit, used=used, required=1, field="namespace",
            )  # fmt: skip
        if not unused:
            limit = self._config.max_namespaces
            raise QuotaExceededError(
                f"the store has {limit} namespaces, and all are in use: see max_store_namespaces",
                limit="max_store_namespaces",
                value=limit,
                field="namespace",
            )
        return min(unused, key=lambda one: stats[one].num_blocks > 0)

    def close(self, namespace: StoredNamespace) -> bool:
        """Remove a namespace. Returns False if it has users or blocks now, and stays."""
        stats = self._index.stats(namespace.number)
        if namespace.num_users or stats.num_slabs:
            return False
        namespace.counters.evicted += stats.num_evicted
        del self._namespaces[namespace.identity]
        self._records.namespaces.discard(namespace.number)
        self._index.close(namespace.number)
        return True

    def recover(self) -> tuple[bytes, bytes]:
        """Take over the namespaces of the process before. Returns the slots that the index returns."""
        kept = sorted(self._records.namespaces.items(), key=lambda item: item[0])
        quotas = {number: min(record.quota_bytes, self._config.quota_bytes) for number, record in kept}
        sizes = [(number, record.identity.block_bytes, quotas[number]) for number, record in kept]
        slots = self._index.recover(sizes)
        for number, record in kept:
            self._add(record.identity, number, quotas[number])
        return slots

    def figures(self) -> dict[str, ModelFigures]:
        figures = {}
        for model, counters in self._counters.items():
            namespaces = [one for one in self if one.counters is counters]
            stats = [self._index.stats(one.number) for one in namespaces]
            quarantined = sum(one.num_quarantined for one in namespaces)
            figures[model] = replace(
                counters,
                namespaces=len(stats),
                blocks=sum(one.num_blocks for one in stats),
                leased=sum(one.num_leased for one in stats) - quarantined,
                reserved=sum(one.num_reserved for one in stats),
                quarantined=quarantined,
                used_bytes=sum(one.used_bytes for one in stats),
                quota_bytes=sum(one.quota_bytes for one in namespaces),
                evicted=counters.evicted + sum(one.num_evicted for one in stats),
            )
        return figures

    def _create(self, identity: NamespaceIdentity) -> StoredNamespace:
        quota_bytes = self._config.quota_bytes
        number = self._index.open(identity.block_bytes, quota_bytes)
        self._records.namespaces[number] = NamespaceRecord(identity, quota_bytes)
        return self._add(identity, number, quota_bytes)

    def _add(self, identity: NamespaceIdentity, number: int, quota_bytes: int) -> StoredNamespace:
        counters = self._counters_of(identity.model)
        namespace = StoredNamespace(identity, counters, number, quota_bytes, *self._index.geometry(number))
        self._namespaces[identity] = namespace
        return namespace

    def _counters_of(self, model: str) -> ModelFigures:
        is_known = model in self._counters or len(self._counters) < self._config.max_models
        return self._counters.setdefault(model if is_known else OTHER_MODELS, ModelFigures())

    def _use(self, namespace: StoredNamespace) -> None:
        self._namespaces[namespace.identity] = self._namespaces.pop(namespace.identity)

    def _check(self, identity: NamespaceIdentity, quota_bytes: int) -> None:
        largest = self._config.slab_bytes - _RECORDS_BYTES_MIN
        if not 1 <= identity.block_bytes <= largest:
            raise InvalidArgumentError(
                f"{identity.block_bytes} is not from 1 to {largest}", field="namespace.block_bytes"
            )
        if 0 < quota_bytes < identity.block_bytes:
            raise InvalidArgumentError(f"{quota_bytes} is less than a block", field="quota_bytes")
