"""Arrays of the daemon in two memory files: one that the observer reads, and a private one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvservice.telemetry.arrays import Manifest, SharedArrays


class KeptArrays:
    """Implements kvservice.blocks.plans.ArrayMemory."""

    def __init__(self, shared: SharedArrays, private: SharedArrays) -> None:
        self.shared = shared
        self.private = private
        self._kept: dict[str, npt.NDArray[Any]] = {}

    @property
    def manifest(self) -> Manifest:
        """The arrays that the observer reads."""
        return self.shared.manifest

    def read_only(self) -> int:
        """Return a read-only descriptor of the observer's file. The caller closes it."""
        return self.shared.read_only()

    def zeros(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array that is zero at every start of the daemon. Raises MemoryError."""
        return self.shared.zeros(name, shape, dtype)

    def kept(
        self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike, *, private: bool = False
    ) -> npt.NDArray[Any]:
        """Return an array that keeps its content over restarts, and is zero at first. The same name returns the same
        array. Raises MemoryError, and ValueError if it has another shape or dtype."""
        array = self._kept.get(name)
        if array is None:
            array = self._kept[name] = (self.private if private else self.shared).kept(name, shape, dtype)
        if array.shape != shape or array.dtype != np.dtype(dtype):
            raise ValueError(f"{name} has shape {list(array.shape)} and dtype {array.dtype}")
        return array
