"""Conversion of a caller's arguments to requests. Values that protobuf rejects raise an error that names the field."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import Message

from kvservice.errors import InvalidArgumentError

MessageT = TypeVar("MessageT", bound=Message)


# Longest finite time in seconds that a caller may name. Longer ones overflow the clocks of gRPC or of the system.
MAX_WAIT_S = 1e9


def build(kind: Callable[..., MessageT], **fields: Any) -> MessageT:
    """Create a protobuf message. Raises InvalidArgumentError naming the field whose value protobuf rejects."""
    try:
        return kind(**fields)
    except (TypeError, ValueError, OverflowError):
        for name, value in fields.items():
            try:
                kind(**{name: value})
            except (TypeError, ValueError, OverflowError) as error:
                raise InvalidArgumentError(str(error), field=name) from None
        raise


def whole(value: Any, field: str) -> int:
    """Convert an integer of any type to int. Raises InvalidArgumentError for other values, such as NaN and 1.5."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"{value!r} is not a whole number", field=field) from None


def time_limit(timeout_s: Any) -> float | None:
    """Return a call's time limit in seconds; None and infinity mean no limit and become None. Raises
    InvalidArgumentError naming timeout_s, also above MAX_WAIT_S."""
    if timeout_s is None or timeout_s == math.inf:
        return None
    if isinstance(timeout_s, (int, float)) and 0 < timeout_s <= MAX_WAIT_S:
        return float(timeout_s)
    raise InvalidArgumentError(
        f"{timeout_s!r} is not a number of seconds above 0, at most {MAX_WAIT_S:g} or infinity", field="timeout_s"
    )


def wait_time(wait_s: Any, field: str) -> float:
    """Return a number of seconds from 0 to MAX_WAIT_S. Raises InvalidArgumentError."""
    if isinstance(wait_s, (int, float)) and 0 <= wait_s <= MAX_WAIT_S:
        return float(wait_s)
    raise InvalidArgumentError(f"{wait_s!r} is not a number of seconds from 0 to {MAX_WAIT_S:g}", field=field)


def int_list(values: Iterable[int], field: str) -> list[int]:
    """Convert integers to a plain list, the fastest input for protobuf. Raises InvalidArgumentError naming `field`."""
    if type(values) is list:
        return values
    array = np.asarray(values if isinstance(values, np.ndarray) or hasattr(values, "__array__") else list(values))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgumentError(f"is {array.dtype} of shape {list(array.shape)}, must be whole numbers", field=field)
    flat: list[int] = array.tolist()
    return flat
