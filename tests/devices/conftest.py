"""A device to be found where there is no GPU."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import pytest
from fake_cuda import FakeCuda


@pytest.fixture
def new_fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[], FakeCuda]:
    """Every call makes another device the one that is found."""
    seeds = itertools.count()

    def make() -> FakeCuda:
        fake = FakeCuda(next(seeds))
        monkeypatch.setitem(sys.modules, "kvservice._cuda", fake)
        return fake

    return make


@pytest.fixture
def fake(new_fake: Callable[[], FakeCuda]) -> FakeCuda:
    return new_fake()
