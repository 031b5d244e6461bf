"""The mapped pool: access rights of a client, when blocks count as computed, and steps that end."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small_daemons import OpenDaemon

from kvservice import ops
from kvservice.client import KVClient, MappedPool, Session, Step
from kvservice.client.regions import fetch
from kvservice.client.threads import finish
from kvservice.errors import InvalidArgumentError, LayerWrittenError, PoolNotSharedError, StaleStepError
from kvservice.v1 import attention_pb2, host_pb2
from kvservice.wire import put_tensor

LAYERS, HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 2, 4, 2, 32, 4
PROMPT = list(range(700, 711))
FULL = 2 * BLOCK_SIZE  # tokens of the prompt in full blocks


def tensors(seed: int, num_tokens: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = ((num_tokens, heads, HEAD_SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def sessions(open_daemon: OpenDaemon, share_pool: str, transport: str) -> Iterator[Session]:
    with KVClient(open_daemon("float32", share_pool).address, transport=transport) as client:
        with client.session() as session:
            yield session
        with client.session() as session:
            session.reset_prefix_cache()


@pytest.fixture
def writer(open_daemon: OpenDaemon) -> Iterator[Session]:
    yield from sessions(open_daemon, "write", "mapped")


@pytest.fixture
def reader(open_daemon: OpenDaemon) -> Iterator[Session]:
    yield from sessions(open_daemon, "read", "mapped")


@pytest.fixture
def stranger(open_daemon: OpenDaemon) -> Iterator[Session]:
    """Another client of the daemon that lets clients write the pool."""
    yield from sessions(open_daemon, "write", "inline")


def pool_of(kv: Session) -> MappedPool:
    pool: MappedPool = kv._core.calls.transport.pool  # type: ignore[attr-defined]
    return pool


def call(kv: Session, name: str, request: Any) -> Any:
    return finish(kv._core.context.connection.send(name, request))


def write_directly(kv: Session, step: Step, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Write K/V of all layers of a step through `kvservice.ops`."""
    pool = pool_of(kv)
    mapped = pool.step(step)
    layers = [tensors(seed + layer, step.num_tokens)[1:] for layer in range(LAYERS)]
    for layer, (key, value) in enumerate(layers):
        ops.write_kv(pool.pool, layer, mapped.slot_mapping, key, value)
    mapped.check()
    keys, values = zip(*layers, strict=True)
    return np.stack(keys), np.stack(values)


def test_what_is_written_counts_once_it_is_committed(writer: Session, stranger: Session) -> None:
    step = writer.open_step([writer.allocate(PROMPT)])
    written = write_directly(writer, step, 1)
    assert writer.describe()[0].num_computed_tokens == 0
    assert stranger.match_prefix(PROMPT) == 0
    assert stranger.allocate(PROMPT, sequence_id=9).num_cached_tokens == 0
    call(writer, "commit", host_pb2.CommitRequest(step_id=step.step_id))
    assert writer.describe()[0].num_computed_tokens == len(PROMPT)
    assert stranger.match_prefix(PROMPT) == FULL
    np.testing.assert_equal(writer.read(step.sequences[0], 0, len(PROMPT)), written)
    # Another client reads the same K/V from the shared blocks.
    sharing = stranger.allocate(PROMPT)
    assert sharing.num_cached_tokens == FULL
    np.testing.assert_equal(stranger.read(sharing, 0, FULL), tuple(part[:, :FULL] for part in written))
    with pytest.raises(LayerWrittenError):
        call(writer, "commit", host_pb2.CommitRequest(step_id=step.step_id))


def test_the_transport_commits_with_the_last_layer(writer: Session, stranger: Session) -> None:
    step = writer.open_step([writer.allocate(PROMPT)])
    for layer in reversed(range(LAYERS)):
        assert stranger.match_prefix(PROMPT) == 0
        step.extend(layer, *tensors(layer, len(PROMPT)))
    assert stranger.match_prefix(PROMPT) == FULL


def test_what_is_never_committed_is_never_found(writer: Session, stranger: Session) -> None:
    sequence = writer.allocate(PROMPT)
    write_directly(writer, writer.open_step([sequence]), 1)
    writer.free([sequence])
    assert stranger.match_prefix(PROMPT) == 0


def test_the_daemon_is_told_which_layers_were_written(writer: Session, stranger: Session) -> None:
    step = writer.open_step([writer.allocate(PROMPT)])
    write_directly(writer, step, 1)

    def commit(*layers: int) -> None:
        call(writer, "commit", host_pb2.CommitRequest(step_id=step.step_id, layers=layers))

    for wrong in ((0, 0), (0, LAYERS), (-1,)):
        with pytest.raises(InvalidArgumentError, match="layer"):
            commit(*wrong)
    commit(1)
    with pytest.raises(LayerWrittenError):
        commit(0, 1)
    assert stranger.match_prefix(PROMPT) == 0
    commit(0)
    assert stranger.match_prefix(PROMPT) == FULL


def test_a_step_of_the_daemons_cannot_be_committed(writer: Session) -> None:
    step = writer.open_step([writer.allocate(PROMPT)])
    key, value = tensors(0, len(PROMPT))[1:]
    request = attention_pb2.WriteRequest(step_id=step.step_id, layer=0)
    put_tensor(key, request.key)
    put_tensor(value, request.value)
    call(writer, "write", request)
    with pytest.raises(LayerWrittenError):
        call(writer, "commit", host_pb2.CommitRequest(step_id=step.step_id))


Operation = Callable[..., Any]


