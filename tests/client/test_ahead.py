"""Steps ahead of a client that has mapped the pool: what it writes, when it counts, and what ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from both_faces import Face, session_of
from each_row import each_row
from small_daemons import OpenDaemon

from kvservice import ops
from kvservice.client import KVClient, MappedPool, OneStep, ScheduledRequest, Sequence, Session, Step
from kvservice.client.threads import finish
from kvservice.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    KVServiceError,
    OutOfBlocksError,
    PoolNotSharedError,
    SequenceScheduledError,
    StaleStepError,
)
from kvservice.v1 import host_pb2

LAYERS, HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 2, 4, 2, 32, 4
PROMPTS = ([701, 702, 703, 704, 705], [801], [901, 902, 903, 904])


def tensors(token_ids: list[int], position: int, layer: int) -> list[np.ndarray]:
    """Return query, key and value of one token of each sequence, which depend on the token, place and layer only."""
    found: list[list[np.ndarray]] = [[], [], []]
    for token in token_ids:
        rng = np.random.default_rng((token, position, layer))
        for part, heads in zip(found, (HEADS, KV_HEADS, KV_HEADS), strict=True):
            part.append(rng.standard_normal((heads, HEAD_SIZE)).astype(np.float32))
    return [np.stack(part) for part in found]


def next_tokens(out: np.ndarray) -> list[int]:
    """Sample tokens from the outputs of the last layer, float32[n, heads, head_size]."""
    return [int(abs(float(row.sum())) * 1e3) % 1000 for row in out]


@pytest.fixture
def address(open_daemon: OpenDaemon) -> str:
    return open_daemon("float32", "write").address


@pytest.fixture
def kv(address: str) -> Iterator[Session]:
    with KVClient(address, transport="mapped") as client:
        with client.session() as session:
            yield session
        with client.session() as session:
            session.reset_prefix_cache()


def computed(kv: Session, *prompts: list[int]) -> list[Sequence]:
    """Allocate and compute sequences."""
    sequences = [kv.allocate(prompt) for prompt in prompts]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        step = kv.open_step([sequence])
        new = prompt[len(prompt) - step.num_tokens :]
        for layer in range(LAYERS):
            places = [tensors([token], len(prompt) - len(new) + i, layer) for i, token in enumerate(new)]
            step.extend(layer, *(np.concatenate(parts) for parts in zip(*places, strict=True)))
    return sequences


def generate(kv: Session, sequences: list[Sequence], first: list[int], count: int) -> list[list[int]]:
    """Generate tokens with an append for each."""
    tokens, found = first, []
    for _ in range(count):
        positions = [sequence.length for sequence in sequences]
        step = kv.append(sequences, tokens)
        found.append(tokens)
        for layer in range(LAYERS):
            rows = [tensors([token], at, layer) for token, at in zip(tokens, positions, strict=True)]
            out = step.decode(layer, *(np.concatenate(parts) for parts in zip(*rows, strict=True)))
        tokens = next_tokens(out)
    return [list(one) for one in zip(*found, strict=True)]


def decode(pool: MappedPool, one: OneStep, tokens: list[int], positions: list[int]) -> list[int]:
    """Compute a token of each sequence in the mapped pool. Returns the next ones."""
    for layer in range(LAYERS):
        rows = [tensors([token], at, layer) for token, at in zip(tokens, positions, strict=True)]
        query, key, value = (np.concatenate(parts) for parts in zip(*rows, strict=True))
        ops.write_kv(pool.pool, layer, one.slot_mapping, key, value)
        out = ops.attention(pool.pool, layer, query, one.query_lens, one.block_tables, one.context_lens)
    return next_tokens(out)


def generate_ahead(
    kv: Session, pool: MappedPool, sequences: list[Sequence], first: list[int], counts: list[int]
) -> list[list[int]]:
    """Generate tokens in steps ahead, `counts` of them before each commit. Twice as many have slots, so that the next
    ones could be computed while the commit is on its way."""
    step: Step | None = kv.open_ahead(sequences, 2 * counts[0])
    tokens, found = first, [list[int]() for _ in sequences]
    for i, count in enumerate(counts):
        assert step is not None
        tables, new = pool.step(step), [list[int]() for _ in sequences]
        lengths = [sequence.length for sequence in sequences]
        for number in range(count):
            one = tables.ahead(number)
            for row, token in zip(new, tokens, strict=True):
                row.append(token)
            tokens = decode(pool, one, tokens, [length + number for length in lengths])
        tables.check()
        following = 2 * counts[i + 1] if i + 1 < len(counts) else 0
        step = kv.commit_ahead(step, [token for row in new for token in row], num_steps=following)
        found = [old + row for old, row in zip(found, new, strict=True)]
    assert step is None
    return found


def test_the_same_tokens_as_with_an_append_for_each(kv: Session) -> None:
    pool = kv.map_pool(writable=True)
    for counts in ([1, 1, 1], [4, 4, 4], [3, 7, 1, 5]):
        kv.reset_prefix_cache()
        plain = computed(kv, *PROMPTS)
        expected = generate(kv, plain, [1, 2, 3], sum(counts))
        kv.free(plain)
        kv.reset_prefix_cache()
        sequences = computed(kv, *PROMPTS)
        assert generate_ahead(kv, pool, sequences, [1, 2, 3], counts) == expected
        for prompt, sequence, tokens in zip(PROMPTS, sequences, expected, strict=True):
            (found,) = kv.describe([sequence], token_ids=True)
            assert (found.length, found.num_computed_tokens) == (sequence.length, sequence.length)
            assert list(found.token_ids) == prompt + tokens
            full = sequence.length // BLOCK_SIZE * BLOCK_SIZE
            assert kv.match_prefix(prompt + tokens) == full
        # Other steps go on where they end.
        assert generate(kv, sequences, [7, 8, 9], 2)[0][0] == 7
        kv.free(sequences)


def test_a_step_is_used_while_it_is_committed(kv: Session) -> None:
    """The tables of the next step, of any size, take the place of those of the committed one in the daemon's memory."""
    pool = kv.map_pool(writable=True)
    with each_row() as row:
        for num_steps in (2, 7, 40):
            with row(num_steps):
                check_use_while_committing(kv, pool, num_steps)


