"""Optional arrays as lists."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt


def listed(array: npt.NDArray[Any] | None) -> list[int]:
    """Return the elements of an array that must be there."""
    assert array is not None
    return [int(element) for element in array]
