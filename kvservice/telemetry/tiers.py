"""The figures of the tiers below the block store. Like the daemon's gauges, they are written when the observer asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvservice.blocks.plans import Zeros
from kvservice.tiers.protocol import STATES, TierStats

MAX_TIERS = 4
_NAME_BYTES = 64
_NUMBERS = TierStats._fields[2:]  # the fields after the name and the state
_KINDS = tuple(type(TierStats._field_defaults[name]) for name in _NUMBERS)


class TierTable:
    """Shared arrays with a row for each tier, fastest first: tier_names uint8[MAX_TIERS, 64], in UTF-8 and padded with
    zeros; tier_figures float64[MAX_TIERS, 1 + numbers], with the index of the state in `STATES`, then the numbers in
    the order of the fields of `TierStats`; tier_count int64[1], the number of rows in use. Integers are exact up to
    2**53."""

    def __init__(self, zeros: Zeros) -> None:
        self._count: npt.NDArray[np.int64] = zeros("tier_count", (1,), np.int64)
        self._names: npt.NDArray[np.uint8] = zeros("tier_names", (MAX_TIERS, _NAME_BYTES), np.uint8)
        self._figures: npt.NDArray[np.float64] = zeros("tier_figures", (MAX_TIERS, 1 + len(_NUMBERS)), np.float64)

    def write(self, tiers: Sequence[TierStats]) -> None:
        assert len(tiers) <= MAX_TIERS, "a daemon has one tier of each kind"
        for row, (name, state, *numbers) in enumerate(tiers):
            self._names[row] = np.frombuffer(name.encode().ljust(_NAME_BYTES, b"\0"), np.uint8)
            self._figures[row] = STATES.index(state), *numbers
        self._count[0] = len(tiers)


def read_tiers(arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[TierStats, ...]:
    count = int(arrays["tier_count"][0])
    return tuple(map(_read_tier, arrays["tier_names"][:count], arrays["tier_figures"][:count].tolist()))


def _read_tier(name: npt.NDArray[np.uint8], figures: Sequence[float]) -> TierStats:
    state, *numbers = figures
    values: list[Any] = [kind(number) for kind, number in zip(_KINDS, numbers, strict=True)]
    return TierStats(name.tobytes().rstrip(b"\0").decode(errors="replace"), STATES[int(state)], *values)