def check_use_while_committing(kv: Session, pool: MappedPool, num_steps: int) -> None:
    kv.reset_prefix_cache()
    plain = computed(kv, *PROMPTS)
    expected = generate(kv, plain, [1, 2, 3], 4)
    kv.free(plain)
    kv.reset_prefix_cache()
    sequences = computed(kv, *PROMPTS)
    lengths, step = [sequence.length for sequence in sequences], kv.open_ahead(sequences, 4)
    tables, tokens, found = pool.step(step), [1, 2, 3], list[list[int]]()
    for number in range(4):
        one = tables.ahead(number)
        if number == 2:
            tables.check()
            committed = [token for row in zip(*found, strict=True) for token in row]
            following = kv.commit_ahead(step, committed, num_steps=num_steps)
        found.append(tokens)
        tokens = decode(pool, one, tokens, [length + number for length in lengths])
    assert following is not None
    pool.step(following).check()
    assert kv.commit_ahead(following, [token for row in zip(*found[2:], strict=True) for token in row]) is None
    assert [list(row) for row in zip(*found, strict=True)] == expected
    kv.free(sequences)


@pytest.mark.parametrize("face", ["blocking", "asyncio"])
def test_both_faces(address: str, face: Face) -> None:
    async def scenario() -> None:
        async with session_of(face, address, "inline") as session:
            sequence = await session.allocate(PROMPTS[0])
            kv_of = np.ones((LAYERS, len(PROMPTS[0]), KV_HEADS, HEAD_SIZE), np.float32)
            step = await session.open_step([sequence])
            await step.write(kv_of, kv_of)
            await session.map_pool(writable=True)
            ahead = await session.open_ahead([sequence], 3)
            assert (ahead.query_lens.tolist(), ahead.context_lens.tolist()) == ([3], [8])
            following = await session.commit_ahead(ahead, [5, 6], num_tokens=[2], num_steps=1)
            assert sequence.length == 7
            assert following.context_lens.tolist() == [8]
            assert await session.commit_ahead(following, []) is None
            assert sequence.length == 7
            await session.free([sequence])
            await session.reset_prefix_cache()

    asyncio.run(scenario())


