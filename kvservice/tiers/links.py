"""The tiers of a chain, each with its removals and its rules for writing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from kvservice.store import BlockStore, StoredNamespace
from kvservice.store.index import KEY_BYTES
from kvservice.store.store import chosen
from kvservice.tiers.admission import AdmissionRule, Rule, Words
from kvservice.tiers.measured import MeasuredTier
from kvservice.tiers.protocol import Space, Values
from kvservice.tiers.removals import Removals

Flags: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class WritePolicy:
    """Decides when values are written to a tier: those that the rule admits, before they are evicted from memory; with
    `soon`, all of them, when they are stored."""

    rule: Rule = "all"
    soon: bool = False


@dataclass(frozen=True, eq=False)
class Link:
    """A tier of the chain."""

    tier: MeasuredTier
    removals: Removals
    policy: WritePolicy
    admission: AdmissionRule

    async def write(
        self,
        store: BlockStore,
        namespace: StoredNamespace,
        space: Space,
        values: Values,
        uses: Words | None = None,
    ) -> Flags:
        """Write values, which the caller has pinned, except those that were removed meanwhile. With `uses`, only those
        that the rule admits. Returns which ones the tier has now, bool `[num_values]`: none of a namespace whose values
        must not outlive the daemon."""
        if not namespace.identity.outlives_daemon:
            return np.zeros(len(values), np.bool_)
        # A removal that begins meanwhile ends after this: otherwise these bytes could follow it, after a slow lookup.
        with self.removals.writing(space, values.keys):
            return await self._write(store, namespace, space, values, uses)

    async def _write(
        self, store: BlockStore, namespace: StoredNamespace, space: Space, values: Values, uses: Words | None
    ) -> Flags:
        known = await self.tier.lookup(space, values.keys, len(values))
        stored: Flags = np.frombuffer(known, np.uint8) == 1
        wanted = ~stored & ~self.removals.bars(space, values.keys)
        wanted &= flags_of(store.lookup(namespace, values.keys, counted=False)[1], len(values))
        if uses is not None and wanted.any():
            admitted = self.admission.admit(chosen(values.keys, KEY_BYTES, wanted), uses[wanted])
            self.tier.counters.refused += int((~admitted).sum())
            wanted[wanted] = admitted
        if wanted.any():
            some = Values(*(chosen(packed, len(packed) // len(values), wanted) for packed in vars(values).values()))
            stored[wanted] = np.frombuffer(await self.tier.put(space, some), np.uint8) == 1
        return stored


def flags_of(bitmap: bytes, count: int) -> Flags:
    """Return the first `count` bits of a bitmap, the lowest bit of a byte first."""
    flags: Flags = np.unpackbits(np.frombuffer(bitmap, np.uint8), count=count, bitorder="little").astype(np.bool_)
    return flags
