"""Spaces name namespaces: the same in every process, different for every identity."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvservice.store import NamespaceIdentity
from kvservice.tiers import space_of

IDENTITY = NamespaceIdentity("m", "w", "bfloat16", "l", 4096, 0, 1, 0, 1, "sha256", "")


def test_a_space_is_the_same_in_every_process() -> None:
    space = space_of(IDENTITY)
    assert (space.digest.hex(), space.block_bytes, space.model) == ("cdc6bcfebf84d1a5824e130c597ac82c", 4096, "m")


def test_each_field_of_the_identity_makes_another_space() -> None:
    same = []
    for field in IDENTITY.__dataclass_fields__:
        value = getattr(IDENTITY, field)
        other: Any = value + 1 if isinstance(value, int) else f"{value}x"
        if space_of(replace(IDENTITY, **{field: other})).digest == space_of(IDENTITY).digest:
            same.append(field)
    assert same == []