def test_a_step_ahead_has_no_layers(kv: Session) -> None:
    (sequence,) = computed(kv, PROMPTS[0])
    step = kv.open_ahead([sequence], 2)
    for _ in range(2):  # the transport refuses it, and the daemon
        for call in (
            lambda: step.extend(0, *tensors([1, 2], 0, 0)),
            lambda: step.write(*np.zeros((2, LAYERS, 2, KV_HEADS, HEAD_SIZE), np.float32)),
            lambda: kv.commit(step),
        ):
            with pytest.raises(FailedPreconditionError) as raised:
                call()
            assert raised.value.field == "step_id"
        step.info = replace(step.info, ahead=False, mapped=None)


def test_tables_of_other_steps_have_no_token_ahead(kv: Session) -> None:
    pool = kv.map_pool(writable=True)
    (sequence,) = computed(kv, PROMPTS[0])
    ahead = pool.step(kv.open_ahead([sequence], 3))
    for number in (-1, 3):
        with pytest.raises(InvalidArgumentError):
            ahead.ahead(number)
    step = kv.append([sequence], [1])
    with pytest.raises(FailedPreconditionError):
        pool.step(step).ahead(0)
    with pytest.raises(StaleStepError):
        ahead.check()


ENDS: dict[str, Callable[[Session, Sequence], Any]] = {
    "append": lambda kv, sequence: kv.append([sequence], [1]),
    "fork": lambda kv, sequence: kv.fork(sequence),
    "truncate": lambda kv, sequence: kv.truncate(sequence, 2),
    "swap out": lambda kv, sequence: kv.swap_out([sequence]),
    "free": lambda kv, sequence: kv.free([sequence]),
    "another": lambda kv, sequence: kv.open_ahead([sequence], 1),
}


def test_what_ends_it(address: str) -> None:
    """Its tables, and its commit, raise StaleStepError after that."""
    with each_row() as row:
        for name, end in ENDS.items():
            with row(name), KVClient(address, transport="mapped") as client, client.session() as kv:
                check_end(kv, end)
                kv.reset_prefix_cache()


def check_end(kv: Session, end: Callable[[Session, Sequence], Any]) -> None:
    pool = kv.map_pool(writable=True)
    (sequence,) = computed(kv, PROMPTS[0])
    step = kv.open_ahead([sequence], 3)
    tables = pool.step(step)
    tables.check()
    end(kv, sequence)
    with pytest.raises(StaleStepError):
        tables.check()
    with pytest.raises(StaleStepError):
        kv.commit_ahead(step, [1])


def test_a_step_lasts_until_the_end_of_those_that_follow_it(address: str) -> None:
    """Its tables are valid until then, although its place has the tables of others."""
    with each_row() as row:
        for name, end in ENDS.items():
            with row(name), KVClient(address, transport="mapped") as client, client.session() as kv:
                check_steps_that_follow(kv, end)
                kv.reset_prefix_cache()


def check_steps_that_follow(kv: Session, end: Callable[[Session, Sequence], Any]) -> None:
    pool = kv.map_pool(writable=True)
    (sequence,) = computed(kv, PROMPTS[0])
    steps = [kv.open_ahead([sequence], 3)]
    found = [pool.step(steps[0])]
    for token in range(3):
        step = kv.commit_ahead(steps[-1], [token], num_steps=3)
        assert step is not None
        steps.append(step)
        found.append(pool.step(step))
        for tables in found:
            tables.check()
    with pytest.raises(StaleStepError):
        kv.commit_ahead(steps[0], [1])
    for step in steps[:-1]:  # its place has the tables of another
        with pytest.raises(StaleStepError):
            pool.step(step)
    end(kv, sequence)
    kv.open_ahead(computed(kv, PROMPTS[1]), 3)  # may have the same place in the tables
    for tables in found:
        with pytest.raises(StaleStepError):
            tables.check()


