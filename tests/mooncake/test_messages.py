"""Requests and replies survive the way over the link."""

from __future__ import annotations

from each_row import each_row

from kvservice.mooncake import (
    FRAME_BYTES,
    LENGTH,
    MooncakeReply,
    MooncakeRequest,
    Operation,
    Status,
    values_in_request,
)
from kvservice.store import KEY_BYTES, WORD_BYTES, NamespaceIdentity
from kvservice.tiers import space_of


def test_a_request_is_decoded_as_it_was_encoded() -> None:
    """A request has at most as many values as one of values of a byte."""
    with each_row() as row:
        for num_values in (0, 1, values_in_request(1)):
            for checksums in (False, True):
                with row((num_values, checksums)):
                    check_request(num_values, checksums)


def check_request(num_values: int, checksums: bool) -> None:
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
    """Two values of a space, with its digest, are two values after the way over the link."""
    space = space_of(NamespaceIdentity("m", "w", "bfloat16", "l", 4096, 0, 1, 0, 1, "sha256", ""))
    keys, words = bytes(range(2 * KEY_BYTES)), bytes(range(2 * WORD_BYTES))
    request = MooncakeRequest(Operation.PUT, 1, space.digest, space.block_bytes, keys, words, words[::-1])
    assert request.num_values == 2
    assert MooncakeRequest.decode(request.encode()[LENGTH.size :]) == request
