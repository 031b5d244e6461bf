"""A client's session on the daemon's disk, over daemons that end in order, are killed, or begin with empty memory."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_pool import SMALL_POOL

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
    keys, values = np.random.default_rng(seed).standard_normal((2, *shape)).astype(info.dtype)
    seq = kv.allocate(PROMPT)
    kv.open_step([seq]).write(keys, values)
    return seq, (keys, values)


@pytest.mark.parametrize("transport", ["lane", "inline"])
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_session_comes_back_after_the_end_of_all_memory(disk: str, end: signal.Signals, transport: str) -> None:
    with daemon_with(disk) as daemon, KVClient(daemon.address, transport=transport) as client:
        kv = client.session("engine", tenant="acme")
        seq, written = compute(kv)
        kv.fork(seq)
        swapped = kv.fork(seq)
        kv.swap_out([swapped])
        kv.allocate([1, 2, 3])
        kv.free_later([kv.allocate([9])])
        token = kv.detach(ttl_s=600, durable=True)
        daemon.process.send_signal(end)
        daemon.process.wait()
    with daemon_with(disk) as daemon, KVClient(daemon.address, transport=transport) as client:
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
        assert [path.name for path in (Path(disk) / "sessions").iterdir()] == ["lock"]


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


def test_the_async_client_detaches_and_resumes(disk: str) -> None:
    async def scenario(address: str) -> bytes:
        async with AsyncKVClient(address) as client:
            async with client.session() as kv:
                await kv.allocate(PROMPT)
                token = await kv.detach(durable=True)
            async with client.resume(token) as kv:
                assert [one.length for one in await kv.describe()] == [len(PROMPT)]
                return await kv.detach(durable=True)

    with daemon_with(disk) as daemon:
        token = asyncio.run(scenario(daemon.address))
        with KVClient(daemon.address) as client:
            assert [one.length for one in client.resume(token).describe()] == [len(PROMPT)]


def test_a_detach_that_fails_leaves_the_session_in_use(disk: str) -> None:
    with daemon_with("") as daemon, KVClient(daemon.address) as client, client.session() as kv:
        seq, _ = compute(kv)
        with pytest.raises(SavedSessionsOffError):
            kv.detach(durable=True)
        with pytest.raises(InvalidArgumentError, match="ttl_s"):
            kv.detach(ttl_s=-1)
        kv.append([seq], [5])
    with daemon_with(disk, disk_sessions_gib=5e-6) as daemon, KVClient(daemon.address) as client:
        kv = client.session()
        compute(kv)
        with pytest.raises(QuotaExceededError, match="bytes needed"):
            kv.detach(durable=True)
        assert len(kv.describe()) == 1


def test_detach_with_a_time_makes_any_session_wait(disk: str) -> None:
    with daemon_with(disk) as daemon, KVClient(daemon.address) as client:
        kv = client.session()
        kv.allocate(PROMPT)
        kv = client.resume(kv.detach(ttl_s=60))
        assert len(kv.describe()) == 1
        assert not list((Path(disk) / "sessions").glob("*.session"))


def test_a_session_of_another_model_is_refused_with_the_reason(disk: str) -> None:
    with daemon_with(disk) as daemon, KVClient(daemon.address) as client:
        kv = client.session()
        compute(kv)
        token = kv.detach(durable=True)
    with daemon_with(disk, head_size=64) as daemon, KVClient(daemon.address) as client:
        for _ in range(2):
            with pytest.raises(SessionNotRestoredError, match="head_size was 32, is 64") as raised:
                client.resume(token)
            assert raised.value.metadata == {"cause": "another_model"}
    with daemon_with(disk) as daemon, KVClient(daemon.address) as client:
        assert len(client.resume(token).describe()) == 1


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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_dtype_comes_back(disk: str, dtype: str) -> None:
    with daemon_with(disk, dtype=dtype) as daemon, KVClient(daemon.address) as client:
        kv = client.session()
        _, written = compute(kv)
        token = kv.detach(durable=True)
    error = pytest.raises(SessionNotRestoredError, match=f"dtype was '{dtype}', is 'float32'")
    with daemon_with(disk) as daemon, KVClient(daemon.address) as client, error:
        client.resume(token)
    with daemon_with(disk, dtype=dtype) as daemon, KVClient(daemon.address) as client:
        kv = client.resume(token)
        (found,) = kv.describe()
        for there, before in zip(kv.read(Sequence(found.sequence_id, 18), 0, 18), written, strict=True):
            assert np.array_equal(there, before)
