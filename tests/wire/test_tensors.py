"""Tensor messages: round trips, and checks of dtype, shape and size."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from each_row import each_row
from hypothesis import given, settings
from hypothesis import strategies as st

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
