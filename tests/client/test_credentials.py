"""TLS and token arguments of clients, and the errors if client and daemon do not match."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority, Signed
from click.testing import CliRunner
from each_row import each_row
from ports import free_port
from small_pool import SMALL_POOL
from waiting import until

from kvservice.cli import main
from kvservice.client import AsyncKVClient, Cluster, KVClient, TLSConfig
from kvservice.errors import ConnectionLostError, InvalidArgumentError, TLSHandshakeError
from kvservice.launch import Daemon

AUTHORITY, STRANGER = Authority(), Authority("another authority")
DAEMON = AUTHORITY.sign("daemon")
FACES = ("blocking", "asyncio")
# TIMEOUT_S is enough for a connection attempt that fails. PATIENCE_S limits the retries if no attempt fails for good.
TIMEOUT_S, PATIENCE_S = 20.0, 0.2


class Answers(grpc.GenericRpcHandler):
    """Answers every call with an empty message, and notes the tokens that calls bring."""

    def __init__(self) -> None:
        self.tokens: list[Any] = []

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        self.tokens.append(dict(details.invocation_metadata).get("authorization"))
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")


@contextlib.contextmanager
def peer(
    signed: Signed | None = DAEMON, client_ca: Authority | None = None, address: str = "127.0.0.1:0"
) -> Iterator[tuple[str, Answers]]:
    """Serve gRPC as the daemon does. Yields the address."""
    answers = Answers()
    server = grpc.server(ThreadPoolExecutor(1), handlers=[answers])
    if signed is None:
        port = server.add_insecure_port(address)
    else:
        pair = [(signed.key, signed.cert)]
        credentials = grpc.ssl_server_credentials(pair, client_ca.cert if client_ca else None, client_ca is not None)
        port = server.add_secure_port(address, credentials)
    server.start()
    try:
        yield address if address.startswith("unix:") else f"127.0.0.1:{port}", answers
    finally:
        server.stop(None).wait()


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    file = tmp_path / "ca.crt"
    file.write_bytes(AUTHORITY.cert)
    return file


def connect(face: str, address: str, **options: Any) -> None:
    """Connect and make a call."""
    if face == "blocking":
        with KVClient(address, **options) as client:
            client.ping(timeout_s=TIMEOUT_S)
    else:

        async def enter() -> None:
            async with AsyncKVClient(address, **options) as client:
                await client.ping(timeout_s=TIMEOUT_S)

        asyncio.run(enter())


CLIENT = AUTHORITY.sign("client")
DISAGREEMENTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another authority": ({"signed": STRANGER.sign("daemon")}, {}, "a CA that the client does not trust"),
    "expired": ({"signed": AUTHORITY.sign("daemon", expired=True)}, {}, "has expired"),
    "another name": ({"signed": AUTHORITY.sign("daemon", hosts=("kv.example",))}, {}, "for another name"),
    "another name wanted": ({}, {"server_name": "kv.example"}, "for another name"),
    "no client certificate": ({"client_ca": AUTHORITY}, {}, "may want a certificate"),
    "client certificate of another authority": (
        {"client_ca": AUTHORITY},
        {"client": STRANGER.sign("client")},
        "may want a certificate",
    ),
    "expired client certificate": (
        {"client_ca": AUTHORITY},
        {"client": AUTHORITY.sign("client", expired=True)},
        "may want a certificate",
    ),
    "plain text": ({"signed": None}, {}, "does not speak TLS"),
}


def tls_config(directory: Path, ca: Path, *, client: Signed | None = None, server_name: str = "") -> TLSConfig:
    cert, key = client.write(directory, "client") if client else (None, None)
    return TLSConfig(ca, cert, key, server_name)


@pytest.mark.parametrize("face", FACES)
def test_what_is_not_agreed_on_is_said_at_once(tmp_path: Path, ca: Path, face: str) -> None:
    with each_row() as row:
        for case, (served, client, message) in DISAGREEMENTS.items():
            expected = pytest.raises(TLSHandshakeError, match=f"TLS handshake failed: .*{message}")
            with row(case), peer(**served) as (address, _), expected:
                connect(face, address, tls=tls_config(tmp_path, ca, **client), connect_timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("face", FACES)
def test_public_authorities_do_not_know_a_private_one(face: str) -> None:
    with peer() as (address, _):
        with pytest.raises(TLSHandshakeError, match="a CA that the client does not trust"):
            connect(face, address, tls=True, connect_timeout_s=TIMEOUT_S)
        with pytest.raises(ConnectionLostError, match="may expect TLS"):
            connect(face, address, connect_timeout_s=PATIENCE_S)


@pytest.mark.parametrize("face", FACES)
def test_nobody_there_is_no_disagreement(ca: Path, face: str) -> None:
    with pytest.raises(ConnectionLostError, match="refused") as caught:
        connect(face, f"127.0.0.1:{free_port()}", tls=ca, connect_timeout_s=PATIENCE_S)
    assert not isinstance(caught.value, TLSHandshakeError)


def test_what_is_agreed_on(tmp_path: Path, ca: Path) -> None:
    agreements: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "authority": ({}, {}),
        "name": ({"signed": AUTHORITY.sign("daemon", hosts=("kv.example",))}, {"server_name": "kv.example"}),
        "client certificate": ({"client_ca": AUTHORITY}, {"client": CLIENT}),
    }
    with each_row() as row:
        for case, (served, client) in agreements.items():
            for face in FACES:
                with row(f"{case}, {face}"), peer(**served) as (address, answers):
                    connect(face, address, tls=tls_config(tmp_path, ca, **client), connect_timeout_s=TIMEOUT_S)
                    assert answers.tokens


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_tls_is_1_2_at_least(tmp_path: Path, ca: Path) -> None:
    cert, key = DAEMON.write(tmp_path, "tls")
    tcp_address = f"127.0.0.1:{free_port()}"
    with each_row() as row, Daemon(**SMALL_POOL, tcp_address=tcp_address, tls_cert=cert, tls_key=key):
        for version, accepted in (("TLSv1_1", False), ("TLSv1_2", True), ("TLSv1_3", True)):
            context = ssl.create_default_context(cafile=str(ca))
            context.set_ciphers("ALL:@SECLEVEL=0")
            context.set_alpn_protocols(["h2"])
            context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
            expected = contextlib.nullcontext() if accepted else pytest.raises((ssl.SSLError, ConnectionError))
            with (
                row(version),
                socket.create_connection(("127.0.0.1", int(tcp_address.rpartition(":")[2])), TIMEOUT_S) as plain,
                expected,
                context.wrap_socket(plain, server_hostname="localhost") as connected,
            ):
                assert connected.version() == version.replace("v1_", "v1.")


def test_a_token_in_plain_text_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """A client is not connected yet."""
    for address in ("example:1", "dns:///example:1", "192.0.2.1:1", "ipv6:[2001:db8::1]:1"):
        AsyncKVClient(address, token="token")
        warning = f"the token goes to {address} unencrypted: set tls"
        assert [line for line in caplog.messages if "unencrypted" in line] == [warning]
        caplog.clear()
    for address in ("localhost:1", "dns:localhost:1", "127.0.0.1:1", "ipv6:[::1]:1", "unix:/a"):
        AsyncKVClient(address, token="token")
        assert caplog.messages == [], address
    AsyncKVClient("example:1", tls=True, token="token")
    AsyncKVClient("example:1")
    assert caplog.messages == []


def test_the_unix_socket_is_shown_no_token(tmp_path: Path) -> None:
    with peer(None, address=f"unix:{tmp_path}/socket") as (address, answers):
        for face in FACES:
            connect(face, address, token="token")
        assert set(answers.tokens) == {None}
    with pytest.raises(InvalidArgumentError, match="not for a unix socket") as caught:
        KVClient("unix:///a", tls=True)
    assert caught.value.field == "tls"


def test_what_no_token_can_be_is_refused_here() -> None:
    for token in ("a b", "a\n", "é", "a\x00", "a" * 5000):
        with pytest.raises(InvalidArgumentError) as caught:
            AsyncKVClient("localhost:1", token=token)
        assert caught.value.field == "token"
        assert token not in str(caught.value)


def test_what_no_address_can_be_is_refused_here() -> None:
    """gRPC would look the name up for the whole time limit, or connect to another port."""
    wrong: list[Any] = [
        "",
        "kv",
        "127.0.0.1",
        "http://kv:50051",
        "https://kv:1",
        "ftp://kv:1",
        "tcp://kv",
        "kv:x",
        "kv:",
        "kv:0",
        "kv:99999",
        "kv:²",
    ]
    wrong += ["unix:", "unix://", "unix:///" + "a" * 108, None, 5, b"unix:///a"]
    for address in wrong:
        for make in (KVClient, AsyncKVClient):
            with pytest.raises(InvalidArgumentError) as caught:
                make(address)
            assert caught.value.field == "address", address
    done = CliRunner().invoke(main, ["health", "--address", "http://kv:1"])
    assert (done.exit_code, done.output) == (
        1,
        "Error: address: 'http://kv:1' is neither the path of a socket, as unix:///path/of.sock or /path/of.sock, nor "
        "host:port\n",
    )
    for address in ("kv:1", "[::1]:65535", "dns:///kv", "ipv4:10.0.0.1:1", "unix:a", "unix:///" + "a" * 106):
        AsyncKVClient(address)


def test_every_client_and_command_takes_every_spelling_of_an_address(daemon: Daemon) -> None:
    path = daemon.address.removeprefix("unix://")
    until(lambda: CliRunner().invoke(main, ["tenants", "--address", path]).exit_code == 0)  # its observer has started
    spellings = (path, f"unix:{path}", f"unix://{path}", f"/../{path}")
    with each_row() as row:
        for address in spellings:
            with row(address):
                with KVClient(address) as client, client.session() as kv:
                    assert kv.transport == "lane"
                with Cluster([address]) as cluster:
                    assert cluster.choose([1]).daemon == address
                for words in (["health"], ["tenants"], ["top", "--once"]):
                    done = CliRunner().invoke(main, [*words, "--address", address])
                    assert (words, done.exit_code) == (words, 0), done.output
        for command in ("health", "tenants", "upgrade", "reset"):
            with row(command):
                done = CliRunner().invoke(main, [command, "--address", "kv"], input="n\n")
                assert done.exit_code == 1
                assert done.output.startswith("Error: address: 'kv' is neither the path of a socket")


def test_a_token_file_is_read_for_each_call(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    with peer(None) as (address, answers), KVClient(address, token=file) as client:
        client.ping()
        file.write_text("second")
        client.ping()
        assert answers.tokens[-2:] == ["Bearer first", "Bearer second"]
        file.unlink()
        with pytest.raises(InvalidArgumentError, match=r"token: .*No such file"):
            client.ping()


def test_files_that_are_missing_or_do_not_go_together_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"tls: .*absent.crt: No such file"):
        KVClient("localhost:1", tls=tmp_path / "absent.crt")
    with pytest.raises(InvalidArgumentError, match="go together"):
        TLSConfig(cert="a")
