"""A fake device for machines without a GPU."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import pytest
from fake_cuda import FakeCuda


@pytest.fixture
def new_fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[], FakeCuda]:
    """Each call installs another fake device."""
    seeds = itertools.count()

    def make() -> FakeCuda:
        fake = FakeCuda(next(seeds))
        monkeypatch.setitem(sys.modules, "kvservice._cuda", fake)
        return fake

    return make


@pytest.fixture
def fake(new_fake: Callable[[], FakeCuda]) -> FakeCuda:
    return new_fake()
