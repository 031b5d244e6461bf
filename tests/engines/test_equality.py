"""Under any schedule each request gets the tokens that it gets alone.

Schedules are forced at random by a seed: budgets of a few tokens, a pool too small for two engines, preemptions by
recomputation and by swapping, stalls, aborts, batches made ahead, and steps that are lost before, while or after they
are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from each_row import each_row
from forced_schedules import FORCED, POOL, force
from model_families import FAMILIES, build
from todays_part import ENTRIES

from kvservice.client import KVClient
from kvservice.integrations.transformers import pool_options
from kvservice.launch import Daemon


@pytest.fixture(scope="module")
def connect() -> Iterator[Callable[[Any], KVClient]]:
    """Return a client of a daemon with the pool that a model needs. There is one daemon for each shape."""
    with ExitStack() as stack:
        clients: dict[tuple[Any, ...], KVClient] = {}

        def client_for(model: Any) -> KVClient:
            options = pool_options(model.config, torch.float32)
            shape = tuple(options.values())
            if shape not in clients:
                daemon = stack.enter_context(Daemon(**options, **POOL))
                clients[shape] = stack.enter_context(KVClient(daemon.address))
            return clients[shape]

        yield client_for


def assert_schedules_change_no_token(connect: Any, families: list[str]) -> None:
    with each_row() as row:
        for family in families:
            with torch.no_grad():
                model = build(family)
            with row(family):
                happened = force(connect(model), model, seed=1 + list(FAMILIES).index(family))
                assert {name for name, count in happened.items() if count} >= FORCED


def test_each_request_gets_the_tokens_that_it_gets_alone(connect: Any) -> None:
    assert_schedules_change_no_token(connect, ["mistral"])


@pytest.mark.slow
def test_requests_to_other_families_get_the_tokens_that_they_get_alone(connect: Any) -> None:
    """A run tries a third of them."""
    assert_schedules_change_no_token(connect, [family for family in FAMILIES if family != "mistral"][ENTRIES])
