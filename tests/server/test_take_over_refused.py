"""State that a process does not take over: of another configuration, corrupt, or after a fault. And what it loses."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon_lives import Life
from each_row import each_row
from kept_files import HeldFiles, without_memory
from manual_clock import ManualClock

from kvservice.config import ServeConfig
from kvservice.errors import (
    InvalidArgumentError,
    ResourceExhaustedError,
    SequenceLostError,
    StaleStepError,
    UnknownSequenceError,
    UnknownSessionError,
)
from kvservice.kept import Section
from kvservice.saved import SavedFiles
from kvservice.server.core import state_identity
from kvservice.v1 import blocks_pb2, host_pb2, regions_pb2, store_pb2

TOKENS = list(range(10))


@pytest.fixture
def held() -> Iterator[HeldFiles]:
    held = HeldFiles()
    yield held
    held.close()


@pytest.fixture
def start(held: HeldFiles) -> Iterator[Callable[..., Life]]:
    """Return a function that starts the next process of the daemon, after the end of the one before."""
    lives: list[Life] = []
    clock = ManualClock()

    def start(**options: Any) -> Life:
        lives.append(Life(held, clock, **options))
        return lives[-1]

    yield start
    clock.close()


async def with_a_sequence(life: Life) -> Any:
    session = life.open()
    await life.compute(session, 1, TOKENS)
    return session


def check_empty(life: Life, token: bytes) -> None:
    assert len(life.sessions) == 0
    with pytest.raises(UnknownSessionError):
        life.attach(token)
    stats = life.manager.stats()
    assert (stats.sequences, stats.free_blocks, stats.cached_blocks) == (0, life.core.device.num_blocks, 0)
    life.manager.check_integrity()


CHANGES: dict[str, Any] = {
    "num_layers": 3,
    "block_size": 8,
    "dtype": "bfloat16",
    "num_blocks": 65,
    "swap_space_gib": 0.0,
    "max_sequences": 65,
    "max_sequence_tokens": 513,
    "max_sessions": 255,
    "max_labels": 33,
    "enable_prefix_caching": False,
    "share_pool": "read",
    "share_store": "read",
    "store_gib": 1 / 32,
}


def test_another_configuration_starts_empty_and_says_why(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(name: str, value: Any, held: HeldFiles) -> None:
        caplog.clear()
        life = Life(held, clock)
        session = await with_a_sequence(life)
        life.kill()
        life = Life(held, clock, **{name: value})
        assert life.core.report.outcome == "refused"
        assert {"swap_space_gib": "swap_blocks"}.get(name, name) in life.core.report.reason
        check_empty(life, session.token)
        (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert record.getMessage().endswith(life.core.report.reason)
        another = life.open()
        await life.allocate(another, 1, TOKENS)
        life.kill()
        life = Life(held, clock, **{name: value})
        assert life.core.report.outcome == "taken over"
        life.attach(another.token)
        life.kill()

    with each_row() as row:
        for name, value in CHANGES.items():
            with row(name), contextlib.closing(HeldFiles()) as held:
                asyncio.run(scenario(name, value, held))


def test_options_that_do_not_change_the_bytes_are_no_reason() -> None:
    """A process with another address, other limits on requests, or more threads takes over."""
    before, after = (
        ServeConfig(num_blocks=8, **options)
        for options in (
            {},
            {"tcp_address": "127.0.0.1:1", "num_threads": 2, "max_request_sequences": 9, "session_grace_s": 1.0},
        )
    )
    assert state_identity(before) == state_identity(after)


def test_the_scales_of_a_cache_are_known_by_their_values(tmp_path: Any) -> None:
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    for path, text in ((one, '{"k_scale": 2}'), (same, '{"k_scale": 2}'), (other, '{"k_scale": 3}')):
        path.write_text(text)
    identities = [
        state_identity(ServeConfig(num_blocks=8, head_size=64, kv_cache_dtype="fp8", kv_scales=str(path)))
        for path in (one, same, other)
    ]
    assert identities[0] == identities[1]
    assert identities[0] != identities[2]


def test_a_corrupt_state_is_dropped(start: Callable[..., Life], caplog: pytest.LogCaptureFixture) -> None:
    """A cached block has another token than its hash was computed from: its K/V would be found for a wrong prompt."""

    async def scenario() -> None:
        life = start()
        session = await with_a_sequence(life)
        state, row = life.manager, session.namespace.rows[1]
        state.device.token_ids[state.sequences.block_tables[row, 0], 2] += 1
        life.kill()
        life = start()
        assert life.core.report.outcome == "refused"
        assert life.core.report.reason.startswith("it is corrupt: ")
        check_empty(life, session.token)
        assert "all sessions and K/V are lost: it is corrupt: " in caplog.text
        session = await with_a_sequence(life)
        life.kill()
        life = start()
        assert life.core.report.outcome == "taken over"
        life.kill()

    asyncio.run(scenario())


def test_values_that_no_table_can_have_are_no_crash(start: Callable[..., Life]) -> None:
    async def scenario() -> None:
        for now, value in ((3, 1 << 40), (len(TOKENS), -1)):  # the number of blocks, and the lengths
            life = start()
            session = await with_a_sequence(life)
            columns = life.manager.sequences.states[session.namespace.rows[1]]
            assert (columns == now).any()
            columns[columns == now] = value
            life.kill()
            life = start()
            assert life.core.report.outcome == "refused"
            life.kill()

    asyncio.run(scenario())


def test_an_index_of_another_store_drops_the_state(start: Callable[..., Life], held: HeldFiles) -> None:
    """An error of the state that names no option is none that another start could mend."""

    async def scenario() -> None:
        life = start()
        session = await with_a_sequence(life)
        life.kill()
        os.pwrite(held.held["kvservice.state.store-index"], b"x" * 8, 0)
        life = start()
        assert (life.core.report.outcome, "of another store" in life.core.report.reason) == ("refused", True)
        check_empty(life, session.token)
        assert "kvservice.damaged.store-index" in held.held
        life.kill()

    asyncio.run(scenario())


def test_after_damage_in_any_kept_file_the_next_start_serves_and_the_one_after_it_takes_over(
    start: Callable[..., Life], held: HeldFiles
) -> None:
    """Its bytes are others at the beginning, in the middle, or at the end."""

    async def scenario(name: str, where: float) -> str:
        life = start()
        session = await with_a_sequence(life)
        life.kill()
        size = os.fstat(held.held[name]).st_size
        at = int(where * max(0, size - 64))
        os.pwrite(held.held[name], bytes(255 - byte for byte in os.pread(held.held[name], 64, at)), at)
        life = start()
        outcome = life.core.report.outcome
        if outcome == "refused":
            check_empty(life, session.token)
        beside = life.open()
        await life.compute(beside, 1, [7, *TOKENS])
        life.kill()
        life = start()
        assert life.core.report.outcome == "taken over", life.core.report.reason
        assert list(life.attach(beside.token).namespace.sequence_ids()) == [1]
        life.kill()
        held.close()
        return outcome

    async def names() -> list[str]:
        life = start()
        await with_a_sequence(life)
        life.kill()
        found = [*held.held]
        held.close()
        return found

    outcomes = set()
    with each_row() as row:
        for name in asyncio.run(names()):
            for where in (0.0, 0.5, 1.0):
                with row((name, where)):
                    outcomes.add(asyncio.run(scenario(name, where)))
    assert outcomes == {"refused", "taken over"}, "some of it is checked, and K/V and free space are not"


def test_a_lock_of_a_client_that_may_read_keeps_no_start_waiting(start: Callable[..., Life], held: HeldFiles) -> None:
    async def scenario() -> None:
        life = start(share_store="read")
        session = await with_a_sequence(life)
        locked = os.open(f"/proc/self/fd/{held.held['kvservice.state.store']}", os.O_RDONLY)
        fcntl.flock(locked, fcntl.LOCK_SH)
        life.kill()
        life = start(share_store="read")
        assert life.attach(session.token).namespace.sequence_ids() == [1]
        life.kill()
        os.close(locked)

    asyncio.run(scenario())


def test_an_unreadable_record_of_a_session_drops_the_state(start: Callable[..., Life]) -> None:
    async def scenario() -> None:
        life = start()
        session = await with_a_sequence(life)
        life.core.kept.table.section(Section.SESSIONS)[session.row.number] = b'{"session_id": 1'
        life.kill()
        life = start()
        assert life.core.report.outcome == "refused"
        check_empty(life, session.token)
        life.kill()

    asyncio.run(scenario())


def test_sessions_without_memory_name_their_option(monkeypatch: pytest.MonkeyPatch, clock: ManualClock) -> None:
    """The replies of all sessions take more memory than the pool."""
    with without_memory(monkeypatch, lambda: 32 << 20), pytest.raises(ResourceExhaustedError) as caught:
        Life(clock=clock, store_gib=0.0, share_store="off")
    assert caught.value.field == "max_sessions"


def test_a_start_that_fails_leaves_the_state_to_the_next(start: Callable[..., Life], tmp_path: Path) -> None:
    """The disk is in use by another daemon."""

    async def scenario() -> None:
        life = start()
        session = await with_a_sequence(life)
        life.kill()
        with contextlib.closing(SavedFiles(tmp_path / "sessions", 1 << 20)):
            for _ in range(3):
                with pytest.raises(InvalidArgumentError, match="in use by another daemon"):
                    start(disk=str(tmp_path))
        life = start()
        assert life.core.report.outcome == "taken over"
        assert life.attach(session.token).namespace.sequence_ids() == [1]
        life.kill()

    asyncio.run(scenario())


def test_a_device_that_failed_leaves_nothing(start: Callable[..., Life]) -> None:
    async def scenario() -> None:
        life = start()
        session = await with_a_sequence(life)
        life.core.kept.mark_faulted()
        life.kill()
        life = start()
        assert (life.core.report.outcome, life.core.report.reason) == ("refused", "the device failed")
        check_empty(life, session.token)
        life.kill()

    asyncio.run(scenario())


# ---- lost sequences and steps


def test_a_lost_sequence_is_named_until_it_is_freed(start: Callable[..., Life]) -> None:
    """A copy into a block of sequence 2 was not finished. Sequence 4 is created anew, sequence 2 is freed."""

    async def scenario() -> None:
        life = start()
        session = life.open()
        kv = await life.compute(session, 1, TOKENS)
        for sequence_id in (2, 4):
            await life.compute(session, sequence_id, list(range(20 * sequence_id, 20 * sequence_id + 8)))
        state, rows = life.manager, session.namespace.rows
        for sequence_id in (2, 4):
            state.unfinished_device[state.sequences.block_tables[rows[sequence_id], 1]] += 1
        life.kill()
        for _ in range(2):  # they are named again after another restart
            life = start()
            session = life.attach(session.token)
            described = await life.call(session, "describe", blocks_pb2.DescribeRequest())
            assert list(described.lost_sequence_ids) == [2, 4]
            assert (described.num_sequences, described.num_lost_sequences) == (1, 2)
            life.kill()
        assert life.core.report.lost.sequences == 0, "they were counted by the restart that lost them"
        described = await life.call(session, "describe", blocks_pb2.DescribeRequest(first=1))
        assert list(described.lost_sequence_ids) == [4]
        with pytest.raises(SequenceLostError) as caught:
            await life.call(session, "append", blocks_pb2.AppendRequest(sequence_ids=[1, 2], token_ids=[1, 2]))
        assert (caught.value.field, caught.value.metadata["sequence_id"]) == ("sequence_ids[1]", "2")
        assert np.array_equal(await life.read(session, 1, len(TOKENS)), kv)
        await life.call(session, "free", blocks_pb2.FreeRequest(sequence_ids=[2]))
        with pytest.raises(UnknownSequenceError) as unknown:
            await life.call(session, "append", blocks_pb2.AppendRequest(sequence_ids=[2], token_ids=[1]))
        assert not isinstance(unknown.value, SequenceLostError)
        await life.allocate(session, 4, [1])
        described = await life.call(session, "describe", blocks_pb2.DescribeRequest())
        assert (list(described.lost_sequence_ids), described.num_lost_sequences) == ([], 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("in_order", [False, True])
def test_a_step_goes_on_after_an_end_in_order_only(start: Callable[..., Life], in_order: bool) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        await life.compute(session, 2, TOKENS)  # a complete step is not counted
        await life.allocate(session, 1, [*TOKENS[1:], 7])
        opening = blocks_pb2.OpenStepRequest(request_id=5, sequence_ids=[1])
        step = await life.call(session, "open_step", opening)
        key = np.ones((len(TOKENS), 2, 32), np.float32)
        await life.core.engine.write(session.namespace, step.step_id, 0, key, 2 * key)
        life.end() if in_order else life.kill()
        life = start()
        session = life.attach(session.token)
        assert (life.core.report.kept.steps, life.core.report.lost.steps) == ((1, 0) if in_order else (0, 1))
        assert await life.call(session, "open_step", opening) == step
        writing = life.core.engine.write(session.namespace, step.step_id, 1, 3 * key, 4 * key)
        if not in_order:
            with pytest.raises(StaleStepError):
                await writing
            return
        await writing
        kv = await life.read(session, 1, len(TOKENS))
        assert kv[:, :, 0, 0, 0].tolist() == [[1.0, 3.0], [2.0, 4.0]]

    asyncio.run(scenario())


# ---- who gets the memory


@pytest.mark.parametrize("mode", ["read", "write"])
def test_clients_get_the_pool_and_the_store_and_nothing_else_that_is_kept(
    start: Callable[..., Life], held: HeldFiles, mode: str
) -> None:
    async def scenario() -> None:
        start(share_pool=mode, share_store=mode).kill()
        life = start(share_pool=mode, share_store=mode)
        session, writable = life.open(), mode == "write"
        await life.call(session, "map_pool", host_pb2.MapPoolRequest(writable=writable))
        await life.call(session, "store_map_store", store_pb2.MapStoreRequest(writable=writable))
        await life.call(session, "open_lane", host_pb2.OpenLaneRequest())
        await life.call(session, "create_region", regions_pb2.CreateRegionRequest(name="r", byte_size=4096))
        offered = [fd for offer in life.sessions.fd_server._offers.values() for fd in offer.descriptors]
        kept = {name: _file(fd) for name, fd in held.held.items()}
        handed = {name for name, file in kept.items() if file in map(_file, offered)}
        assert handed == {"kvservice.state.pool", "kvservice.state.store"}
        assert {"kvservice.state.table", "kvservice.state.private", "kvservice.state.swap"} < kept.keys()
        for fd in offered:
            if mode == "read" and _file(fd) in kept.values():
                assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        life.kill()

    asyncio.run(scenario())


def _file(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino
