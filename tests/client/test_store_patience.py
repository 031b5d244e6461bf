"""How long the requests of one call of the store wait for blocks below memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvservice.client.store.patience import Patience
from kvservice.errors import InvalidArgumentError


def link(default_s: float | None) -> Any:
    return SimpleNamespace(connection=SimpleNamespace(limit_s=lambda own: default_s if own is None else own))


def test_without_any_limit_the_tiers_decide() -> None:
    assert Patience(0.0, None).left_s(link(None)) == 0.0


def test_a_request_waits_half_of_its_time_limit() -> None:
    assert Patience(0.0, None).left_s(link(8.0)) == 4.0
    assert Patience(0.0, 2.0).left_s(link(8.0)) == 1.0
    assert Patience(1000.0, 2.0).left_s(link(None)) == 1.0


def test_time_that_has_passed_is_not_unlimited() -> None:
    patience = Patience(1e-9, None)
    assert 0 < patience.left_s(link(None)) <= 1e-6


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), "1"])
def test_waiting_times_that_are_none(wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        Patience(wrong, None)
    assert refused.value.field == "max_wait_s"
