"""Clients and commands over TCP with TLS and tokens against a daemon."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from both_faces import Face, session_of
from certificates import Authority
from click.testing import CliRunner, Result
from each_row import each_row
from secure_daemon import Secured, secured
from waiting import PATIENCE_S, until

from kvservice.cli import main
from kvservice.client import AsyncKVClient, KVClient, TLSConfig
from kvservice.environment import missing_environment
from kvservice.errors import KVServiceError, TLSHandshakeError, UnauthenticatedError, UnknownSessionError

KEY = np.random.default_rng(1).standard_normal((2, 4, 2, 32)).astype(np.float32)
FACES: list[Face] = ["blocking", "asyncio"]


@pytest.fixture
def ca(encrypted: Secured, tmp_path: Path) -> Path:
    file = tmp_path / "ca.crt"
    file.write_bytes(encrypted.authority.cert)
    return file


def test_a_session_over_tls(encrypted: Secured, ca: Path) -> None:
    async def play(face: Face) -> None:
        async with session_of(face, encrypted.address, "auto", tls=ca, token=encrypted.tokens["alice"]) as kv:
            assert kv.transport == "inline"
            sequence = await kv.allocate([1, 2, 3, 4])
            step = await kv.open_step([sequence])
            await step.write(KEY, KEY)
            key, _ = await kv.read(sequence, 0, 4)
            np.testing.assert_array_equal(key, KEY)

    for face in FACES:
        asyncio.run(play(face))


def test_a_token_cut_short_is_refused_once_and_not_tried_again(encrypted: Secured, ca: Path) -> None:
    async def play(face: Face, token: str) -> None:
        async with session_of(face, encrypted.address, "inline", tls=ca, token=token):
            raise AssertionError("the daemon let it in")

    for face in FACES:
        with pytest.raises(UnauthenticatedError, match="cut short") as caught:
            asyncio.run(play(face, encrypted.tokens["alice"][:-1]))
        assert caught.value.metadata == {"cause": "malformed"}


def test_events_over_tls(encrypted: Secured, ca: Path) -> None:
    with KVClient(encrypted.address, tls=ca, token=encrypted.tokens["bob"]) as client:
        with client.session() as kv:
            kv.open_step([kv.allocate([5, 6, 7, 8])]).write(KEY, KEY)
        events = client.events(start_number=1)
        assert next(events).number >= 1
        events.close()

    async def first() -> int:
        async with AsyncKVClient(encrypted.address, tls=ca, token=encrypted.tokens["bob"]) as client:
            stream = client.events(start_number=1)
            batch = await anext(stream)
            await stream.aclose()
            return batch.number

    assert asyncio.run(first()) >= 1


def test_a_session_is_resumed_by_its_owner_only(encrypted: Secured, ca: Path) -> None:
    alice, bob = (KVClient(encrypted.address, tls=ca, token=encrypted.tokens[name]) for name in ("alice", "bob"))
    with alice, bob, KVClient(encrypted.daemon.address, transport="inline") as local:
        kv = alice.session(detachable=True)
        sequence = kv.allocate([1, 2, 3])
        token = kv.detach()
        for other in (bob, local):
            with pytest.raises(UnknownSessionError):
                other.resume(token)
        with alice.resume(token) as kept:
            assert [info.sequence_id for info in kept.describe()] == [sequence.sequence_id]


def kvservice(*arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(main, arguments, env=environ)


@pytest.fixture
def presented(encrypted: Secured, tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(encrypted.tokens["alice"] + "\n")
    return file


def test_commands_take_options(encrypted: Secured, ca: Path, presented: Path) -> None:
    options = ("--tls-ca", str(ca), "--token-file", str(presented))
    assert kvservice("health", "--address", encrypted.address, *options).exit_code == 0


def test_commands_take_the_environment(encrypted: Secured, ca: Path) -> None:
    environ = {"KVSERVICE_TLS_CA": str(ca), "KVSERVICE_TOKEN": encrypted.tokens["bob"]}
    done = kvservice("top", "--once", "--json", "--address", encrypted.address, **environ)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["pool"]["num_blocks"] == 64


def test_the_demo_takes_them_too(monkeypatch: pytest.MonkeyPatch, ca: Path, presented: Path) -> None:
    given = {}

    def run(**arguments: Any) -> Any:
        given.update(arguments)
        raise KVServiceError("that is all")

    # The real module imports torch.
    monkeypatch.setitem(sys.modules, "kvservice.demo", SimpleNamespace(run=run, run_tiers=None))
    # Without these variables the command would start itself again.
    environ = missing_environment(os.environ) | {
        "KVSERVICE_TLS_CA": str(ca),
        "KVSERVICE_TOKEN_FILE": str(presented),
    }
    assert kvservice("demo", "--address", "example:1", **environ).output == "Error: that is all\n"
    credentials = given["credentials"]
    assert (credentials.tls, credentials.token) == (TLSConfig(str(ca)), presented.read_text().strip())


def test_health_says_why_not(encrypted: Secured, ca: Path) -> None:
    rows: list[tuple[dict[str, str], str]] = [
        ({}, "may expect TLS"),
        ({"KVSERVICE_TLS": "1"}, "a CA that the client does not trust"),
        ({"KVSERVICE_TLS_CA": "ca"}, "pass token= to the client, or KVSERVICE_TOKEN"),
        ({"KVSERVICE_TLS_CA": "/absent"}, "/absent"),
        ({"KVSERVICE_CLIENT_CERT": "ca"}, "go together"),
        ({"KVSERVICE_TLS_CA": "ca", "KVSERVICE_TOKEN_FILE": "/absent"}, "/absent"),
    ]
    with each_row() as row:
        for environ, said in rows:
            with row(environ):
                files = {name: str(ca) if value == "ca" else value for name, value in environ.items()}
                done = kvservice("health", "--address", encrypted.address, **files)
                assert done.exit_code == 1
                assert isinstance(done.exception, SystemExit)
                assert said in done.output


def test_on_the_unix_socket_none_of_it_counts(encrypted: Secured) -> None:
    environ = {"KVSERVICE_TLS": "1", "KVSERVICE_TOKEN": "anything"}
    assert kvservice("health", "--address", encrypted.daemon.address, **environ).exit_code == 0


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A daemon with a long grace time, whose tokens change."""
    with secured(tmp_path_factory.mktemp("patient"), tls=False, session_grace_s=PATIENCE_S) as running:
        yield running


