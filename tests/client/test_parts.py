"""Tensors larger than a message are sent and read in parts, with the same result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from each_row import each_row

from kvservice.client import KVClient, Session, Step
from kvservice.client.threads import finish
from kvservice.errors import FailedPreconditionError, InvalidArgumentError, LayerWrittenError, MessageTooLargeError
from kvservice.launch import Daemon
from kvservice.v1 import attention_pb2
from kvservice.wire import put_tensor

HEADS, KV_HEADS, HEAD_SIZE, LAYERS = 32, 8, 64, 2
POOL: dict[str, Any] = {
    "num_layers": LAYERS,
    "num_kv_heads": KV_HEADS,
    "head_size": HEAD_SIZE,
    "dtype": "float32",
    "block_size": 8,
    "num_blocks": 512,
    "swap_space_gib": 0.0,
    "max_sequence_tokens": 512,
    "max_message_mib": 1,
}
# Lengths of the sequences in tokens. Some tokens are already computed. Parts of 85 tokens end inside sequences.
LENGTHS = (3, 150, 1, 90, 40)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with Daemon(**POOL) as daemon:
        yield daemon.address


def tensors(num_tokens: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    source = np.random.default_rng(seed)
    shapes = ((num_tokens, heads, HEAD_SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return tuple(source.standard_normal(shape).astype(np.float32) for shape in shapes)


def open_step(kv: Session, name: bytes) -> Step:
    """Open a step over sequences that share no prefix with others. Two of them have computed tokens."""
    sequences = [
        kv.allocate(range(1000 * n, 1000 * n + length), extra_keys=[(0, name)]) for n, length in enumerate(LENGTHS)
    ]
    before = kv.open_step([sequences[1], sequences[4]], [20, 30])
    query, key, value = tensors(50, seed=1)
    for layer in range(LAYERS):
        before.extend(layer, query, key, value)
    return kv.open_step(sequences)


def attend(kv: Session, name: bytes, **options: Any) -> list[tuple[Any, Any]]:
    step = open_step(kv, name)
    query, key, value = tensors(step.num_tokens)
    assert query.nbytes + key.nbytes + value.nbytes > 2 * kv.info.max_message_bytes
    return [step.extend(layer, query, key, value, return_lse=True, **options) for layer in range(LAYERS)]


@pytest.mark.parametrize("transport", ["inline", "region"])
def test_a_layer_in_parts_is_as_one_that_is_whole(address: str, transport: str) -> None:
    """Splitting does not change the result. A lane sends no tensors in messages, so it does not split the layer."""
    with (
        KVClient(address, transport="lane") as whole,
        KVClient(address, transport=transport) as cut,
        whole.session() as one,
        cut.session() as other,
    ):
        for options in ({}, {"sliding_window": 17}, {"logits_soft_cap": 3.0}):
            name = f"{transport} {options}".encode()
            expected = attend(one, b"whole " + name, **options)
            found = attend(other, b"cut " + name, **options)
            for (output, lse), (wanted, wanted_lse) in zip(found, expected, strict=True):
                np.testing.assert_allclose(output, wanted, rtol=1e-4, atol=1e-5)
                np.testing.assert_allclose(lse, wanted_lse, rtol=1e-4, atol=1e-5)
        for kv in (one, other):
            assert all(info.num_computed_tokens == info.length for info in kv.describe())


def test_results_where_the_caller_wants_them(address: str) -> None:
    with KVClient(address, transport="inline") as client, client.session() as kv:
        step = open_step(kv, b"results")
        query, key, value = tensors(step.num_tokens)
        out, lse = np.empty_like(query), np.empty((step.num_tokens, HEADS), np.float32)
        assert step.extend(0, query, key, value, return_lse=True, out=out, lse_out=lse)[0] is out
        step = open_step(kv, b"results again")
        wanted, wanted_lse = step.extend(0, query, key, value, return_lse=True)
        np.testing.assert_array_equal(out, wanted)
        np.testing.assert_array_equal(lse, wanted_lse)


@pytest.mark.parametrize("transport", ["inline", "region"])
def test_keys_and_values_are_written_and_read_in_parts(address: str, transport: str) -> None:
    with KVClient(address, transport=transport) as client, client.session() as kv:
        sequence = kv.allocate(range(500), extra_keys=[(0, transport.encode())])
        step = kv.open_step([sequence])
        shape = (LAYERS, 500, KV_HEADS, HEAD_SIZE)
        key, value = (np.random.default_rng(n).standard_normal(shape).astype(np.float32) for n in range(2))
        assert key[0].nbytes + value[0].nbytes > client.info.max_message_bytes
        step.write(key, value)
        for layer in (None, 1):
            found = kv.read(sequence, 3, 497, layer)
            part = (slice(None) if layer is None else layer, ..., slice(3, 497), slice(None), slice(None))
            for array, expected in zip(found, (key, value), strict=True):
                np.testing.assert_array_equal(array, expected[part])


def test_where_outputs_must_not_depend_on_the_batch_nothing_is_cut() -> None:
    with (
        Daemon(**POOL, batch_invariant=True) as daemon,
        KVClient(daemon.address, transport="inline") as client,
        client.session() as kv,
    ):
        step = open_step(kv, b"invariant")
        query, key, value = tensors(step.num_tokens)
        with pytest.raises(MessageTooLargeError):
            step.extend(0, query, key, value)


def request(step: Step, first: int, count: int, **changes: Any) -> attention_pb2.AttendRequest:
    made = attention_pb2.AttendRequest(step_id=step.step_id, first_token=first, num_tokens=count, **changes)
    num_tokens = count or step.num_tokens - first
    for array, message in zip(tensors(max(num_tokens, 0)), (made.query, made.key, made.value), strict=True):
        put_tensor(array, message)
    return made


def test_parts_come_in_their_order(address: str) -> None:
    with KVClient(address, transport="inline") as client, client.session() as kv:
        sequence = kv.allocate(range(7000, 7010))
        step = kv.open_step([sequence])

        def send(*part: int, layer: int = 0, name: str = "extend") -> Any:
            return kv._core.context.connection.call(name, request(step, *part, layer=layer))

        def refused(kind: type[Exception], field: str, *part: int) -> None:
            with pytest.raises(kind) as caught:
                finish(send(*part))
            assert caught.value.field == field  # type: ignore[attr-defined]

        refused(InvalidArgumentError, "first_token", -1, 2)
        refused(InvalidArgumentError, "first_token", 10, 0)
        refused(InvalidArgumentError, "num_tokens", 4, 7)
        refused(InvalidArgumentError, "num_tokens", 0, -1)
        refused(FailedPreconditionError, "first_token", 1, 2)
        finish(send(0, 4))
        refused(LayerWrittenError, "first_token", 0, 4)
        refused(LayerWrittenError, "first_token", 3, 4)
        refused(LayerWrittenError, "first_token", 0, 0)
        refused(FailedPreconditionError, "first_token", 5, 1)
        zeros = np.zeros((LAYERS, 10, KV_HEADS, HEAD_SIZE), np.float32)
        with pytest.raises(LayerWrittenError):
            step.write(zeros, zeros)
        finish(send(0, 0, layer=1))
        finish(send(4, 1))
        assert kv.describe([sequence])[0].num_computed_tokens == 0
        finish(send(5, 0))
        assert kv.describe([sequence])[0].num_computed_tokens == 10
        refused(LayerWrittenError, "layer", 9, 1)


def test_how_tokens_are_cut(address: str) -> None:
    """Calls around the limit of one message, of whose parts each is as large as it may be."""
    with KVClient(address, transport="inline") as client, client.session() as kv:
        per_token = (HEADS + 2 * KV_HEADS) * HEAD_SIZE * 4
        whole = kv.info.max_message_bytes // per_token
        with each_row() as row:
            for num_tokens in (*range(whole - 2, whole + 3), *range(2 * whole - 3, 2 * whole + 3), 3 * whole + 1):
                sequence = kv.allocate(range(num_tokens), extra_keys=[(0, b"%d" % num_tokens)])
                with row(num_tokens):
                    step = kv.open_step([sequence])
                    query, key, value = tensors(num_tokens)
                    for layer in range(LAYERS):
                        step.extend(layer, query, key, value)
                    for found, one in zip(kv.read(sequence, 0, num_tokens), (key, value), strict=True):
                        np.testing.assert_array_equal(found, [one] * LAYERS)
                kv.free([sequence])
        sequence = kv.allocate([1])
        assert [part.shape[1] for part in kv.read(sequence, 0, 0)] == [0, 0], "no token is one part as well"
        # A token that does not fit is refused.
        step = kv.open_step([sequence])
        heads = kv.info.max_message_bytes // (HEAD_SIZE * 4)
        wide = np.ones((1, heads, HEAD_SIZE), np.float32)
        with pytest.raises(MessageTooLargeError):
            step.extend(0, wide, *tensors(1)[1:])
