"""Requests and replies between the daemon and its Mooncake client, over a socket pair.

A frame is its length as four bytes, followed by its bytes. A request is an operation, an id, the digest of a space, the
size of its values, and packed keys; GET and PUT have offsets in the store's memory too, and PUT checksums. A reply is
the id, a status, and a byte per key, its outcome; for GET, checksums follow. A reply that failed has a text instead.
The first frame of the client is a reply with id 0: it is ready, or has failed.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final

KEY_BYTES: Final = 32
DIGEST_BYTES: Final = 16
# The bytes of an offset or a checksum.
WORD_BYTES: Final = 8
# Limits on one request. A request has at least one value, whatever its size.
REQUEST_VALUES: Final = 1024
REQUEST_BYTES: Final = 64 << 20
# Values of at most STAGED_BYTES are copied in the client process, whose memory for that limits their requests.
STAGED_BYTES: Final = 512 << 10
STAGED_REQUEST_BYTES: Final = 16 << 20
# Requests at a time. Each GET and PUT keeps a core of the client process busy, as the library polls for its end.
CALLS_AT_A_TIME, GETS_AT_A_TIME, PUTS_AT_A_TIME = 2, 2, 2
# Bytes of a frame: all values of a request with key, offset and checksum, and a text.
FRAME_BYTES: Final = 1 << 16

LENGTH: Final = struct.Struct("<I")
_REQUEST = struct.Struct(f"<BQ{DIGEST_BYTES}sQI")
_REPLY = struct.Struct("<QB")


def is_staged(block_bytes: int) -> bool:
    """Return whether values of this size are copied in the client process."""
    return block_bytes <= STAGED_BYTES


def values_in_request(block_bytes: int) -> int:
    """Return the most values of this size that a GET or PUT may have."""
    num_bytes = STAGED_REQUEST_BYTES if is_staged(block_bytes) else REQUEST_BYTES
    return max(1, min(REQUEST_VALUES, num_bytes // block_bytes))


class Operation(enum.IntEnum):
    EXIST, GET, PUT, REMOVE, CLEAR = range(1, 6)


class Status(enum.IntEnum):
    OK, FAILED = range(2)


class Outcome(enum.IntEnum):
    """The outcome for a key. MISS: there is no such value. REFUSED: the store has no room. BROKEN: the store or the
    network failed for this value."""

    MISS, DONE, CORRUPT, BROKEN, REFUSED = range(5)


@dataclass(frozen=True)
class MooncakeRequest:
    operation: Operation
    request_id: int
    digest: bytes
    block_bytes: int
    keys: bytes = b""
    offsets: bytes = b""
    checksums: bytes = b""

    @property
    def num_values(self) -> int:
        return len(self.keys) // KEY_BYTES

    def encode(self) -> bytes:
        header = (self.operation, self.request_id, self.digest, self.block_bytes, self.num_values)
        return _framed(_REQUEST.pack(*header) + self.keys + self.offsets + self.checksums)

    @classmethod
    def decode(cls, frame: bytes) -> MooncakeRequest:
        operation, request_id, digest, block_bytes, num_values = _REQUEST.unpack_from(frame)
        keys, numbers = num_values * KEY_BYTES, num_values * WORD_BYTES
        at = _REQUEST.size
        ends = (at + keys, at + keys + numbers)
        return cls(
            Operation(operation),
            request_id,
            digest,
            block_bytes,
            frame[at : ends[0]],
            frame[ends[0] : ends[1]],
            frame[ends[1] :],
        )


@dataclass(frozen=True)
class MooncakeReply:
    request_id: int
    status: Status
    body: bytes = b""

    def encode(self) -> bytes:
        return _framed(_REPLY.pack(self.request_id, self.status) + self.body)

    @classmethod
    def decode(cls, frame: bytes) -> MooncakeReply:
        request_id, status = _REPLY.unpack_from(frame)
        return cls(request_id, Status(status), frame[_REPLY.size :])


def _framed(frame: bytes) -> bytes:
    assert len(frame) <= FRAME_BYTES, "requests are limited"
    return LENGTH.pack(len(frame)) + frame
