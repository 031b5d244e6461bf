"""Refusals, killed clients and the state machine of the CPU's tests, against a daemon whose pool is on the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kv_model import POOL
from test_bad_input import *  # noqa: F403
from test_killed_client import (
    test_a_client_killed_between_two_layers_gives_its_blocks_to_the_next,
    test_killed_clients_leave_nothing_behind,
)
from test_state_machine import test_daemon

from kvservice.client import KVClient
from kvservice.launch import Daemon

__all__ = [
    "test_a_client_killed_between_two_layers_gives_its_blocks_to_the_next",
    "test_daemon",
    "test_killed_clients_leave_nothing_behind",
]


@pytest.fixture(scope="module")
def small_daemon() -> Iterator[Daemon]:
    with Daemon(**(POOL | {"device": "cuda"})) as running:
        yield running


def test_the_daemon_says_where_it_is(client: KVClient) -> None:
    assert client.info.device == "cuda:0"
    assert (client.info.dtype, client.info.kv_cache_dtype) == ("float32", "float32")
