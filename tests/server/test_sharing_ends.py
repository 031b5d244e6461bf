"""Tenants that share no longer: what their sessions had before is never another tenant's, whichever way they come back.

The chain hashes of a sequence tell who shares with it. A session whose tenant shares with others than when it began
ends: when the file is read again, when the daemon starts again, and when the session is to be restored.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from daemon_lives import Life
from kept_files import HeldFiles
from raw_store import identity, keys
from saved_rig import Reboot, files, resume_error
from sleeping import detach, resume, settle
from tenant_rig import FILE, NAMES, cached, calling, in_loop, tenant_options, written

from kvservice.auth import NUM_LOOKS, add_token
from kvservice.errors import SessionNotRestoredError, UnknownSessionError
from kvservice.server.tenants import Door
from kvservice.v1 import blocks_pb2, store_pb2

APART = FILE
SHARING = FILE.replace('["alice"]', '["alice"]\nshares_with = ["blue"]').replace(
    'admins = ["ops"]', 'admins = ["ops"]\nshares_with = ["red"]'
)
SECRET = list(range(100, 112))


def reload(life: Life, folder: Path, text: str) -> None:
    """Let a running daemon follow a new file."""
    written(folder, text)
    tenants = life.sessions._tenants
    assert tenants is not None
    assert [tenants.reload() for _ in range(NUM_LOOKS)] == [False] * (NUM_LOOKS - 1) + [True]
    life.sessions.apply_tenants()


async def begun(life: Life) -> Any:
    """Return a session of red's with the first token of blue's prompt, which it is about to guess."""
    with calling("alice"):
        session = life.open(detachable=True)
        await life.compute(session, 1, SECRET[:1], seed=9)
    return session


async def guess(life: Life, session: Any) -> None:
    """Append blue's prompt token by token, with other K/V than blue's."""
    for number, token in enumerate(SECRET[1:]):
        request = blocks_pb2.AppendRequest(sequence_ids=[1], token_ids=[token])
        step = await life.call(session, "append", request)
        await life.write(session, step.step_id, 1, seed=1000 + number)


# ---- saved sessions


@in_loop
async def test_a_saved_session_does_not_come_back_to_others_than_it_shared_with(tmp_path: Path, reboot: Reboot) -> None:
    options = tenant_options(tmp_path)
    written(tmp_path, SHARING)
    life = reboot(**options)
    alice = await begun(life)
    with calling("bob"):
        bob = life.open(detachable=True)
        own = await life.compute(bob, 1, SECRET, seed=1)
        await detach(life, bob)
    with calling("alice"):
        await detach(life, alice)
    reload(life, tmp_path, APART)
    for _ in range(2):
        for name, session in (("alice", alice), ("bob", bob)):
            with calling(name):
                error = await resume_error(life, session.token)
                assert isinstance(error, SessionNotRestoredError)
                assert error.metadata == {"cause": "sharing"}
        life.manager.check_integrity()
        assert (len(life.sessions), life.manager.stats().sequences) == (0, 0)
        life = reboot(**options)
    reload(life, tmp_path, SHARING)
    with calling("alice"):
        await guess(life, await resume(life, alice.token))
    with calling("bob"):
        again = await resume(life, bob.token)
        assert (await life.read(again, 1, 12) != own)[:, :, 1:].all(), "those who share find each other's blocks"
    life.manager.check_integrity()


@in_loop
async def test_a_session_of_before_there_were_tenants_does_not_come_back_to_them(
    tmp_path: Path, reboot: Reboot
) -> None:
    """Clients chose the names of its tenant, and all of them found its blocks."""
    tokens = tmp_path / "tokens"
    for name in NAMES:
        add_token(tokens, name)
    life = reboot(auth_tokens=str(tokens))
    with calling("alice"):
        session = life.open(tenant="red", detachable=True)
        await life.compute(session, 1, SECRET)
        await detach(life, session)
    life = reboot(auth_tokens=str(tokens), tenants=str(written(tmp_path)))
    with calling("alice"):
        assert (await resume_error(life, session.token)).metadata == {"cause": "sharing"}
    life = reboot(auth_tokens=str(tokens))
    with calling("alice"):
        assert list((await resume(life, session.token)).namespace.rows) == [1]


@pytest.mark.parametrize("stage", ["before its blocks are read", "before they are found"])
def test_tenants_that_change_while_a_session_is_restored(
    tmp_path: Path, reboot: Reboot, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    async def scenario() -> None:
        options = tenant_options(tmp_path)
        written(tmp_path, SHARING)
        life = reboot(**options)
        with calling("alice"):
            session = life.open(detachable=True)
            await life.compute(session, 1, SECRET)
            await detach(life, session)
        life.manager.reset_prefix_cache()
        waiting, go_on = asyncio.Event(), asyncio.Event()
        saved = life.core.saved.files
        assert saved is not None
        load = saved.load

        async def gated(*args: Any) -> int:
            loaded = await load(*args) if stage == "before they are found" else 0
            waiting.set()
            await go_on.wait()
            return loaded or await load(*args)

        monkeypatch.setattr(saved, "load", gated)
        with calling("alice"):
            restoring = asyncio.ensure_future(resume(life, session.token))
            await waiting.wait()
        reload(life, tmp_path, APART)
        assert life.sessions.tenant_uses()["red"][0].used == 1
        go_on.set()
        with pytest.raises(SessionNotRestoredError):
            await restoring
        assert life.sessions.tenant_uses()["red"][0].used == 0
        assert (len(life.sessions), life.manager.stats().sequences, life.manager.stats().cached_blocks) == (0, 0, 0)
        life.manager.check_integrity()

    asyncio.run(scenario())


@in_loop
async def test_a_session_that_is_restored_gets_the_quotas_of_now(
    tmp_path: Path, reboot: Reboot, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = reboot(**tenant_options(tmp_path))
    with calling("alice"):
        session = life.open(detachable=True)
        await life.compute(session, 1, SECRET)
        await detach(life, session)
    saved = life.core.saved.files
    assert saved is not None
    load = saved.load

    async def reloading(*args: Any) -> int:
        reload(life, tmp_path, APART.replace('["alice"]', '["alice"]\nmap_pool = true\nmax_blocks = 7'))
        return await load(*args)

    monkeypatch.setattr(saved, "load", reloading)
    with calling("alice"):
        again = await resume(life, session.token)
    assert again.tenancy.map_pool
    assert again.namespace.quota.max_blocks == 7


# ---- a daemon that starts again


@in_loop
async def test_a_new_process_with_another_file_ends_sessions_that_shared(tmp_path: Path, clock: Any) -> None:
    """Also those whose sequences are on the disk, with their files. The sessions of others go on."""
    held, options = HeldFiles(), tenant_options(tmp_path) | {"disk": str(tmp_path / "disk")}
    written(tmp_path, SHARING)
    first = Life(held, clock, **options)
    alice = await begun(first)
    with calling("bob"):
        bob = first.open(detachable=True)
        await first.compute(bob, 1, SECRET, seed=1)
        request = blocks_pb2.SwapOutRequest(sequence_ids=[1], tier=blocks_pb2.SWAP_TIER_DISK)
        await first.call(bob, "swap_out", request)
        opening = store_pb2.OpenNamespaceRequest(namespace=identity())
        opened = await first.call(bob, "store_open_namespace", opening)
        bob.store.add_writer(1)
        reserve = store_pb2.ReserveRequest(namespace_id=opened.namespace_id, keys=keys(1))
        assert (await first.call(bob, "store_reserve", reserve)).reservation_id
    with calling(door=Door.UNIX):
        local = first.open(detachable=True)
        await first.compute(local, 1, SECRET, seed=2)
    assert len(files(tmp_path)) == 1
    first.kill()
    written(tmp_path, APART)
    second = Life(held, clock, **options)
    for name, session in (("alice", alice), ("bob", bob)):
        with calling(name), pytest.raises(UnknownSessionError):
            second.attach(session.token)
    await settle()
    assert files(tmp_path) == []
    assert (second.core.report.kept.sessions, second.core.report.kept.sequences) == (1, 1)
    with calling(door=Door.UNIX):
        again = second.attach(local.token)
        assert len(again.namespace) == 1
    with calling("bob"):
        assert await cached(second, second.open()) == 0
    assert second.manager.stats().sequences == 1
    second.manager.check_integrity()
    second.kill()
    third = Life(held, clock, **options)
    assert third.core.report.kept.sessions == 2, "of this file's tenants all sessions live on"
    third.kill()
