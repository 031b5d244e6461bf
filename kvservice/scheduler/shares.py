"""Shares of several engines in one pool, by weight."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Share:
    """One engine's share. `held` counts the blocks of its running sequences; `active` says that it has requests, and
    `hungry` that the last step wanted more blocks than it got."""

    weight: float
    held: int = 0
    active: bool = False
    hungry: bool = False


class PoolShares:
    """Entitlements of the engines of one pool.

    An engine may hold any number of blocks until another one that holds less than its entitlement is hungry. Then it
    admits requests only within its own entitlement, and gives up what it holds beyond it.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._shares: list[Share] = []

    def __len__(self) -> int:
        return len(self._shares)

    def add(self, weight: float) -> Share:
        share = Share(weight)
        self._shares.append(share)
        return share

    def remove(self, share: Share) -> None:
        self._shares.remove(share)

    def entitled(self, share: Share) -> int:
        """Return the blocks to which an engine is entitled, among the engines that have requests."""
        total = sum(one.weight for one in self._shares if one.active or one is share)
        return int(self._num_blocks * share.weight / total)

    def allowance(self, share: Share) -> int:
        """Return how many blocks an engine may still take for new requests; negative if it must give up blocks."""
        if len(self._shares) == 1 or not self._others_need(share):
            return self._num_blocks
        return self.entitled(share) - share.held

    def _others_need(self, share: Share) -> bool:
        return any(
            one is not share and one.active and one.hungry and one.held < self.entitled(one) for one in self._shares
        )
