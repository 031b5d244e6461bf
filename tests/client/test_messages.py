"""The messages of a stream: those with blocks are what protobuf would have made of them, or parsed."""

from __future__ import annotations

import numpy as np
import pytest

from kvservice.client.messages import LARGE_BYTES, BlocksReply, make_call, parse_reply, take_reply
from kvservice.errors import UnknownNamespaceError
from kvservice.v1 import pool_pb2, session_pb2, store_pb2
from kvservice.wire.encoded import Encoded
from kvservice.wire.status import to_status

DATA = np.random.default_rng(0).bytes(LARGE_BYTES)


def test_an_encoded_request_makes_the_same_call() -> None:
    request = store_pb2.BatchPutRequest(namespace_id=3, keys=bytes(32), data=DATA)
    encoded = Encoded((request.SerializeToString(),))
    call = make_call(300, "store_batch_put", encoded)
    assert isinstance(call, bytes)
    expected = make_call(300, "store_batch_put", request)
    assert isinstance(expected, session_pb2.Call)
    assert session_pb2.Call.FromString(call) == expected


@pytest.mark.parametrize("data", [b"", DATA[:100], DATA])
@pytest.mark.parametrize("found", [b"", b"\x05"])
def test_blocks_are_taken_from_the_reply(data: bytes, found: bytes) -> None:
    response = store_pb2.BatchGetResponse(found=found, data=data)
    reply = parse_reply(session_pb2.Reply(call_id=300, store_batch_get=response).SerializeToString())
    assert isinstance(reply, BlocksReply) == (data is DATA)
    assert reply.call_id == 300
    taken = take_reply(reply)
    assert (taken.found, bytes(taken.data)) == (found, data)


def test_other_large_replies_are_parsed_by_protobuf() -> None:
    reply = session_pb2.Reply(call_id=1, ping=pool_pb2.PingResponse(payload=DATA))
    assert parse_reply(reply.SerializeToString()) == reply


def test_errors_are_raised() -> None:
    error = to_status(UnknownNamespaceError("none", field="namespace_id"))
    reply = parse_reply(session_pb2.Reply(call_id=1, error=error).SerializeToString())
    with pytest.raises(UnknownNamespaceError):
        take_reply(reply)
