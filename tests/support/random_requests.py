"""Requests whose fields have random and extreme values, made from the descriptors of the contract."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}
_NUMBERS = (-1, 0, 1, 2, 3, 4, 5, 8, 21, 64, 4095, 4096, 1 << 20)
_REALS = (0.0, -0.0, 1.0, -1.0, 1e-320, 1e30, -1e30, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "r", "m", "n", "../r", "r\0", "é" * 3000, "\U0001f600", "%s{}", "x" * 255, "/")
_SIZES = (0, 1, 8, 16, 31, 32, 33, 64, 128, 4096)
_COUNTS = (0, 1, 1, 2, 3, 17, 65)
# Rarely a repeated field has more elements than any request may have, or a field of bytes more than any message.
_MANY = 1 << 17
_LARGE_BYTES = 5 << 20
_RARELY = 0.002
_MAX_DEPTH = 6


def vary(request: Any, source: random.Random, depth: int = 0) -> None:
    """Give some of the fields of a request, and of the messages in it, other values, or none. Its session stays."""
    for field in request.DESCRIPTOR.fields:
        if field.name == "session_token" or source.random() < 0.7:
            continue
        is_message = field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
        if source.random() < 0.2:
            request.ClearField(field.name)
        elif field.is_repeated:
            _vary_elements(getattr(request, field.name), field, source, depth)
        elif is_message and depth < _MAX_DEPTH:
            part = getattr(request, field.name)
            part.SetInParent()
            vary(part, source, depth + 1)
        elif not is_message:
            setattr(request, field.name, _value(field, source))


def _vary_elements(elements: Any, field: FieldDescriptor, source: random.Random, depth: int) -> None:
    if field.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE:
        if source.random() < 0.5:
            del elements[:]
        count = _MANY if source.random() < _RARELY else source.choice(_COUNTS)
        elements.extend(_value(field, source) for _ in range(count))
    elif depth < _MAX_DEPTH:
        for _ in range(source.choice((0, 0, 1, 2))):
            elements.add()
        for element in elements:
            vary(element, source, depth + 1)
        if elements and source.random() < 0.2:
            elements.append(elements[0])


def _value(field: FieldDescriptor, source: random.Random) -> Any:
    kind = field.cpp_type
    if kind in _RANGES:
        least, most = _RANGES[kind]
        chosen = source.choice((*_NUMBERS, least, most, most - 1, source.randint(least, most)))
        return max(least, min(most, chosen))
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return source.choice((*_REALS, source.uniform(-1e3, 1e3)))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return source.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        assert field.enum_type is not None, "it is an enum"
        return source.choice((*(value.number for value in field.enum_type.values), -1, 99))
    if field.type == FieldDescriptor.TYPE_STRING:
        return source.choice(_TEXTS)
    return source.randbytes(_LARGE_BYTES if source.random() < _RARELY else source.choice(_SIZES))
