"""The trailer of an object says which value it is."""

from __future__ import annotations

import struct

import pytest

from kvservice.mooncake.objects import TRAILER_BYTES, keys_pattern, object_key, trailers

DIGEST, KEY = bytes(range(16)), bytes(range(100, 132))


def trailer(digest: bytes = DIGEST, block_bytes: int = 4096, key: bytes = KEY, checksum: int = 1) -> bytes:
    return trailers(digest, block_bytes, key, struct.pack("<Q", checksum)).tobytes()


def test_trailers_have_the_format_that_other_daemons_read() -> None:
    expected = struct.pack("<8sQQ32s8s", b"kvsblk\x00\x01", 4096, 1 << 63, KEY, DIGEST[:8])
    assert trailer(checksum=1 << 63) == expected
    assert len(expected) == TRAILER_BYTES


@pytest.mark.parametrize(
    "other",
    [
        trailer(digest=bytes(16)),
        trailer(block_bytes=4097),
        trailer(key=KEY[:-1] + b"\0"),
        trailer(checksum=2),
        bytes(TRAILER_BYTES),
    ],
    ids=["space", "size", "key", "checksum", "zeros"],
)
def test_the_trailers_of_different_values_differ(other: bytes) -> None:
    assert other != trailer()


def test_trailers_are_in_the_order_of_their_values() -> None:
    other = KEY[::-1]
    made = trailers(DIGEST, 4096, KEY + other, struct.pack("<2Q", 7, 8))
    assert made.shape == (2, TRAILER_BYTES)
    assert [row.tobytes() for row in made] == [trailer(checksum=7), trailer(key=other, checksum=8)]
    assert trailers(DIGEST, 4096, b"", b"").shape == (0, TRAILER_BYTES)


def test_names_of_objects() -> None:
    assert object_key(DIGEST, KEY) == f"kvs/{DIGEST.hex()}/{KEY.hex()}"
    assert keys_pattern(DIGEST) == f"^kvs/{DIGEST.hex()}/"
