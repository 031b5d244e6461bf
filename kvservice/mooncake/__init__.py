"""A client of a Mooncake Store in a process of its own, and a node that gives memory to such a store.

The library is imported in these processes only, so the daemon goes on if it crashes or hangs. Here is what both sides
know. kvservice.tiers.mooncake is the daemon's side.
"""

from __future__ import annotations

import enum
import ipaddress
import json
import os
import socket
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from kvservice import plain_json
from kvservice.environment import library

# ---- how a process joins a Mooncake Store


# Mooncake's word for metadata that its processes ask each other for.
PEER_TO_PEER = "P2PHANDSHAKE"


@dataclass(frozen=True)
class MooncakeOptions:
    """`master` and `metadata` are addresses of servers; `address` is a numeric address of this host. `device` names the
    RDMA devices, separated by commas."""

    master: str
    address: str = "127.0.0.1"
    metadata: str = PEER_TO_PEER
    protocol: str = "tcp"
    device: str = ""

    def to_json(self) -> str:
        return plain_json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> MooncakeOptions:
        return cls(**json.loads(text))


# ---- where a process with Mooncake's library listens
#
# The library binds its ports to all interfaces and has no setting for that. Over TCP whoever connects can read and
# write all registered memory. So a preloaded library (csrc/listen) binds them to one address, or to none, and each
# process checks the result before it registers memory.

PRELOADED: Final = library("_ext_listen.so")
VARIABLE: Final = "KVSERVICE_LISTEN_ADDRESS"
NOWHERE: Final = "none"
_LISTENING = "0A"


class ListeningError(Exception):
    """The process listens on an address that it was not told to listen on."""


def numeric_address(host: str) -> str:
    """Return the first numeric address of a host. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


def listening_environment(address: str) -> dict[str, str]:
    """Return the variables for a process that listens on this numeric address only, or NOWHERE."""
    preloaded = [str(PRELOADED), *filter(None, [os.environ.get("LD_PRELOAD")])]
    variables = {"LD_PRELOAD": ":".join(preloaded), VARIABLE: address}
    if ":" in address:
        variables["MC_USE_IPV6"] = "1"
    return variables


def check_listening(address: str) -> None:
    """Raises ListeningError if this process listens on another address than this one, or at all if it is NOWHERE."""
    wanted = None if address == NOWHERE else ipaddress.ip_address(address)
    own = _own_sockets()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[3] == _LISTENING and fields[9] in own:
                local, _, port = fields[1].partition(":")
                found = _parsed(local)
                if found != wanted:
                    raise ListeningError(f"Mooncake listens on {found} port {int(port, 16)}, not on {address} only")


def _own_sockets() -> set[str]:
    """Return the inodes of this process's sockets."""
    own = set()
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
        except FileNotFoundError:  # the descriptor of the scan itself
            continue
        if target.startswith("socket:["):
            own.add(target[len("socket:[") : -1])
    return own


def _parsed(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an address as the kernel prints it: words of 32 bits in the order of this machine's bytes."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


# ---- requests and replies between the daemon and its Mooncake client, over a socket pair
#
# A frame is its length as four bytes, followed by its bytes. A request is an operation, an id, the digest of a space,
# the size of its values, and packed keys; GET and PUT have offsets in the store's memory too, and PUT checksums. A
# reply is the id, a status, and a byte per key, its outcome; for GET, checksums follow. A reply that failed has a text
# instead. The first frame of the client is a reply with id 0: it is ready, or has failed.

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
