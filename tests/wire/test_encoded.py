"""Messages serialized without protobuf can be parsed by protobuf."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from each_row import each_row

from kvservice.v1 import attention_pb2, session_pb2, store_pb2, tensor_pb2
from kvservice.wire import Encoded, encode_tensor, fields_of, put_tensor, split_last_field

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
SHAPES: tuple[tuple[int, ...], ...] = ((1,), (3, 4), (2, 3, 4), (0, 5), (40, 8, 64), ())


def test_a_tensor_is_what_protobuf_makes_of_it() -> None:
    with each_row() as row:
        for dtype in DTYPES:
            for shape in SHAPES:
                with row(f"{np.dtype(dtype)}{list(shape)}"):
                    array = np.random.default_rng(0).standard_normal(shape).astype(dtype)
                    expected = tensor_pb2.Tensor()
                    put_tensor(array, expected)
                    found = tensor_pb2.Tensor.FromString(encode_tensor(array).to_bytes())
                    assert found == expected
                    assert found.HasField("inline"), "also where there are no elements"


def test_elements_in_another_order_are_put_in_row_major_order() -> None:
    numbers = np.arange(24, dtype=np.float32)
    orders = {
        "transposed": numbers.reshape(2, 3, 4).transpose(2, 0, 1),
        "every second": numbers[::2],
        "reversed": numbers[::-1],
        "one column": numbers.reshape(6, 4)[:, 1:2],
        "repeated": np.broadcast_to(numbers[:1], 5),
    }
    with each_row() as row:
        for name, array in orders.items():
            with row(name):
                expected = tensor_pb2.Tensor()
                put_tensor(array, expected)
                assert tensor_pb2.Tensor.FromString(encode_tensor(array).to_bytes()) == expected


def test_fields_of_fields() -> None:
    """Sizes with any number of varint bytes work."""
    with each_row() as row:
        for num_elements in (1, 31, 32, 4000, 4096, 600_000):
            with row(num_elements):
                output, lse = np.ones(num_elements, np.float32), np.full(3, 2.0, np.float32)
                response = encode_tensor(output).inside(attention_pb2.AttendResponse.OUTPUT_FIELD_NUMBER)
                response += encode_tensor(lse).inside(attention_pb2.AttendResponse.LSE_FIELD_NUMBER)
                head = Encoded((session_pb2.Reply(call_id=300).SerializeToString(),))
                encoded = (head + response.inside(session_pb2.Reply.EXTEND_FIELD_NUMBER)).to_bytes()
                reply = session_pb2.Reply.FromString(encoded)
                assert reply.call_id == 300
                assert np.array_equal(np.frombuffer(reply.extend.output.inline, np.float32), output)
                assert np.array_equal(np.frombuffer(reply.extend.lse.inline, np.float32), lse)


def test_a_message_without_fields() -> None:
    reply = session_pb2.Reply.FromString(Encoded().inside(session_pb2.Reply.DECODE_FIELD_NUMBER).to_bytes())
    assert reply.WhichOneof("reply") == "decode"


def test_fields_are_those_that_protobuf_has_written() -> None:
    with each_row() as row:
        for num_bytes in (0, 1, 127, 128, 16_384, 3_000_000):
            with row(num_bytes):
                data = np.random.default_rng(0).bytes(num_bytes)
                message = store_pb2.BatchPutRequest(session_token=b"token", namespace_id=1 << 31, data=data)
                fields = fields_of(memoryview(message.SerializeToString()))
                assert fields == {1: b"token", 2: 1 << 31} | ({5: data} if num_bytes else {})


def test_the_last_field_is_split_from_those_before() -> None:
    """Fields of all kinds come before it: a varint, bytes, 64 and 32 bits."""
    before = store_pb2.BatchGetRequest(session_token=b"token", namespace_id=300, max_wait_s=0.5).SerializeToString()
    before += b"\xfd\x3f" + bytes(4)  # field 1023 of 32 bits
    with each_row() as row:
        for num_bytes in (0, 1, 127, 128, 3_000_000):
            with row(num_bytes):
                data = np.random.default_rng(0).bytes(num_bytes)
                message = memoryview(before + Encoded((data,)).inside(5).to_bytes())
                assert list(map(bytes, split_last_field(message, 5) or ())) == [before, data]
                assert split_last_field(message, 4) is None


def test_messages_that_end_otherwise_are_not_split() -> None:
    data = Encoded((b"data",)).inside(5).to_bytes()
    with each_row() as row:
        for name, message in {
            "no field": b"",
            "another field behind it": data + b"\x08\x07",
            "a number with the same field number": b"\x28\x07",
            "a group before it": b"\x0b\x0c" + data,
            "more fields than clients send": b"\x08\x07" * 32 + data,
        }.items():
            with row(name):
                assert split_last_field(memoryview(message), 5) is None


def test_what_is_no_such_message_is_refused() -> None:
    with each_row() as row:
        for broken in (b"\x0d\x01\x02\x03\x04", b"\x0a", b"\x0a\x05abc", b"\xff"):
            with row(broken), pytest.raises((ValueError, IndexError)):
                fields_of(memoryview(broken))
