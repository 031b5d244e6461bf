"""Operations above the limits of one request: the client sends several requests, or raises the daemon's error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from small_pool import SMALL_POOL

from kvservice.client import KVClient, Session
from kvservice.errors import QuotaExceededError
from kvservice.launch import Daemon

LIMITS = {"max_request_sequences": 4, "max_request_tokens": 40, "max_request_blocks": 10, "max_sequence_tokens": 40}
KV = np.ones((2, 40, 2, 32), np.float32)


@pytest.fixture(scope="module")
def kv() -> Iterator[Session]:
    with Daemon(**SMALL_POOL | LIMITS) as daemon, KVClient(daemon.address) as client, client.session() as session:
        yield session


def test_the_limits_are_told(kv: Session) -> None:
    assert {name: getattr(kv.info, name) for name in LIMITS} == LIMITS


def test_many_sequences_are_described_and_freed(kv: Session) -> None:
    """Eleven sequences of up to 12 tokens exceed the limits of one request and of one response."""
    lengths = [1, 12, 12, 12, 12, 3, 3, 3, 3, 3, 3]
    prompts = [[100 * n + i for i in range(length)] for n, length in enumerate(lengths)]
    sequences = [kv.allocate(prompt) for prompt in prompts]
    plain = kv.describe()
    assert [info.length for info in plain] == lengths
    assert kv.describe(sequences[::-1]) == plain[::-1]
    for asked in (None, sequences):
        assert [list(info.token_ids) for info in kv.describe(asked, token_ids=True)] == prompts
        told = kv.describe(asked, block_ids=True)
        assert [len(info.block_ids) for info in told] == [info.num_blocks for info in plain]
    assert kv.describe([]) == []
    kv.free(sequences)
    assert kv.describe() == []


def test_what_cannot_be_cut_is_refused_by_name(kv: Session) -> None:
    def refused(call: Any, field: str, limit: str) -> None:
        before = kv.describe(token_ids=True)
        with pytest.raises(QuotaExceededError) as caught:
            call()
        assert (caught.value.field, caught.value.metadata["limit"]) == (field, limit)
        assert limit in str(caught.value)
        assert kv.describe(token_ids=True) == before

    refused(lambda: kv.allocate_batch([[1]] * 5), "sequences", "max_request_sequences")
    refused(lambda: kv.allocate_batch([range(30), range(30)]), "sequences.token_ids", "max_request_tokens")
    long = [kv.allocate(range(100 * n, 100 * n + 39)) for n in range(2)]
    refused(lambda: kv.open_step(long), "sequence_ids", "max_request_tokens")
    for one in long:
        kv.open_step([one]).write(KV[:, :39], KV[:, :39])
    refused(lambda: kv.append(long * 3, [1] * 6), "sequence_ids", "max_request_sequences")
    refused(lambda: kv.fork_batch(long), "parent_ids", "max_request_blocks")
    refused(lambda: kv.swap_out(long), "sequence_ids", "max_request_blocks")
    kv.free(long)
