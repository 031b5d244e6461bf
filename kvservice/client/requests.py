"""A caller's arguments to requests: what protobuf cannot take is an error that names the field."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import Message

from kvservice.errors import InvalidArgumentError

MessageT = TypeVar("MessageT", bound=Message)


def build(kind: Callable[..., MessageT], **fields: Any) -> MessageT:
    """A request. Raises InvalidArgumentError naming the field whose value protobuf cannot take."""
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
    """An int, or InvalidArgumentError: NaN and 1.5 are no lengths."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"{value!r} is not a whole number", field=field) from None


def time_limit(timeout_s: Any) -> float | None:
    """A call's time limit in seconds; None for one without, which is also said as infinity. Raises
    InvalidArgumentError."""
    if timeout_s is None or timeout_s == math.inf:
        return None
    if isinstance(timeout_s, (int, float)) and timeout_s > 0:
        return float(timeout_s)
    raise InvalidArgumentError(f"{timeout_s!r} is no number of seconds above 0", field="timeout_s")


def wait_time(wait_s: Any, field: str) -> float:
    """Seconds, 0 or more. Raises InvalidArgumentError."""
    if isinstance(wait_s, (int, float)) and 0 <= wait_s < math.inf:
        return float(wait_s)
    raise InvalidArgumentError(f"{wait_s!r} is no number of seconds", field=field)


def int_list(values: Iterable[int], field: str) -> list[int]:
    """A plain list, which protobuf takes fastest."""
    if type(values) is list:
        return values
    array = np.asarray(values if isinstance(values, np.ndarray) or hasattr(values, "__array__") else list(values))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgumentError(f"is {array.dtype} of shape {list(array.shape)}, must be whole numbers", field=field)
    flat: list[int] = array.tolist()
    return flat
