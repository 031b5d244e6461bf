"""Spaces name namespaces: the same in every process, different for every identity."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvservice.store import NamespaceIdentity
from kvservice.tiers import space_of

IDENTITY = NamespaceIdentity("m", "w", "bfloat16", "l", 4096, 0, 1, 0, 1, "sha256", "")


def test_a_space_is_the_same_in_every_process() -> None:
    space = space_of(IDENTITY)
    assert (space.digest.hex(), space.block_bytes, space.model) == ("cdc6bcfebf84d1a5824e130c597ac82c", 4096, "m")


@pytest.mark.parametrize("field", list(IDENTITY.__dataclass_fields__))
def test_each_field_of_the_identity_makes_another_space(field: str) -> None:
    value = getattr(IDENTITY, field)
    other: Any = value + 1 if isinstance(value, int) else f"{value}x"
    changed = replace(IDENTITY, **{field: other})
    assert space_of(changed).digest != space_of(IDENTITY).digest
