"""The CPU tests of errors, killed clients and the state machine, with a pool on the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from cpu_tests import load
from kv_model import POOL, reference_attention

from kvservice.client import BlockSparse, KVClient
from kvservice.errors import InvalidArgumentError
from kvservice.launch import Daemon

bad_input = load("server/test_bad_input.py")
killed_client = load("server/test_killed_client.py")
scene = bad_input.scene
test_is_refused_and_changes_nothing = bad_input.test_is_refused_and_changes_nothing
test_who_has_not_mapped_the_pool_for_writing_commits_nothing = (
    bad_input.test_who_has_not_mapped_the_pool_for_writing_commits_nothing
)
test_cases_are_as_many_as_they_should_be = bad_input.test_cases_are_as_many_as_they_should_be
test_killed_clients_leave_nothing_behind = killed_client.test_killed_clients_leave_nothing_behind
test_a_client_killed_between_two_layers_gives_its_blocks_to_the_next = (
    killed_client.test_a_client_killed_between_two_layers_gives_its_blocks_to_the_next
)
test_daemon = load("server/test_state_machine.py").test_daemon


@pytest.fixture(scope="module")
def small_daemon() -> Iterator[Daemon]:
    with Daemon(**(POOL | {"device": "cuda"}), share_pool="write") as running:
        yield running


def test_the_daemon_says_where_it_is(client: KVClient) -> None:
    assert client.info.device == "cuda:0"
    assert (client.info.dtype, client.info.kv_cache_dtype) == ("float32", "float32")


def test_block_sparse_attention_leaves_out_what_it_should(client: KVClient) -> None:
    """The last of 20 tokens attends to its own sparse block of 8 tokens, so to the last 4 tokens. The stride is longer
    than the context."""
    random = np.random.default_rng(0)
    query, key, value = (random.standard_normal((20, heads, 32), np.float32) for heads in (4, 2, 2))
    with client.session() as kv:
        sequence = kv.allocate(range(5000, 5019))
        step = kv.open_step([sequence])
        for layer in range(2):
            step.extend(layer, query[:19], key[:19], value[:19])
        step = kv.append([sequence], [1])
        sparse = BlockSparse(vert_stride=100, local_blocks=1, block_size=8)
        output = step.decode(0, query[19:], key[19:], value[19:], block_sparse=sparse)
        np.testing.assert_allclose(output, reference_attention(query[19:], key[16:], value[16:]), rtol=0, atol=1e-4)
        odd = BlockSparse(vert_stride=100, local_blocks=1, block_size=6)
        with pytest.raises(InvalidArgumentError) as refused:
            step.decode(1, query[19:], key[19:], value[19:], block_sparse=odd)
        assert refused.value.field == "options.block_sparse.block_size"
