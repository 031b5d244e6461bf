"""A client's session on the daemon's disk, over daemons that end in order, are killed, or begin with empty memory."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each_row import each_row
from small_pool import SMALL_POOL
from waiting import until

from kvservice.client import AsyncKVClient, KVClient, Sequence
from kvservice.errors import (
    InvalidArgumentError,
    QuotaExceededError,
    SavedSessionsOffError,
    SequenceSwappedError,
    SessionNotRestoredError,
    UnknownSessionError,
)
from kvservice.launch import Daemon

PROMPT = list(range(100, 118))


@pytest.fixture
def disk(tmp_path: Path) -> str:
    """A folder that outlives the daemons of a test."""
    return str(tmp_path / "disk")


def daemon_with(disk: str, **options: Any) -> Daemon:
    return Daemon(**SMALL_POOL | {"disk": disk} | options)


def compute(kv: Any, seed: int = 0) -> tuple[Any, Any]:
    """Allocate a prompt and write its K/V. Returns the sequence, and K/V."""
    info = kv.info
    shape = (info.num_layers, len(PROMPT), info.num_kv_heads, info.head_size)
    kv.reset_prefix_cache()
    keys, values = np.random.default_rng(seed).standard_normal((2, *shape)).astype(info.dtype)
    seq = kv.allocate(PROMPT)
    kv.open_step([seq]).write(keys, values)
    return seq, (keys, values)


def test_sessions_come_back_after_the_end_of_all_memory(disk: str) -> None:
    """The first daemon ends in order, the next one is killed."""
    tokens: dict[str, tuple[bytes, Any]] = {}
    with each_row() as row:
        for seed, end in enumerate((signal.SIGTERM, signal.SIGKILL, None)):
            with daemon_with(disk) as daemon:
                for number, transport in enumerate(("lane", "inline")):
                    with row(f"{transport}, before {end}"), KVClient(daemon.address, transport=transport) as client:
                        if transport in tokens:
                            check_comeback(client, *tokens[transport])
                        tokens[transport] = leave_a_session(client, 2 * seed + number)
                daemon.process.send_signal(end or signal.SIGKILL)
                daemon.process.wait()
                with row(f"files after {end}"):
                    assert len([*(Path(disk) / "sessions").glob("*.session")]) == 2, "the last two were not resumed"


def leave_a_session(client: KVClient, seed: int) -> tuple[bytes, Any]:
    """Detach a session. Returns its token, and the K/V of its prompt."""
    kv = client.session("engine", tenant="acme")
    seq, written = compute(kv, seed)
    kv.fork(seq)
    swapped = kv.fork(seq)
    kv.swap_out([swapped])
    kv.allocate([1, 2, 3])
    kv.free_later([kv.allocate([9])])
    return kv.detach(ttl_s=600, durable=True), written


def check_comeback(client: KVClient, token: bytes, written: Any) -> None:
    with client.session() as other:
        other.reset_prefix_cache()  # it may have blocks of the same prompt
    kv = client.resume(token)
    found = kv.describe(token_ids=True)
    assert [(one.length, one.num_computed_tokens, one.swapped) for one in found] == [
            (18, 18, False), (18, 18, False), (18, 18, True), (3, 0, False),
        ]  # fmt: skip
    assert [list(one.token_ids) for one in found] == [PROMPT, PROMPT, PROMPT, [1, 2, 3]]
    first, _, third, _ = (Sequence(one.sequence_id, one.length) for one in found)
    assert kv.lost_sequences() == []
    with pytest.raises(SequenceSwappedError):
        kv.read(third, 0, 1)
    kv.swap_in([third])
    for one in (first, third):
        for there, before in zip(kv.read(one, 0, 18), written, strict=True):
            assert np.array_equal(there, before)
    kv.close()
    with pytest.raises(UnknownSessionError):
        client.resume(token)


def test_a_daemon_that_is_killed_with_a_keeper_has_the_session_on_its_disk(disk: str) -> None:
    """A new process takes the memory over, in which the session is not any more."""
    with daemon_with(disk, keeper=True) as daemon, KVClient(daemon.address) as client:
        kv = client.session()
        _, written = compute(kv)
        token = kv.detach(durable=True)
        waiting = client.session("another engine", detachable=True)
        os.kill(daemon.daemon_pid(), signal.SIGKILL)
        waiting.describe()
        kv = client.resume(token)
        (found,) = kv.describe()
        seq = Sequence(found.sequence_id, found.length)
        for there, before in zip(kv.read(seq, 0, 18), written, strict=True):
            assert np.array_equal(there, before)


def test_detached_sessions_wait_in_memory_or_on_the_disk(disk: str, daemon: Daemon) -> None:
    async def scenario(address: str) -> bytes:
        async with AsyncKVClient(address) as client:
            async with client.session() as kv:
                await kv.allocate(PROMPT)
                token = await kv.detach(durable=True)
            async with client.resume(token) as kv:
                assert [one.length for one in await kv.describe()] == [len(PROMPT)]
                return await kv.detach(durable=True)

    with daemon_with(disk, disk_sessions_gib=2e-5) as own, KVClient(own.address) as client:
        token = asyncio.run(scenario(own.address))
        with client.resume(token) as kv:
            assert [one.length for one in kv.describe()] == [len(PROMPT)]
        # With a time and without a disk any session waits.
        kv = client.session()
        kv.allocate(PROMPT)
        with client.resume(kv.detach(ttl_s=60)) as kv:
            assert len(kv.describe()) == 1
        until(lambda: not list((Path(disk) / "sessions").glob("*.session")))
        # A detach that fails leaves the session in use.
        with client.session() as kv:
            compute(kv)
            with pytest.raises(QuotaExceededError, match="bytes needed"):
                kv.detach(durable=True)
            assert len(kv.describe()) == 1
    with KVClient(daemon.address) as client, client.session() as kv:
        seq, _ = compute(kv)
        with pytest.raises(SavedSessionsOffError):
            kv.detach(durable=True)
        with pytest.raises(InvalidArgumentError, match="ttl_s"):
            kv.detach(ttl_s=-1)
        kv.append([seq], [5])


def test_a_session_of_another_model_is_refused_with_the_reason(disk: str) -> None:
    """Both come back in a daemon of their own model."""
    models: list[dict[str, Any]] = [{"dtype": "float16", "head_size": 32}, {"dtype": "bfloat16", "head_size": 64}]
    tokens: list[bytes] = []
    contents: list[Any] = []
    for number in range(4):
        with daemon_with(disk, **models[number % 2]) as daemon, KVClient(daemon.address) as client:
            if number == 1:
                for reason in ("head_size was 32, is 64", "dtype was 'float16', is 'bfloat16'"):
                    with pytest.raises(SessionNotRestoredError, match=reason) as raised:
                        client.resume(tokens[0])
                    assert raised.value.metadata == {"cause": "another_model"}
            if number < 2:
                kv = client.session()
                contents.append(compute(kv, number)[1])
                tokens.append(kv.detach(durable=True))
                continue
            kv = client.resume(tokens[number % 2])
            (found,) = kv.describe()
            read = kv.read(Sequence(found.sequence_id, 18), 0, 18)
            for there, before in zip(read, contents[number % 2], strict=True):
                assert np.array_equal(there, before)


def test_sequences_that_are_swapped_out_to_the_disk_survive_a_kill_and_a_reboot(disk: str) -> None:
    with daemon_with(disk, keeper=True) as daemon, KVClient(daemon.address) as client:
        kv = client.session()
        seq, written = compute(kv)
        other = kv.allocate([7] * 18)
        assert kv.swap_out([seq, other], tier="disk") == 10
        with pytest.raises(InvalidArgumentError, match="tier: is 'tape'"):
            kv.swap_out([seq], tier="tape")
        os.kill(daemon.daemon_pid(), signal.SIGKILL)
        assert [(one.swapped, one.on_disk, one.length) for one in kv.describe()] == [(True, True, 18)] * 2
        assert kv.can_swap_in([seq]) == "ok"
        assert kv.swap_in([seq]) > 0
        for there, before in zip(kv.read(seq, 0, 18), written, strict=True):
            assert np.array_equal(there, before)
        kv.swap_out([seq], tier="disk")
        token = kv.detach(durable=True)
    with daemon_with(disk) as daemon, KVClient(daemon.address) as client, client.resume(token) as kv:
        kv.free([other])
        kv.swap_in([seq])
        for there, before in zip(kv.read(seq, 0, 18), written, strict=True):
            assert np.array_equal(there, before)
