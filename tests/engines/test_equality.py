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

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from forced_schedules import FORCED, POOL, force
from model_families import FAMILIES, build

from kvservice.client import KVClient
from kvservice.integrations.transformers import pool_options
from kvservice.launch import Daemon


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


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


@pytest.mark.parametrize("family", FAMILIES)
def test_each_request_gets_the_tokens_that_it_gets_alone(connect: Any, family: str) -> None:
    with torch.no_grad():
        model = build(family)
    happened = force(connect(model), model, seed=1 + list(FAMILIES).index(family))
    assert {name for name, count in happened.items() if count} >= FORCED
