"""The trailer of an object says which value it is."""

from __future__ import annotations

import pytest

from kvservice.mooncake.objects import TRAILER_BYTES, checksum_in, keys_pattern, object_key, trailer

DIGEST, KEY = bytes(range(16)), bytes(range(100, 132))


def test_the_trailer_of_a_value_has_its_checksum() -> None:
    assert checksum_in(trailer(DIGEST, 4096, KEY, 1 << 63), DIGEST, 4096, KEY) == 1 << 63


@pytest.mark.parametrize(
    ("digest", "block_bytes", "key"),
    [(bytes(16), 4096, KEY), (DIGEST, 4097, KEY), (DIGEST, 4096, KEY[:-1] + b"\0")],
    ids=["space", "size", "key"],
)
def test_the_trailer_of_another_value_is_refused(digest: bytes, block_bytes: int, key: bytes) -> None:
    assert checksum_in(trailer(DIGEST, 4096, KEY, 1), digest, block_bytes, key) is None


def test_what_is_no_trailer_is_refused() -> None:
    assert checksum_in(bytes(TRAILER_BYTES), DIGEST, 4096, KEY) is None
    later = bytearray(trailer(DIGEST, 4096, KEY, 1))
    later[7] += 1
    assert checksum_in(bytes(later), DIGEST, 4096, KEY) is None


def test_names_of_objects() -> None:
    assert object_key(DIGEST, KEY) == f"kvs/{DIGEST.hex()}/{KEY.hex()}"
    assert keys_pattern(DIGEST) == f"^kvs/{DIGEST.hex()}/"
