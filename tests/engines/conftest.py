"""Daemons with a pool for tiny random models of each family."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from causal_lms import CASES, Case, make_config

from kvservice.client import KVClient, Session
from kvservice.integrations.transformers import pool_options
from kvservice.launch import Daemon


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Use one thread. The models are so small that several threads mostly wait for each other on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def session_for() -> Iterator[Any]:
    """Return a session of a daemon with the pool of a case's model. There is one daemon per shape."""
    with ExitStack() as stack:
        daemons: dict[tuple[Any, ...], Daemon] = {}

        def session(case: Case, transport: str = "lane") -> Session:
            shape = pool_options(make_config(case))
            key = tuple(shape.values())
            if key not in daemons:
                sizes: dict[str, Any] = {"block_size": 4, "num_blocks": 256, "swap_space_gib": 0.01, "watermark": 0.0}
                daemons[key] = stack.enter_context(Daemon(**shape, **sizes, share_pool="write"))
            client = stack.enter_context(KVClient(daemons[key].address, transport=transport))
            return stack.enter_context(client.session())

        yield session


@pytest.fixture
def kv(session_for: Any) -> Session:
    """A session for models of Llama's shape."""
    return session_for(CASES["llama"])
