"""Which values are worth writing to a tier. The README of this package has the measurements."""

from __future__ import annotations

from typing import Any, Final, Literal, Protocol, TypeAlias

import numpy as np

from kvservice.store.index import KEY_BYTES

Flags: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
Words: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
Rule: TypeAlias = Literal["all", "reused"]

# Bits of one generation of `SeenKeys`, and the keys after which a new one begins.
_NUM_BITS: Final = 1 << 24
_KEYS_PER_GENERATION: Final = 1 << 20
# Odd numbers that mix the words of a key: there are so many bits for each key.
_MIXERS: Final = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)


class AdmissionRule(Protocol):
    def admit(self, keys: bytes, uses: Words) -> Flags:
        """Return which values are worth it, bool `[num_keys]`. `uses` says how often each was used since it was
        stored."""


class AdmitAll:
    """Everything is written."""

    def admit(self, keys: bytes, uses: Words) -> Flags:
        del keys
        return np.ones(len(uses), np.bool_)


class AdmitReused:
    """Values that were used again since they were stored, or are offered once more: they were evicted meanwhile, and
    somebody has computed them again."""

    def __init__(self) -> None:
        self._seen = SeenKeys()

    def admit(self, keys: bytes, uses: Words) -> Flags:
        return (uses > 0) | self._seen.add(keys)


class SeenKeys:
    """A Bloom filter of the last 1 to 2 million keys, in two generations. It takes 4 MiB. A key that was never added is
    found with a probability below 1 in 100."""

    def __init__(self) -> None:
        self._now, self._before = np.zeros(_NUM_BITS // 8, np.uint8), np.zeros(_NUM_BITS // 8, np.uint8)
        self._num_keys = 0

    def add(self, keys: bytes) -> Flags:
        """Add keys. Returns which of them were added before, bool `[num_keys]`."""
        words = np.frombuffer(keys, "<u8").reshape(-1, KEY_BYTES // 8)
        mixed = np.bitwise_xor.reduce(words * np.array((1, *_MIXERS), np.uint64), axis=1)
        places = np.stack([(mixed * np.uint64(mixer)) >> np.uint64(40) for mixer in _MIXERS])  # 24 bits each
        at, bit = places >> np.uint64(3), np.left_shift(np.uint8(1), (places & np.uint64(7)).astype(np.uint8))
        seen = np.any([np.all(one[at] & bit, axis=0) for one in (self._now, self._before)], axis=0)
        np.bitwise_or.at(self._now, at, bit)
        self._num_keys += words.shape[0]
        if self._num_keys >= _KEYS_PER_GENERATION:
            self._before, self._num_keys = self._now, 0
            self._now = np.zeros_like(self._before)
        flags: Flags = seen.astype(np.bool_)
        return flags


def admission_of(rule: Rule) -> AdmissionRule:
    return AdmitAll() if rule == "all" else AdmitReused()