@pytest.mark.parametrize("operation", ["attention", "write_kv"])
def test_a_step_that_ends_meanwhile_is_an_error(
    writer: Session, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """The step's blocks are reallocated between the checks before and after the operation."""
    sequence = writer.allocate(PROMPT)
    step = writer.open_step([sequence])
    right: Operation = getattr(ops, operation)

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        writer.free([sequence])
        taken = writer.open_step([writer.allocate(range(900, 911))])
        zeros = np.zeros((LAYERS, 11, KV_HEADS, HEAD_SIZE), np.float32)
        taken.write(zeros, zeros)
        return right(*args, **kwargs)

    monkeypatch.setattr(ops, operation, meanwhile)
    with pytest.raises(StaleStepError):
        step.extend(0, *tensors(0, len(PROMPT)))
    with pytest.raises(StaleStepError):
        step.extend(0, *tensors(0, len(PROMPT)))


def test_tables_are_those_of_the_step(writer: Session) -> None:
    sequences = writer.allocate_batch([PROMPT, [1], range(40, 60)])
    step = writer.open_step(sequences)
    mapped = pool_of(writer).step(step)
    np.testing.assert_array_equal(mapped.query_lens, step.query_lens)
    np.testing.assert_array_equal(mapped.context_lens, step.context_lens)
    blocks = [one.block_ids for one in writer.describe(block_ids=True)]
    for row, ids in zip(mapped.block_tables.tolist(), blocks, strict=True):
        assert tuple(row[: len(ids)]) == ids
    slots = [ids[n // BLOCK_SIZE] * BLOCK_SIZE + n % BLOCK_SIZE
             for ids, length in zip(blocks, (11, 1, 20), strict=True) for n in range(length)]  # fmt: skip
    assert mapped.slot_mapping.tolist() == slots
    for array in (mapped.slot_mapping, mapped.query_lens, mapped.context_lens, mapped.block_tables):
        assert not array.flags.writeable


def test_layers_of_steps_in_turns_are_counted_for_each(writer: Session) -> None:
    """A step that is over and comes again does not take its slot in the tables back."""
    sequences = writer.allocate_batch([PROMPT, range(40, 51)])
    stale = writer.open_step(sequences[:1])
    stale.extend(0, *tensors(0, 11))
    steps = [writer.open_step([sequence]) for sequence in sequences]
    assert stale.mapped in [step.mapped for step in steps]
    for layer in range(LAYERS):
        for step in steps:
            step.extend(layer, *tensors(layer, 11))
            with pytest.raises(StaleStepError):
                stale.extend(1, *tensors(1, 11))
    assert [one.num_computed_tokens for one in writer.describe()] == [11, 11]


def test_a_step_that_the_tables_lack_is_the_daemons(writer: Session) -> None:
    step, same = (writer.open_step([writer.allocate(range(n, n + 11))]) for n in (0, 100))
    step.info = replace(step.info, mapped=None)
    for layer in range(LAYERS):
        wanted = same.extend(layer, *tensors(layer, 11))
        np.testing.assert_array_equal(step.extend(layer, *tensors(layer, 11)), wanted)
    assert [one.num_computed_tokens for one in writer.describe()] == [11, 11]


def map_again(kv: Session, *, writable: bool) -> list[int]:
    """Map the pool once more and return the descriptors of the pool and the tables."""
    response = call(kv, "map_pool", host_pb2.MapPoolRequest(writable=writable))
    assert kv._core.context.fds.path is not None
    return fetch(kv._core.context.fds.path, response.handover_token, 2)


def check_not_writable(descriptor: int) -> None:
    size = os.fstat(descriptor).st_size
    mmap.mmap(descriptor, size, prot=mmap.PROT_READ).close()
    for protection in (mmap.PROT_WRITE, mmap.PROT_READ | mmap.PROT_WRITE):
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, size, prot=protection)
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    for length in (0, size + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, length)
    # Opening the descriptor through procfs yields the same file.
    reopened = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(reopened, size)
    os.close(reopened)


def test_who_may_read_cannot_write(reader: Session) -> None:
    pool = pool_of(reader)
    assert not pool.pool.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        pool.pool[...] = 1
    step = reader.open_step([reader.allocate(PROMPT)])
    with pytest.raises(InvalidArgumentError, match="is read-only"):
        write_directly(reader, step, 1)
    with pytest.raises(PoolNotSharedError) as caught:
        map_again(reader, writable=True)
    assert caught.value.field == "writable"
    with pytest.raises(PoolNotSharedError):
        call(reader, "commit", host_pb2.CommitRequest(step_id=step.step_id))
    for descriptor in map_again(reader, writable=False):
        check_not_writable(descriptor)
        os.close(descriptor)


def test_nobody_writes_to_the_tables_or_resizes_the_pool(writer: Session) -> None:
    pool, tables = map_again(writer, writable=True)
    check_not_writable(tables)
    for length in (0, os.fstat(pool).st_size + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(pool, length)
    for descriptor in (pool, tables):
        os.close(descriptor)


def test_who_reads_sees_what_others_write(reader: Session, open_daemon: OpenDaemon) -> None:
    """The bytes are at the blocks of the block table."""
    with KVClient(open_daemon("float32", "read").address, transport="inline") as client, client.session() as kv:
        step = kv.open_step([kv.allocate(PROMPT)])
        key, value = (np.stack([tensors(layer, len(PROMPT))[part] for layer in range(LAYERS)]) for part in (1, 2))
        step.write(key, value)
        (ids,) = (one.block_ids for one in kv.describe(block_ids=True))
        slots = np.array([ids[n // BLOCK_SIZE] * BLOCK_SIZE + n % BLOCK_SIZE for n in range(len(PROMPT))])
        for layer in range(LAYERS):
            found = ops.read_kv(pool_of(reader).pool, layer, slots, head_size=HEAD_SIZE)
            np.testing.assert_equal(found, (key[layer], value[layer]))
