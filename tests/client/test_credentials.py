"""TLS and token arguments of clients, and the errors if client and daemon do not match."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority, Signed

from kvservice.auth.client import ClientCredentials
from kvservice.client import AsyncKVClient, KVClient, TLSConfig
from kvservice.config import ServeConfig
from kvservice.errors import ConnectionLostError, InvalidArgumentError, TLSHandshakeError
from kvservice.server.credentials import Credentials
from kvservice.wire.channels import connection_error, open_aio_channel, open_channel

AUTHORITY, STRANGER = Authority(), Authority("another authority")
DAEMON = AUTHORITY.sign("daemon")
# TIMEOUT_S is enough for a connection attempt that fails. PATIENCE_S limits the retries if no attempt fails for good.
TIMEOUT_S, PATIENCE_S = 20.0, 0.2


class Peer:
    """A gRPC server that listens as the daemon does, but has no services."""

    def __init__(self, directory: Path, signed: Signed | None = DAEMON, client_ca: Authority | None = None) -> None:
        self.credentials: Credentials | None = None
        self.directory = directory
        self._server = grpc.server(ThreadPoolExecutor(1))
        if signed is None:
            port = self._server.add_insecure_port("127.0.0.1:0")
        else:
            cert, key = signed.write(directory, "tls")
            ca = directory / "clients.crt"
            ca.write_bytes(client_ca.cert if client_ca else b"")
            config = ServeConfig(tls_cert=str(cert), tls_key=str(key), tls_client_ca=str(ca) if client_ca else "")
            self.credentials = Credentials(config)
            for_server = self.credentials.for_server()
            assert for_server is not None
            port = self._server.add_secure_port("127.0.0.1:0", for_server)
        self.port = port
        self.address = f"127.0.0.1:{port}"

    def __enter__(self) -> Peer:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    file = tmp_path / "ca.crt"
    file.write_bytes(AUTHORITY.cert)
    return file


def connect(face: str, address: str, **options: Any) -> None:
    if face == "blocking":
        KVClient(address, **options).close()
    else:

        async def enter() -> None:
            async with AsyncKVClient(address, **options):
                pass

        asyncio.run(enter())


def agrees(address: str, tls: Any) -> bool:
    """Return whether a call reaches the server, which answers that it is unimplemented."""
    with open_channel(address, ClientCredentials.for_address(address, tls, ""), ()) as channel:
        try:
            call: Any = channel.unary_unary("/kvservice.v1.None/None")
            call(b"", timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code() is grpc.StatusCode.UNIMPLEMENTED
    return False


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


@pytest.mark.parametrize("case", DISAGREEMENTS)
@pytest.mark.parametrize("face", ["blocking", "asyncio"])
def test_what_is_not_agreed_on_is_said_at_once(tmp_path: Path, ca: Path, face: str, case: str) -> None:
    peer, client, message = DISAGREEMENTS[case]
    tls = tls_config(tmp_path, ca, **client)
    with Peer(tmp_path, **peer) as server, pytest.raises(TLSHandshakeError, match=f"TLS handshake failed: .*{message}"):
        connect(face, server.address, tls=tls, connect_timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("face", ["blocking", "asyncio"])
def test_public_authorities_do_not_know_a_private_one(tmp_path: Path, face: str) -> None:
    with Peer(tmp_path) as server, pytest.raises(TLSHandshakeError, match="a CA that the client does not trust"):
        connect(face, server.address, tls=True, connect_timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("face", ["blocking", "asyncio"])
def test_plain_text_where_tls_is_wanted(tmp_path: Path, face: str) -> None:
    with Peer(tmp_path) as server, pytest.raises(ConnectionLostError, match="may expect TLS"):
        connect(face, server.address, connect_timeout_s=PATIENCE_S)


@pytest.mark.parametrize("face", ["blocking", "asyncio"])
def test_nobody_there_is_no_disagreement(ca: Path, free_port: int, face: str) -> None:
    with pytest.raises(ConnectionLostError, match="refused") as caught:
        connect(face, f"127.0.0.1:{free_port}", tls=ca, connect_timeout_s=PATIENCE_S)
    assert not isinstance(caught.value, TLSHandshakeError)


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        ({}, {}),
        ({"signed": AUTHORITY.sign("daemon", hosts=("kv.example",))}, {"server_name": "kv.example"}),
        ({"client_ca": AUTHORITY}, {"client": CLIENT}),
    ],
    ids=["authority", "name", "client certificate"],
)
def test_what_is_agreed_on(tmp_path: Path, ca: Path, peer: dict[str, Any], client: dict[str, Any]) -> None:
    tls = tls_config(tmp_path, ca, **client)
    with Peer(tmp_path, **peer) as server:
        assert agrees(server.address, tls)

        async def agrees_too() -> bool:
            async with open_aio_channel(server.address, ClientCredentials(tls), ()) as channel:
                try:
                    call: Any = channel.unary_unary("/kvservice.v1.None/None")
                    await call(b"", timeout=TIMEOUT_S)
                except grpc.RpcError as error:
                    return error.code() is grpc.StatusCode.UNIMPLEMENTED
            return False

        assert asyncio.run(agrees_too())


def test_new_certificates_are_for_new_connections(tmp_path: Path, ca: Path) -> None:
    new_ca = tmp_path / "new.crt"
    new_ca.write_bytes(STRANGER.cert)
    with Peer(tmp_path, client_ca=AUTHORITY) as server:
        for name in ("old", "new"):
            (tmp_path / name).mkdir()
        old, new = (
            tls_config(tmp_path / name, file, client=authority.sign("client"))
            for name, file, authority in (("old", ca, AUTHORITY), ("new", new_ca, STRANGER))
        )
        assert (agrees(server.address, old), agrees(server.address, new)) == (True, False)
        assert server.credentials is not None
        certificates = server.credentials.certificates
        assert certificates is not None
        (tmp_path / "tls.crt").write_bytes(b"half of")
        assert not certificates.reload()
        assert (agrees(server.address, old), agrees(server.address, new)) == (True, False)
        STRANGER.sign("daemon").write(tmp_path, "tls")
        (tmp_path / "clients.crt").write_bytes(STRANGER.cert)
        assert certificates.reload()
        assert (agrees(server.address, old), agrees(server.address, new)) == (False, True)
        assert server.credentials.num_handshakes == 6


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
@pytest.mark.parametrize(
    ("version", "accepted"),
    [(ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True), (ssl.TLSVersion.TLSv1_3, True)],
)
def test_tls_is_1_2_at_least(tmp_path: Path, ca: Path, version: ssl.TLSVersion, accepted: bool) -> None:
    context = ssl.create_default_context(cafile=str(ca))
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.set_alpn_protocols(["h2"])
    context.minimum_version = context.maximum_version = version
    expected = contextlib.nullcontext() if accepted else pytest.raises((ssl.SSLError, ConnectionError))
    with (
        Peer(tmp_path) as server,
        socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as plain,
        expected,
        context.wrap_socket(plain, server_hostname="localhost") as connected,
    ):
        assert connected.version() == version.name.replace("v1_", "v1.")


@pytest.mark.parametrize("address", ["example:1", "dns:///example:1", "192.0.2.1:1", "ipv6:[2001:db8::1]:1"])
def test_a_token_in_plain_text_is_warned_of(address: str, caplog: pytest.LogCaptureFixture) -> None:
    ClientCredentials.for_address(address, None, "token")
    assert [line for line in caplog.messages if "unencrypted" in line] == [
        f"the token goes to {address} unencrypted: set tls"
    ]


@pytest.mark.parametrize("address", ["localhost:1", "dns:localhost:1", "127.0.0.1:1", "ipv6:[::1]:1", "unix:/a"])
def test_on_this_host_it_is_not(address: str, caplog: pytest.LogCaptureFixture) -> None:
    ClientCredentials.for_address(address, None, "token")
    ClientCredentials.for_address("example:1", True, "token")
    ClientCredentials.for_address("example:1", None, "")
    assert caplog.messages == []


def test_the_unix_socket_is_shown_no_token() -> None:
    assert ClientCredentials.for_address("unix:///a", None, "token").headers() == ()
    with pytest.raises(InvalidArgumentError, match="not for a unix socket") as caught:
        KVClient("unix:///a", tls=True)
    assert caught.value.field == "tls"


@pytest.mark.parametrize("token", ["a b", "a\n", "é", "a\x00", "a" * 5000])
def test_what_no_token_can_be_is_refused_here(token: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        ClientCredentials.for_address("localhost:1", None, token)
    assert caught.value.field == "token"
    assert token not in str(caught.value)


def test_a_token_file_is_read_for_each_call(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    credentials = ClientCredentials.for_address("localhost:1", None, file)
    assert credentials.headers() == (("authorization", "Bearer first"),)
    file.write_text("second")
    assert credentials.headers() == (("authorization", "Bearer second"),)
    file.unlink()
    with pytest.raises(InvalidArgumentError, match=r"token: .*No such file"):
        credentials.headers()


def test_files_that_are_missing_or_do_not_go_together_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"tls: .*absent.crt: No such file"):
        KVClient("localhost:1", tls=tmp_path / "absent.crt")
    with pytest.raises(InvalidArgumentError, match="go together"):
        TLSConfig(cert="a")


def test_credentials_do_not_show_their_token() -> None:
    assert "secret" not in repr(ClientCredentials(None, "secret"))


FAILED = "UNAVAILABLE: failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: "
SSL_ERROR = "(TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:"


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (f"Ssl handshake failed {SSL_ERROR}CERTIFICATE_VERIFY_FAILED: certificate has expired", "has expired"),
        (f"Ssl handshake failed {SSL_ERROR}WRONG_VERSION_NUMBER: Invalid", "does not speak TLS"),
        (f"Ssl handshake failed {SSL_ERROR}TLSV1_ALERT_INTERNAL_ERROR", "do not agree"),
        ("Peer name localhost is not in peer certificate", "for another name"),
    ],
)
def test_the_words_of_an_older_grpc_are_understood(said: str, meant: str) -> None:
    error = connection_error(FAILED + said)
    assert isinstance(error, TLSHandshakeError)
    assert meant in str(error)
    assert said in str(error)


def test_what_is_no_handshake_is_left_as_it_is() -> None:
    for text in ("UNAVAILABLE: no route", f"{FAILED}connect: Connection refused (111)", "UNAVAILABLE: Socket closed"):
        error = connection_error(text)
        assert not isinstance(error, TLSHandshakeError)
        assert str(error) == text


@pytest.mark.parametrize("address", ["[::1]", "%5B::1%5D"])
def test_a_refusal_at_the_last_address_of_localhost_is_not_all(address: str) -> None:
    said = f"last error: UNKNOWN: ipv6:{address}:50051: Failed to connect to remote host: connect: Connection refused"
    assert "127.0.0.1, it may expect TLS" in str(connection_error(said))
    assert "TLS" not in str(connection_error(said.replace(f"ipv6:{address}", "ipv4:127.0.0.1")))
