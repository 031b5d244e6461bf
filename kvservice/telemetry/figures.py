"""Figures of parts that a daemon may lack, each a NamedTuple of numbers. They are written when the observer asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvservice.blocks.plans import Zeros

T = TypeVar("T", bound=tuple[Any, ...])


class SavedStats(NamedTuple):
    """Sessions on the disk: how many there are, their bytes and the room for them; counters since the start of sessions
    that were saved and restored, of files whose time was over, of damaged ones, and of failures of the disk."""

    num_sessions: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    saved: int = 0
    restored: int = 0
    expired: int = 0
    damaged: int = 0
    errors: int = 0


class FiguresTable:
    """A shared array float64[1 + numbers]: 1 if the daemon has the part, then the numbers in the order of the fields.
    Integers are exact up to 2**53."""

    def __init__(self, name: str, kind: type[tuple[float, ...]], zeros: Zeros) -> None:
        self._figures: npt.NDArray[np.float64] = zeros(name, (1 + len(kind()),), np.float64)

    def write(self, figures: tuple[float, ...]) -> None:
        self._figures[:] = 1, *figures


def read_figures(arrays: Mapping[str, npt.NDArray[Any]], name: str, kind: type[T]) -> T | None:
    """Return the figures, or None if the daemon does not have the part."""
    has_part, *numbers = arrays[name].tolist()
    if not has_part:
        return None
    defaults: Any = kind()
    values = (type(default)(number) for default, number in zip(defaults, numbers, strict=True))
    return kind(*values)
