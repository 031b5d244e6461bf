"""The descriptors that a keeper holds for the daemon, by name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Protocol


class FileKeeper(Protocol):
    """The process that keeps descriptors: systemd, or the parent that `kvservice serve` puts in its place."""

    def store(self, name: str, fd: int, /) -> None:
        """Keep a duplicate of the descriptor, in place of one that it keeps under this name."""

    def remove(self, name: str, /) -> None:
        """Close the descriptor of this name."""

    def barrier(self) -> None:
        """Return when everything above has been done."""


class KeptFiles:
    """The descriptors taken from the keeper, and the keeper. Without a keeper nothing outlives this process."""

    def __init__(self, taken: Mapping[str, int], keeper: FileKeeper | None) -> None:
        """`taken` is owned by this object, and each descriptor by the caller of `take`."""
        self._taken = dict(taken)
        self._keeper = keeper

    @property
    def is_kept(self) -> bool:
        return self._keeper is not None

    def names(self) -> set[str]:
        """Return the names of the descriptors that nobody has taken."""
        return set(self._taken)

    def take(self, name: str) -> int | None:
        """Return the descriptor of this name, which the caller owns from now on, or None."""
        return self._taken.pop(name, None)

    def peek(self, name: str) -> int | None:
        """Return the descriptor of this name, which stays here, or None."""
        return self._taken.get(name)

    def put(self, name: str, fd: int) -> None:
        """Let the keeper keep a duplicate."""
        if self._keeper is not None:
            self._keeper.store(name, fd)

    def discard(self, names: Iterable[str]) -> None:
        """Close descriptors here, if they were not taken, and in the keeper. Their memory is free when this returns,
        unless this process uses it."""
        names = list(names)
        for name in names:
            if (fd := self._taken.pop(name, None)) is not None:
                os.close(fd)
            if self._keeper is not None:
                self._keeper.remove(name)
        if names and self._keeper is not None:
            self._keeper.barrier()
