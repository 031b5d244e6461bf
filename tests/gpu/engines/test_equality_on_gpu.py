"""Under any schedule each request gets the tokens that it gets alone, with model, pool and attention on a GPU.

See tests/engines/test_equality.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from forced_schedules import FORCED, POOL, force
from model_families import build

from kvservice.client import KVClient
from kvservice.integrations.transformers import pool_options
from kvservice.launch import Daemon

# Their pools have the same shape.
FAMILIES = ("llama", "gemma2", "bloom")


@pytest.fixture(scope="module")
def client() -> Iterator[KVClient]:
    options: dict[str, Any] = pool_options(build_on_gpu("llama").config, torch.float32)
    with Daemon(**options, **POOL, device="cuda") as daemon, KVClient(daemon.address) as connected:
        yield connected


@torch.no_grad()
def build_on_gpu(family: str) -> Any:
    model: Any = build(family)
    return model.cuda()


@pytest.mark.parametrize("family", FAMILIES)
def test_each_request_gets_the_tokens_that_it_gets_alone(client: KVClient, family: str) -> None:
    happened = force(client, build_on_gpu(family), seed=1 + FAMILIES.index(family))
    assert {name for name, count in happened.items() if count} >= FORCED
