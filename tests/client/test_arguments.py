"""Invalid arguments raise an error that names the field, before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from each_row import each_row

from kvservice.client import AsyncKVClient, BlockSparse, KVClient, Session, Step
from kvservice.client.messages import sequence_allocation
from kvservice.errors import InvalidArgumentError, MessageTooLargeError
from kvservice.launch import Daemon
from kvservice.v1 import blocks_pb2

LIMIT_TOKENS = 4 * 2**20 // 4  # max_message_mib of the shared daemon, in token ids
KV = np.ones((3, 2, 32), np.float32)


@pytest.fixture
def kv(client: KVClient) -> Iterator[Session]:
    with client.session() as session:
        yield session


def prompt_step(kv: Session) -> Step:
    return kv.open_step([kv.allocate([1, 2, 3])])


# A session, a sequence of it and a step, as arguments of any type may be given.
Call = Callable[[Any, Any, Any], Any]


WRONG: tuple[tuple[Call, str], ...] = (
    (lambda kv, seq, step: kv.truncate(seq, math.nan), "lengths"),
    (lambda kv, seq, step: kv.truncate(seq, 1.5), "lengths"),
    (lambda kv, seq, step: kv.allocate([1.5]), "token_ids"),
    (lambda kv, seq, step: kv.allocate([math.nan]), "token_ids"),
    (lambda kv, seq, step: kv.allocate(np.ones(2)), "token_ids"),
    (lambda kv, seq, step: kv.allocate(np.ones((2, 2), np.int32)), "token_ids"),
    (lambda kv, seq, step: kv.allocate([2**31]), "token_ids"),
    (lambda kv, seq, step: kv.allocate([1], sequence_id="one"), "sequence_ids"),
    (lambda kv, seq, step: kv.allocate([1], lookahead=math.nan), "lookahead"),
    (lambda kv, seq, step: kv.allocate([1], extra_keys=[(0, "text")]), "key"),
    (lambda kv, seq, step: kv.allocate([1], extra_keys=[(math.nan, b"")]), "position"),
    (lambda kv, seq, step: kv.allocate_batch([[1], [2]], sequence_ids=[5]), "sequence_ids"),
    (lambda kv, seq, step: kv.append([seq], [1], num_tokens=[1, 1]), "num_tokens"),
    (lambda kv, seq, step: kv.open_step([seq], math.nan), "num_tokens"),
    (lambda kv, seq, step: kv.pin([1], ttl_s="long"), "ttl_s"),
    (lambda kv, seq, step: kv.read(seq, math.nan, 1), "start"),
    (lambda kv, seq, step: kv.read(seq, 0, "1"), "stop"),
    (lambda kv, seq, step: kv.read(seq, 0, 2**33), "ranges[0].stop"),
    (lambda kv, seq, step: kv.read(seq, 0, 2**70), "start"),
    (lambda kv, seq, step: kv.read(seq, -1, 1), "ranges[0].start"),
    (lambda kv, seq, step: kv.append(kv.describe()[:1], [1]), "sequences[0]"),
    (lambda kv, seq, step: kv.truncate(kv.describe()[0], 1), "sequences[0]"),
    (lambda kv, seq, step: kv.fork(kv.describe()[0]), "parents[0]"),
    (lambda kv, seq, step: kv.allocate(5), "token_ids"),
    (lambda kv, seq, step: kv.allocate([1], extra_keys="x"), "extra_keys"),
    (lambda kv, seq, step: kv.allocate([1], extra_keys=5), "extra_keys"),
    (lambda kv, seq, step: kv.match_prefix([1], [5]), "extra_keys"),
    (lambda kv, seq, step: kv.allocate([1], timeout_s=KV), "timeout_s"),
    (lambda kv, seq, step: kv.allocate_batch(None), "prompts"),
    (lambda kv, seq, step: kv.allocate_batch([[1]], sequence_ids=5), "sequence_ids"),
    (lambda kv, seq, step: kv.allocate_batch([[1]], extra_keys=[(), ()]), "extra_keys"),
    (lambda kv, seq, step: kv.can_allocate(1), "prompts"),
    (lambda kv, seq, step: kv.free(seq), "sequences"),
    (lambda kv, seq, step: kv.free([seq.sequence_id]), "sequences[0]"),
    (lambda kv, seq, step: kv.free([seq, None]), "sequences[1]"),
    (lambda kv, seq, step: kv.free(iter([5])), "sequences"),
    (lambda kv, seq, step: kv.free_later(seq), "sequences"),
    (lambda kv, seq, step: kv.free_later([5]), "sequences[0]"),
    (lambda kv, seq, step: kv.describe("abc"), "sequences[0]"),
    (lambda kv, seq, step: kv.describe(token_ids=KV), "token_ids"),
    (lambda kv, seq, step: kv.append(seq, [1]), "sequences"),
    (lambda kv, seq, step: kv.append([5], [1]), "sequences[0]"),
    (lambda kv, seq, step: kv.append([seq], 1), "token_ids"),
    (lambda kv, seq, step: kv.open_step(seq), "sequences"),
    (lambda kv, seq, step: kv.fork_batch(seq), "parents"),
    (lambda kv, seq, step: kv.fork_batch([seq], 5), "child_ids"),
    (lambda kv, seq, step: kv.swap_out([seq], tier=[]), "tier"),
    (lambda kv, seq, step: kv.read(seq.sequence_id, 0, 1), "sequence"),
    (lambda kv, seq, step: kv.commit(step.step_id), "step"),
    (lambda kv, seq, step: kv.commit_ahead(None, [1]), "step"),
    (lambda kv, seq, step: kv.unpin(5), "pin"),
    (lambda kv, seq, step: kv.unregister_region("x"), "region"),
    (lambda kv, seq, step: kv.map_pool(writable=KV), "writable"),
    (lambda kv, seq, step: kv.open_scheduler(policy=[]), "policy"),
    (lambda kv, seq, step: kv.open_scheduler().add(5), "requests"),
    (lambda kv, seq, step: kv.open_scheduler().add([5]), "requests"),
    (lambda kv, seq, step: kv.open_scheduler().schedule([None]), "reports"),
    (lambda kv, seq, step: kv.open_scheduler().abort(5), "request_ids"),
    (lambda kv, seq, step: step.extend(0, KV, KV, KV, scale="x"), "options.scale"),
    (lambda kv, seq, step: step.extend(0, KV, KV, KV, scale=[5]), "options.scale"),
    (lambda kv, seq, step: step.extend(0, KV, KV, KV, logits_soft_cap=None), "options.logits_soft_cap"),
    (lambda kv, seq, step: step.extend(0, KV, KV, KV, alibi_slopes=1.0), "options.alibi_slopes"),
    (lambda kv, seq, step: step.extend(0, KV, KV, KV, alibi_slopes=["x", 1]), "options.alibi_slopes"),
    (lambda kv, seq, step: step.extend(0, KV, KV, KV, block_sparse=5), "options.block_sparse"),
    (lambda kv, seq, step: step.extend(0, KV, KV, KV, return_lse=KV), "return_lse"),
    (lambda kv, seq, step: step.extend(0.5, KV, KV, KV), "layer"),
    (lambda kv, seq, step: step.extend(2**40, KV, KV, KV), "layer"),
    (lambda kv, seq, step: step.extend(0, KV.tolist(), KV, KV), "query"),
    (lambda kv, seq, step: step.extend(0, KV.astype(np.int8), KV, KV), "query"),
    (lambda kv, seq, step: step.extend(0, KV, torch.ones(3, 2, 32, dtype=torch.int32), KV), "key"),
    (lambda kv, seq, step: step.extend(0, KV, KV, KV, scale=0), "options.scale"),
    (lambda kv, seq, step: step.extend(0, KV, KV, KV, scale=1e-60), "options.scale"),
    (lambda kv, seq, step: step.extend(0, KV, KV, KV, sliding_window=math.nan), "options.sliding_window"),
)


def test_the_field_is_named_and_the_session_goes_on(kv: Session) -> None:
    with each_row() as row:
        for number, (call, field) in enumerate(WRONG):
            with row(f"{number}: {field}"):
                step = prompt_step(kv)
                before = kv.describe(token_ids=True)
                with pytest.raises(InvalidArgumentError) as caught:
                    call(kv, step.sequences[0], step)
                assert caught.value.field == field
                assert kv.describe(token_ids=True) == before
                np.testing.assert_array_equal(step.extend(0, KV, KV, KV), KV)
                kv.free(step.sequences)


def test_a_message_over_the_limit_is_not_sent(kv: Session) -> None:
    calls: dict[str, Callable[[Session, list[int]], Any]] = {
        "allocate": lambda kv, tokens: kv.allocate(tokens),
        "can_allocate": lambda kv, tokens: kv.can_allocate([tokens]),
        "append": lambda kv, tokens: kv.append([kv.allocate([1])], tokens, num_tokens=[len(tokens)]),
        "match_prefix": lambda kv, tokens: kv.match_prefix(tokens),
        "pin": lambda kv, tokens: kv.pin(tokens, ttl_s=1),
    }
    tokens = [7] * LIMIT_TOKENS
    with each_row() as row:
        for name, call in calls.items():
            with row(name):
                with pytest.raises(MessageTooLargeError):
                    call(kv, tokens)
                assert kv.allocate([1]).length == 1


def test_a_tensor_with_too_many_tokens_is_told_by_its_shape_also_if_it_fits_into_no_message(daemon: Daemon) -> None:
    large = np.ones((2, 1 << 15, 2, 32), np.float32)
    calls: dict[str, tuple[Callable[[Step], Any], str]] = {
        "query": (lambda step: step.extend(0, large[0], KV, KV), "query.shape"),
        "key": (lambda step: step.extend(0, KV, large[0], KV), "key.shape"),
        "a layer": (lambda step: step.write(KV, large[0], 0), "value.shape"),
        "all layers": (lambda step: step.write(large, large), "key.shape"),
    }
    with KVClient(daemon.address, transport="inline") as inline, inline.session() as kv, each_row() as row:
        for name, (call, field) in calls.items():
            with row(name):
                with pytest.raises(InvalidArgumentError) as caught:
                    call(prompt_step(kv))
                assert caught.value.field == field


def test_outputs_are_of_the_callers_kind_and_own_their_memory(kv: Session) -> None:
    for kind in (np.asarray, torch.from_numpy):
        output, lse = prompt_step(kv).extend(0, kind(KV), kind(KV), kind(KV), return_lse=True)
        assert type(output) is type(kind(KV))
        output[:] = 0
        assert tuple(lse.shape) == (3, 2)


def test_token_ids_may_come_as_any_whole_numbers(kv: Session) -> None:
    for token_ids in ([1, 2], (1, 2), range(1, 3), np.array([1, 2]), torch.tensor([1, 2]), iter([1, 2])):
        sequence = kv.allocate(token_ids)
        assert kv.describe([sequence], token_ids=True)[0].token_ids == (1, 2)


def test_a_resumed_session_names_new_sequences_anew(client: KVClient) -> None:
    first = client.session(detachable=True)
    kept = first.allocate([1, 2])
    with client.resume(first.detach()) as second:
        assert second.session_id == first.session_id
        made, child = second.allocate([3]), second.fork(kept)
        assert len({kept.sequence_id, made.sequence_id, child.sequence_id}) == 3


def test_a_message_too_large_for_the_daemon_costs_the_stream_and_not_the_session(client: KVClient) -> None:
    # The session is detachable, because on a busy machine the grace period may end before the client notices.
    with client.session(detachable=True) as kv:
        parent = kv.allocate([1])
        with pytest.raises(MessageTooLargeError):
            kv.fork_batch([parent] * (LIMIT_TOKENS // 2))
        assert [info.sequence_id for info in kv.describe()] == [parent.sequence_id]


def test_a_token_that_is_not_bytes_is_named(client: KVClient) -> None:
    for token in ("junk", None, 1):
        with pytest.raises(InvalidArgumentError) as caught:
            client.resume(token)  # type: ignore[arg-type]
        assert caught.value.field == "token"


def test_a_transport_that_does_not_exist_is_named_at_once() -> None:
    transport: Any
    for transport in ("", "Lane", "tcp", None):
        for client in (KVClient, AsyncKVClient):
            with pytest.raises(InvalidArgumentError) as caught:
                client("127.0.0.1:1", transport=transport)
            assert caught.value.field == "transport"


def test_a_daemon_on_the_cpu_refuses_block_sparse_attention(kv: Session) -> None:
    query, kv_tensor = np.ones((2, 4, 32), np.float32), np.ones((2, 2, 32), np.float32)
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


def test_a_prompt_is_the_message_that_protobuf_makes() -> None:
    keys = [blocks_pb2.ExtraKey(position=1, key=b"adapter")]
    prompts: tuple[Any, ...] = ([], [0, 2**31 - 1, -1], [np.int64(5), 6])
    with each_row() as row:
        for token_ids in prompts:
            with row(token_ids):
                made = sequence_allocation(7, token_ids, keys)
                expected = blocks_pb2.SequenceAllocation(sequence_id=7, token_ids=token_ids, extra_keys=keys)
                assert made == expected
                assert made.SerializeToString() == expected.SerializeToString()
