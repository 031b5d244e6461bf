"""Block-sparse attention through the client: a CPU daemon does not support it and raises an error."""

from __future__ import annotations

import numpy as np
import pytest

from kvservice.client import BlockSparse, KVClient
from kvservice.errors import InvalidArgumentError


def test_a_daemon_on_the_cpu_refuses_the_pattern(client: KVClient) -> None:
    query, kv_tensor = np.ones((2, 4, 32), np.float32), np.ones((2, 2, 32), np.float32)
    with client.session() as kv:
        step = kv.open_step([kv.allocate([1, 2])])
        for sparse, field in (
            (BlockSparse(2, 1, 8), "options.block_sparse"),
            (BlockSparse(2, 1, 8, tp_rank=-1), "options.block_sparse.tp_rank"),
            (BlockSparse(2, 1.5, 8), "options.block_sparse.local_blocks"),  # type: ignore[arg-type]
        ):
            with pytest.raises(InvalidArgumentError) as refused:
                step.extend(0, query, kv_tensor, kv_tensor, block_sparse=sparse)
            assert refused.value.field == field
        np.testing.assert_allclose(step.extend(0, query, kv_tensor, kv_tensor), 1.0)


def test_what_is_stored_is_told(client: KVClient) -> None:
    assert (client.info.kv_cache_dtype, client.info.dtype, client.info.batch_invariant) == ("float32", "float32", False)