def test_a_commit_that_fails_changes_nothing(kv: Session) -> None:
    (sequence,) = computed(kv, PROMPTS[0])
    step = kv.open_ahead([sequence], 3)
    half = kv.info.num_blocks // 2 * BLOCK_SIZE
    kv.allocate(range(half))
    calls: list[tuple[type[KVServiceError], str, Callable[[], Any]]] = [
        (OutOfBlocksError, "", lambda: kv.commit_ahead(step, [1], num_steps=half + BLOCK_SIZE)),
        (InvalidArgumentError, "num_steps", lambda: kv.commit_ahead(step, [1], num_steps=-1)),
        (InvalidArgumentError, "num_steps", lambda: kv.commit_ahead(step, [1], num_steps=1.5)),  # type: ignore[arg-type]
        (InvalidArgumentError, "token_ids", lambda: kv.commit_ahead(step, [1, 2, 3, 4])),
        (InvalidArgumentError, "num_tokens", lambda: kv.commit_ahead(step, [1], num_tokens=[1, 1])),
        (InvalidArgumentError, "token_ids[0]", lambda: kv.commit_ahead(step, [-1])),
    ]
    for error, field, call in calls:
        with pytest.raises(error) as raised:
            call()
        assert raised.value.field == field
        assert sequence.length == len(PROMPTS[0])
        assert kv.describe([sequence])[0].length == len(PROMPTS[0])
    assert kv.commit_ahead(step, [1, 2, 3]) is None
    assert sequence.length == len(PROMPTS[0]) + 3


def test_who_has_not_mapped_the_pool_for_writing_opens_none(open_daemon: OpenDaemon) -> None:
    for share_pool, transport in (("write", "inline"), ("read", "mapped"), ("off", "inline")):
        daemon = open_daemon("float32", share_pool)
        with KVClient(daemon.address, transport=transport) as client, client.session() as other:
            mine = other.allocate([1])
            with pytest.raises(PoolNotSharedError):
                other.open_ahead([mine], 1)
            with pytest.raises(PoolNotSharedError):
                other.commit_ahead(other.open_step([mine]), [1])


def test_the_sequences_of_the_scheduler_have_none(kv: Session) -> None:
    scheduler = kv.open_scheduler(max_step_tokens=8)
    scheduler.add([ScheduledRequest(5, [1, 2], max_tokens=2)])
    scheduler.schedule()
    with pytest.raises(SequenceScheduledError):
        kv.open_ahead([Sequence(5, 2)], 1)


def test_steps_of_another_session_are_refused(address: str, kv: Session) -> None:
    """Their ids may be the same."""
    with KVClient(address, transport="mapped") as client, client.session() as other:
        steps = [one.open_ahead(computed(one, PROMPTS[0]), 2) for one in (kv, other)]
        assert len({step.step_id for step in steps}) == 1
        for call in (lambda: kv.commit_ahead(steps[1], [1]), lambda: kv.commit(steps[1])):
            with pytest.raises(InvalidArgumentError) as raised:
                call()
            assert raised.value.field == "step"
        assert [one.length for step in steps for one in step.sequences] == [len(PROMPTS[0])] * 2
        assert kv.commit_ahead(steps[0], [1]) is None


def test_tokens_whose_slots_nobody_knew_are_refused(kv: Session) -> None:
    """The mapping has ended, and with it the tables."""
    (sequence,) = computed(kv, PROMPTS[0])
    pool = kv.map_pool(writable=True)
    step = kv.open_ahead([sequence], 2)
    tables = pool.step(step)
    finish(kv._core.context.connection.send("unmap_pool", host_pb2.UnmapPoolRequest()))
    with pytest.raises(StaleStepError):
        tables.check()
    kv.map_pool(writable=True)
    with pytest.raises(FailedPreconditionError) as raised:
        kv.commit_ahead(step, [1])
    assert raised.value.field == "step_id"
    following = kv.commit_ahead(step, [], num_steps=2)
    assert following is not None
    assert following.mapped is not None
    assert kv.commit_ahead(following, [1, 2]) is None
    assert sequence.length == len(PROMPTS[0]) + 2


def test_a_step_is_committed_after_a_resume_only_if_it_is_opened_again(address: str) -> None:
    with KVClient(address, transport="inline") as client:
        kv = client.session("first", detachable=True)
        kv.map_pool(writable=True)
        (sequence,) = computed(kv, PROMPTS[1])
        step = kv.open_ahead([sequence], 2)
        with client.resume(kv.detach()) as resumed:
            resumed.map_pool(writable=True)
            with pytest.raises((FailedPreconditionError, StaleStepError)):
                resumed.commit_ahead(step, [1])
            again = resumed.open_ahead([Sequence(sequence.sequence_id, sequence.length)], 2)
            assert resumed.commit_ahead(again, [1]) is None
