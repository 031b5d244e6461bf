"""Moving averages of a tier's speed."""

from __future__ import annotations

from typing import Final

# The weight of all earlier transfers against the next one.
_DECAY: Final = 0.95
# Sizes that differ by less than this share of their mean do not tell latency and bandwidth apart.
_SPREAD: Final = 0.1


class Speed:
    """The time of a transfer as latency + bytes / bandwidth: a least-squares fit in which old transfers count less and
    less. Transfers that run at the same time share the bandwidth, so the bytes of a transfer are those in progress when
    it begins, its own included."""

    def __init__(self) -> None:
        # Decayed sums over transfers: their number, bytes, seconds, bytes squared, bytes times seconds.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        self.latency_s = 0.0
        self._s_per_byte = 0.0

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth, or 0 before the first transfer."""
        return 1 / self._s_per_byte if self._s_per_byte else 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        """Count a transfer."""
        new = (1.0, num_bytes, seconds, num_bytes * num_bytes, num_bytes * seconds)
        count, x, y, xx, xy = self._sums = tuple(  # type: ignore[assignment]
            _DECAY * before + now for before, now in zip(self._sums, new, strict=True)
        )
        mean_x, mean_y = x / count, y / count
        variance, covariance = xx / count - mean_x**2, xy / count - mean_x * mean_y
        self.latency_s, self._s_per_byte = 0.0, mean_y / mean_x if mean_x else 0.0
        if variance > (_SPREAD * mean_x) ** 2 and covariance > 0:
            latency_s = mean_y - covariance / variance * mean_x
            if latency_s > 0:
                self.latency_s, self._s_per_byte = latency_s, covariance / variance

    def seconds(self, num_bytes: int) -> float:
        """Return how long a transfer takes, 0 before the first one."""
        return self.latency_s + num_bytes * self._s_per_byte

    def bytes_in(self, seconds: float) -> float:
        """Return how many bytes a transfer of this time has, infinite before the first one."""
        left_s = seconds - self.latency_s
        if left_s < 0:
            return 0.0
        return left_s / self._s_per_byte if self._s_per_byte else float("inf")
