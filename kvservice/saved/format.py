"""The format of a file with a session: its header, its blocks, and its manifest.

    0        header: version, time of expiry, place and SHA-256 of the manifest, SHA-256 of itself, tenant
    4096     blocks with computed tokens, each in `stride` bytes, a multiple of 4096
    ...      manifest: a JSON object, then arrays of tokens, block numbers and the checksums of the blocks

The file is written under another name and renamed when it is whole. The checks find what happens to it afterwards.

The disk tier of the block store (csrc/disk) has another format, because it is a cache: it may lose any one of very many
values, each counts by itself and is overwritten in place, and it is never whole. A session is written once, and is
there with all its sequences or not at all.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvservice import plain_json
from kvservice.blocks import SavedSequence, SavedSequences
from kvservice.blocks.kept import pack_extra_keys, unpack_extra_keys

SECTOR_BYTES: Final = 4096
FORMAT_VERSION: Final = 2
_MAGIC: Final = b"kvsaved\0"
_HEADER: Final = struct.Struct("<8sIId QQ32s")
_DIGEST_BYTES: Final = 32
# The most bytes of a tenant's name in a header: 64 characters.
MAX_TENANT_BYTES: Final = 256
_JSON_BYTES: Final = struct.Struct("<Q")


@dataclass(frozen=True)
class SessionValues:
    """The values of a session besides its sequences. `credential` is Identity.credential of its owner in hexadecimal
    digits; `wait_s` is the time that the session waits for its client when it is detached. `hashed_with` is
    Tenant.hashed_with, empty in files of versions that did not write it. `on_disk` has the lengths and the computed
    tokens of swapped sequences by their ids, as texts, by the names of their files."""

    name: str
    tenant: str
    owner: str
    credential: str = field(repr=False)
    wait_s: float
    hashed_with: str = ""
    on_disk: dict[str, dict[str, list[int]]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Manifest:
    """All that a file holds besides the bytes of blocks. `file_name` is the name that it was given, so that no session
    gets another's. `identity` says which daemons can use these bytes. `checksums` uint64[n] are those of the blocks
    with computed tokens, in the order of their numbers."""

    file_name: str
    identity: Mapping[str, Any]
    session: SessionValues
    saved: SavedSequences
    block_size: int
    block_bytes: int
    checksums: npt.NDArray[np.uint64]

    def to_bytes(self) -> bytes:
        sequences = self.saved.sequences
        head = {
            "file_name": self.file_name,
            "identity": dict(self.identity),
            "session": asdict(self.session),
            "block_size": self.block_size,
            "block_bytes": self.block_bytes,
            "num_blocks": self.saved.num_blocks,
            "sequences": [
                {
                    "id": one.sequence_id,
                    "length": len(one.token_ids),
                    "computed": one.num_computed,
                    "swapped": one.swapped,
                    "extra": pack_extra_keys(one.extra).hex(),
                }
                for one in sequences
            ],
        }
        text = plain_json.dumps(head).encode()
        tokens = b"".join(one.token_ids.astype("<i4", copy=False).tobytes() for one in sequences)
        numbers = b"".join(one.blocks.astype("<i8", copy=False).tobytes() for one in sequences)
        return _JSON_BYTES.pack(len(text)) + text + tokens + numbers + self.checksums.astype("<u8").tobytes()

    @staticmethod
    def from_bytes(data: bytes) -> Manifest:
        """Decode what `to_bytes` returned. Raises DamagedFileError."""
        try:
            return _decode(data)
        except (struct.error, ValueError, KeyError, TypeError) as error:
            raise DamagedFileError(f"its manifest cannot be read: {error}") from None


@dataclass(frozen=True)
class FileHeader:
    """The first sector of a file. `expires_at` is in seconds since 1970. `tenant` is that of the session, at most
    MAX_TENANT_BYTES in UTF-8; it is empty in files of versions that did not write it."""

    expires_at: float
    manifest_offset: int
    manifest_bytes: int
    manifest_digest: bytes
    tenant: str = ""

    @property
    def num_bytes(self) -> int:
        """The size of the whole file."""
        return rounded_up(self.manifest_offset + self.manifest_bytes)

    def to_bytes(self) -> bytes:
        """Return a sector."""
        tenant = self.tenant.encode()
        assert len(tenant) <= MAX_TENANT_BYTES, "names of tenants are short"
        fields = _HEADER.pack(
            _MAGIC, FORMAT_VERSION, len(tenant), self.expires_at,
            self.manifest_offset, self.manifest_bytes, self.manifest_digest,
        )  # fmt: skip
        return (fields + hashlib.sha256(fields + tenant).digest() + tenant).ljust(SECTOR_BYTES, b"\0")

    @staticmethod
    def from_bytes(sector: bytes) -> FileHeader:
        """Raises DamagedFileError."""
        fields, rest = sector[: _HEADER.size], sector[_HEADER.size :]
        if len(sector) != SECTOR_BYTES:
            raise DamagedFileError("its header is damaged")
        magic, version, tenant_bytes, expires_at, offset, size, digest = _HEADER.unpack(fields)
        tenant = rest[_DIGEST_BYTES : _DIGEST_BYTES + min(tenant_bytes, MAX_TENANT_BYTES)]
        if hashlib.sha256(fields + tenant).digest() != rest[:_DIGEST_BYTES]:
            raise DamagedFileError("its header is damaged")
        if magic != _MAGIC or version != FORMAT_VERSION:
            raise DamagedFileError(f"its format is version {version}, this daemon reads version {FORMAT_VERSION}")
        if not math.isfinite(expires_at):
            raise DamagedFileError("its header has no time of expiry")
        return FileHeader(expires_at, offset, size, digest, tenant.decode(errors="replace"))


def rounded_up(num_bytes: int) -> int:
    """Return a number of bytes rounded up to whole sectors."""
    return -(-num_bytes // SECTOR_BYTES) * SECTOR_BYTES


def digest_of(manifest: bytes) -> bytes:
    return hashlib.sha256(manifest).digest()


def _decode(data: bytes) -> Manifest:
    (size,) = _JSON_BYTES.unpack_from(data)
    head, rest = json.loads(data[_JSON_BYTES.size : _JSON_BYTES.size + size]), data[_JSON_BYTES.size + size :]
    block_size = head["block_size"]
    lengths = [one["length"] for one in head["sequences"]]
    num_blocks = [-(-length // block_size) for length in lengths]
    at_numbers = 4 * sum(lengths)
    at_checksums = at_numbers + 8 * sum(num_blocks)
    tokens = np.frombuffer(rest[:at_numbers], "<i4").astype(np.int32)
    numbers = np.frombuffer(rest[at_numbers:at_checksums], "<i8").astype(np.int64)
    checksums = np.frombuffer(rest[at_checksums:], "<u8").astype(np.uint64)
    if len(tokens) != sum(lengths) or len(numbers) != sum(num_blocks):
        raise DamagedFileError("its manifest is too short")
    each_tokens, each_numbers = _split(tokens, lengths), _split(numbers, num_blocks)
    sequences = [
        SavedSequence(
            sequence_id=one["id"],
            token_ids=token_ids,
            extra=unpack_extra_keys(bytes.fromhex(one["extra"])),
            num_computed=one["computed"],
            swapped=one["swapped"],
            blocks=blocks,
        )
        for one, token_ids, blocks in zip(head["sequences"], each_tokens, each_numbers, strict=True)
    ]
    saved = SavedSequences(sequences, head["num_blocks"])
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < saved.num_blocks:
        raise DamagedFileError("its manifest names a block that it does not have")
    if int(saved.computed_blocks(block_size).sum()) != len(checksums):
        raise DamagedFileError("its manifest has not one checksum for each block")
    session = SessionValues(**head["session"])
    return Manifest(head["file_name"], head["identity"], session, saved, block_size, head["block_bytes"], checksums)


def _split(array: npt.NDArray[Any], counts: list[int]) -> list[npt.NDArray[Any]]:
    """Return consecutive parts of an array, with these numbers of elements."""
    return np.split(array, np.cumsum(counts)[:-1]) if counts else []


# ---- the error of a file with a session that cannot be used


class DamagedFileError(Exception):
    """A file is not whole, or its bytes are not the ones that were written. The message says what is wrong with it."""