@pytest.mark.parametrize("face", FACES)
def test_a_session_outlives_its_token_where_the_client_finds_the_next(
    patient: Secured, tmp_path: Path, face: Face
) -> None:
    presented, known = tmp_path / "alice.token", patient.files / "tokens"
    token = kvservice("token", "new", face, "--file", str(known)).output.strip()
    presented.write_text(token)
    log_before = patient.daemon.log.read_text()

    def log() -> str:
        return patient.daemon.log.read_text().removeprefix(log_before)

    until(lambda: "changed and is in use" in log())

    async def play() -> None:
        async with session_of(face, patient.address, "inline", token=presented) as kv:
            sequence = await kv.allocate([1, 2, 3])
            # A file with the next token of the same name, in place of the one with the first.
            successor = kvservice("token", "new", face, "--file", str(tmp_path / "next")).output.strip()
            presented.write_text(successor)
            os.replace(tmp_path / "next", known)
            await asyncio.to_thread(until, lambda: log().count("changed and is in use") == 2)
            (info,) = await kv.describe([sequence])
            assert info.length == 3

    asyncio.run(play())


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A daemon that identifies its clients by their certificates."""
    with secured(tmp_path_factory.mktemp("certified"), tokens=False, client_ca=True) as running:
        yield running


def as_client(directory: Path, authority: Authority, name: str) -> TLSConfig:
    ca = directory / "ca.crt"
    ca.write_bytes(authority.cert)
    return TLSConfig(ca, *authority.sign(name).write(directory, name or "unnamed"))


def test_certificates_name_their_owners(certified: Secured, tmp_path: Path) -> None:
    ours = certified.authority
    tls = {name: as_client(tmp_path, ours, name) for name in ("engine-1", "engine-2", "")}
    tokens = {}
    for name, config in tls.items():
        with KVClient(certified.address, tls=config) as client:
            tokens[name] = client.session(detachable=True).detach()
    again = as_client(tmp_path, ours, "engine-1")
    with KVClient(certified.address, tls=again) as client, KVClient(certified.daemon.address) as local:
        for name in ("engine-2", ""):
            with pytest.raises(UnknownSessionError):
                client.resume(tokens[name])
        for token in tokens.values():
            with pytest.raises(UnknownSessionError):
                local.resume(token)
        client.resume(tokens["engine-1"]).close()
    log = certified.daemon.log.read_text()
    assert "engine-1 connected from ipv4:127.0.0.1:" in log
    # The certificate has no common name, so the first alternative name is used.
    assert "localhost connected from" in log


def test_the_daemon_takes_new_certificates_by_itself(certified: Secured, tmp_path: Path) -> None:
    old = as_client(tmp_path, certified.authority, "engine")
    (tmp_path / "next").mkdir()
    successor = Authority("successor")
    new = as_client(tmp_path / "next", successor, "engine")
    KVClient(certified.address, tls=old).close()
    (certified.files / "clients.crt").write_bytes(successor.cert)
    successor.sign("daemon").write(certified.files, "tls")

    def connects() -> bool:
        try:
            KVClient(certified.address, tls=new).close()
        except KVServiceError:
            return False
        return True

    until(connects)
    with pytest.raises(TLSHandshakeError):
        KVClient(certified.address, tls=old)
