"""Requests and replies survive the way over the link."""

from __future__ import annotations

import pytest

from kvservice.mooncake.messages import (
    FRAME_BYTES,
    KEY_BYTES,
    LENGTH,
    REQUEST_VALUES,
    WORD_BYTES,
    MooncakeReply,
    MooncakeRequest,
    Operation,
    Status,
)
from kvservice.store.index import KEY_BYTES as STORE_KEY_BYTES
from kvservice.store.index import WORD_BYTES as STORE_WORD_BYTES
from kvservice.tiers import protocol


@pytest.mark.parametrize("num_values", [0, 1, REQUEST_VALUES])
@pytest.mark.parametrize("checksums", [False, True])
def test_a_request_is_decoded_as_it_was_encoded(num_values: int, checksums: bool) -> None:
    request = MooncakeRequest(
        Operation.PUT,
        1 << 40,
        bytes(range(16)),
        1 << 33,
        bytes(range(32)) * num_values,
        b"offsets." * num_values,
        b"checksum" * num_values * checksums,
    )
    encoded = request.encode()
    assert LENGTH.unpack_from(encoded) == (len(encoded) - LENGTH.size,)
    assert MooncakeRequest.decode(encoded[LENGTH.size :]) == request
    assert request.num_values == num_values
    assert len(encoded) <= FRAME_BYTES


def test_a_reply_is_decoded_as_it_was_encoded() -> None:
    reply = MooncakeReply(7, Status.FAILED, b"reason")
    assert MooncakeReply.decode(reply.encode()[LENGTH.size :]) == reply


def test_sizes_are_those_of_the_store_and_of_spaces() -> None:
    assert (KEY_BYTES, WORD_BYTES) == (STORE_KEY_BYTES, STORE_WORD_BYTES)
    assert protocol.DIGEST_BYTES == 16
