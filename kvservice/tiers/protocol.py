"""The interface of a tier below the block store.

A tier reads and writes the memory of the block store itself, at offsets that the caller keeps reserved or leased while
a call runs. All methods are called on the event loop.

A value that is missing, damaged or cannot be read is a miss. A tier that fails as a whole raises TierError, and no
other exception. A cancelled call drops what it has not begun. It ends only when nobody touches the memory any more.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import NamedTuple, Protocol

from kvservice import plain_json
from kvservice.store.index import KEY_BYTES
from kvservice.store.namespaces import NamespaceIdentity


class TierError(Exception):
    """A tier failed as a whole: for its users that is a miss. Clients never see this error."""


DIGEST_BYTES = 16
# The states of a tier; see TierStats.
STATES = ("open", "opening", "suspended", "failed")


@dataclass(frozen=True)
class Space:
    """The values of one namespace, in every daemon and at every time. `model` is for metrics and logs only."""

    digest: bytes
    block_bytes: int
    model: str


def space_of(identity: NamespaceIdentity) -> Space:
    """Return the space of a namespace. Two namespaces that differ in any field have different ones."""
    text = plain_json.dumps(asdict(identity), sort_keys=True)
    return Space(hashlib.sha256(text.encode()).digest()[:DIGEST_BYTES], identity.block_bytes, identity.model)


@dataclass(frozen=True)
class Values:
    """A batch of values, as packed arrays: keys of 32 bytes, and for each key a little-endian uint64 with the offset of
    its bytes in the memory of the block store, and one with its checksum. `checksums` is empty in `LowerTier.get`."""

    keys: bytes
    offsets: bytes
    checksums: bytes = b""

    def __len__(self) -> int:
        return len(self.keys) // KEY_BYTES


class GetResult(NamedTuple):
    """The outcome of `LowerTier.get`: a byte per key, 1 if the value is in memory now and has the right checksum, and a
    checksum per key, 0 for a miss. The memory of a miss may have changed."""

    found: bytes
    checksums: bytes


@dataclass(slots=True)
class TierStats:
    """The figures of a tier. `num_values`, `used_bytes`, `capacity_bytes` and `state` are gauges, the three after
    `suspensions` are recent averages, and everything else counts since the start. A tier that does not know its size
    has the first three as 0.

    `state` is "open", "opening" while it recovers its index, "suspended" while it is left alone after failures, or
    "failed". `refused` values were not admitted, `dropped` ones had no place in the queue.
    """

    name: str
    state: str = "open"
    num_values: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    hits: int = 0
    misses: int = 0
    read_values: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    written_values: int = 0
    written_bytes: int = 0
    write_s: float = 0.0
    evicted: int = 0
    removed: int = 0
    refused: int = 0
    dropped: int = 0
    corrupt: int = 0
    errors: int = 0
    suspensions: int = 0
    latency_s: float = 0.0
    read_bytes_per_s: float = 0.0
    write_bytes_per_s: float = 0.0


@dataclass(slots=True)
class SpillStats:
    """Figures of the blocks of the pool that are saved in the block store, and loaded from it and the tiers below:
    counters since the start, followed by gauges. Blocks, unless a name says otherwise.

    Not saved: `refused` blocks had no room in the store, `torn` ones left the pool while they were copied, and
    `dropped` ones were forgotten because the queue was full. Not loaded: `slower` blocks would have taken longer than
    computing them, and for `crowded` ones the pool had no room. `corrupt` values had a wrong checksum. `hit_tokens` are
    the tokens of loaded blocks that prompts have found.
    """

    saved_blocks: int = 0
    saved_bytes: int = 0
    save_s: float = 0.0
    refused: int = 0
    torn: int = 0
    dropped: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    hit_tokens: int = 0
    slower: int = 0
    crowded: int = 0
    corrupt: int = 0

    queued: int = 0
    loading: int = 0
    save_bytes_per_s: float = 0.0
    load_bytes_per_s: float = 0.0


class LowerTier(Protocol):
    """A place for values. `name` is its label in metrics and logs."""

    name: str

    @property
    def fault(self) -> str:
        """Why the tier is not open, if that is known, else an empty string."""

    async def lookup(self, space: Space, keys: bytes) -> bytes:
        """Return a byte per key: 1 if the tier has the value."""

    async def get(self, space: Space, values: Values) -> GetResult:
        """Read values into memory, and verify their checksums."""

    async def put(self, space: Space, values: Values) -> bytes:
        """Store values from memory. Returns a byte per key: 1 if the tier has the value now."""

    async def remove(self, space: Space, keys: bytes) -> int:
        """Remove values. Returns how many were there."""

    async def clear(self, space: Space) -> None:
        """Remove all values of a space."""

    def stats(self) -> TierStats:
        """Return the figures that the tier knows by itself."""

    async def close(self) -> None:
        """End what is in progress, then release all resources."""
