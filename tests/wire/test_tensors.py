"""Tensor messages: round trips, and checks of dtype, shape and size."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from each_row import each_row
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice import _ext
from kvservice.errors import InvalidArgumentError
from kvservice.v1 import blocks_pb2, tensor_pb2
from kvservice.wire import put_tensor, to_array, token_array

FLOAT32 = tensor_pb2.DATA_TYPE_FLOAT32


def to_tensor(array: np.ndarray) -> tensor_pb2.Tensor:
    message = tensor_pb2.Tensor()
    put_tensor(array, message)
    return message


def test_there_and_back() -> None:
    shapes: tuple[tuple[int, ...], ...] = ((0,), (3,), (2, 3, 4), (1,) * 8)
    with each_row() as row:
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
            for shape in shapes:
                with row(f"{np.dtype(dtype)}{list(shape)}"):
                    array = np.random.default_rng(0).normal(size=shape).astype(dtype)
                    message = tensor_pb2.Tensor.FromString(to_tensor(array).SerializeToString())
                    back = to_array(message, "x")
                    assert back.dtype == dtype
                    assert back.shape == shape
                    assert back.tobytes() == array.tobytes()


def test_strides_do_not_show() -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    back = to_array(to_tensor(array.transpose(2, 0, 1)[::-1]), "x")
    np.testing.assert_array_equal(back, array.transpose(2, 0, 1)[::-1])


def test_is_a_view_of_the_message() -> None:
    back = to_array(to_tensor(np.zeros(4, np.float32)), "x")
    assert not back.flags.writeable
    assert not back.flags.owndata


@settings(deadline=None, max_examples=500)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 4), max_size=10),
    st.binary(max_size=64),
    st.integers(-(2**31), 2**31 - 1) | st.integers(0, 4),
)
def test_any_message_is_an_array_or_a_refusal(shape: list[int], data: bytes, data_type: int) -> None:
    message = tensor_pb2.Tensor(data_type=data_type, shape=shape, inline=data)  # type: ignore[arg-type]
    try:
        array = to_array(message, "x")
    except InvalidArgumentError as error:
        refused = error.field
    else:
        assert array.shape == tuple(shape)
        assert array.tobytes() == data
        return
    assert refused in ("x.data_type", "x.shape", "x.inline")


def test_no_elements_past_what_can_be_addressed() -> None:
    with each_row() as row:
        for shape in ([0, 2**62, 2**62], [2**62, 2**62, 0], [2**63 - 1] * 7 + [0]):
            with row(shape):
                with pytest.raises(InvalidArgumentError) as caught:
                    to_array(tensor_pb2.Tensor(data_type=FLOAT32, shape=shape), "x")
                assert caught.value.field == "x.shape"


def placed(byte_size: int) -> tensor_pb2.Tensor:
    place = tensor_pb2.SharedMemoryPlace(region="r", offset=5, byte_size=byte_size)
    return tensor_pb2.Tensor(data_type=FLOAT32, shape=[2, 3], shared_memory=place)


def test_what_lies_at_a_place_is_read_from_there() -> None:
    content = np.arange(6, dtype=np.float32)

    def read(place: tensor_pb2.SharedMemoryPlace, field: str) -> np.ndarray:
        assert (place.region, place.offset, place.byte_size, field) == ("r", 5, 24, "x.shared_memory")
        return content.view(np.uint8)

    np.testing.assert_array_equal(to_array(placed(24), "x", read), content.reshape(2, 3))


def test_a_place_of_another_size_is_not_read() -> None:
    def read(*_: object) -> np.ndarray:
        raise AssertionError("read")

    with each_row() as row:
        for byte_size in (0, 23, 25, 2**64 - 1):
            with row(byte_size):
                with pytest.raises(InvalidArgumentError) as caught:
                    to_array(placed(byte_size), "x", read)
                assert caught.value.field == "x.shared_memory.byte_size"


def test_who_knows_no_regions_reads_none() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        to_array(placed(24), "x")
    assert caught.value.field == "x.inline"


def test_token_ids_as_an_array() -> None:
    """Any number of tokens, with any other fields before and after them."""
    keys = [blocks_pb2.ExtraKey(position=1, key=b"x" * 300)]
    unknown = b"\xc5\x3e1234\xc1\x3e12345678\xc0\x3e\xff\xff\x03"
    with each_row() as row:
        for count in (0, 1, 255, 256, 5000):
            tokens = [(7919 * i) % (1 << 32) - (1 << 31) for i in range(count)]
            messages = [
                blocks_pb2.SequenceAllocation(sequence_id=(1 << 63) - 1, token_ids=tokens, extra_keys=keys),
                blocks_pb2.AppendRequest(session_token=bytes(200), request_id=1, sequence_ids=[5, 6], token_ids=tokens),
                blocks_pb2.PinRequest(token_ids=tokens, ttl_s=1.5),
                blocks_pb2.MatchPrefixRequest(token_ids=tokens),
            ]
            for message in messages:
                with row(f"{count} in {type(message).__name__}"):
                    message.MergeFromString(unknown)
                    array = token_array(message)
                    assert array.dtype == np.int32
                    assert array.tolist() == tokens


def test_ids_as_an_array() -> None:
    unknown = b"\xc5\x3e1234\xc1\x3e12345678\xc0\x3e\xff\xff\x03"
    with each_row() as row:
        for count in (0, 1, 300):
            ids = [(-1) ** i * ((7919 << i) % (1 << 62)) for i in range(count)]
            message = blocks_pb2.AppendRequest(
                sequence_ids=[4], num_tokens=[300, -1], expected_lengths=ids, lookahead=7
            )
            with row(count):
                message.MergeFromString(unknown)
                array = _ext.packed_fixed64(message.SerializeToString(), message.EXPECTED_LENGTHS_FIELD_NUMBER)
                assert array.dtype == np.int64
                assert array.tolist() == ids


def test_bytes_that_protobuf_has_not_serialized_are_refused() -> None:
    wrong = {
        "ends within a tag": b"\x80",
        "ends within a number": b"\x08\x80",
        "ends within a field": b"\x12\x05abcd",
        "longer than can be addressed": b"\x12" + b"\xff" * 9 + b"\x01",
        "a number of more than 64 bits": b"\x08" + b"\xff" * 11,
        "a group without an end": b"\x0b",
        "the end of no group": b"\x0c",
        "a part of an element": b"\x12\x03abc",
    }
    with each_row() as row:
        for name, data in wrong.items():
            with row(name):
                for read in (_ext.packed_fixed32, _ext.packed_fixed64):
                    with pytest.raises(InvalidArgumentError) as caught:
                        read(data, 2)
                    assert caught.value.field == "data"


def test_a_field_of_another_form_is_unknown() -> None:
    """As in protobuf, which keeps it."""
    message = blocks_pb2.SequenceAllocation.FromString(b"\x11" + bytes(8) + b"\x10\x05")
    assert message.SerializeToString()
    assert not len(token_array(message))
    message.token_ids.append(7)
    assert token_array(message).tolist() == [7]


def test_groups_are_unknown() -> None:
    """Protobuf keeps these, too. What is in them is not of the message."""
    inner = b"\x5b\x12\x04abcd\x5c"
    for group in (b"\x0b\x0c", b"\x13" + inner + b"\x12\x04abcd\x14", inner + inner):
        message = blocks_pb2.SequenceAllocation.FromString(group)
        assert message.SerializeToString() == group
        assert not len(token_array(message))
        assert _ext.packed_fixed32(group + b"\x12\x04\x07\x00\x00\x00", 2).tolist() == [7]


def test_numbers_of_any_size_in_a_message() -> None:
    """It is the message that protobuf makes of them."""
    with each_row() as row:
        for numbers in ([], [0], [127, 128, 16383, 16384, 2**31 - 1], [-1, -(2**31)], list(range(1000))):
            for dtype in (np.int32, np.int64):
                with row((numbers[:5], dtype)):
                    array = np.repeat(np.array(numbers, dtype), 2)[::2]  # not contiguous
                    message = blocks_pb2.StepResponse(step_id=5)
                    message.MergeFromString(_ext.varint_field(message.QUERY_LENS_FIELD_NUMBER, array))
                    assert message == blocks_pb2.StepResponse(step_id=5, query_lens=numbers)
    slots = np.array([2**63 - 1, -(2**63)])
    message = blocks_pb2.StepResponse()
    message.MergeFromString(_ext.varint_field(message.SLOT_MAPPING_FIELD_NUMBER, slots))
    assert list(message.slot_mapping) == slots.tolist()


def test_integers_of_32_bits_as_their_bytes() -> None:
    numbers = [0, 1, -1, 2**31 - 1, -(2**31)]
    assert _ext.pack_fixed32(numbers) == np.array(numbers, "<i4").tobytes()
    with each_row() as row:
        for other in (2**31, -(2**31) - 1, 2**70, 1.0, True, np.int32(1), None, "1"):
            with row(other):
                assert _ext.pack_fixed32([1, other]) is None  # type: ignore[list-item]
