"""Callers over TCP: authentication, ownership of sessions, removal of a token."""

from __future__ import annotations

import contextlib
import queue
import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from each_row import each_row
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from scraping import scrape_until, value
from secure_daemon import Secured, WithToken, secured, with_token
from v1_services import SERVICES
from waiting import until

from kvservice.auth import ClientCredentials, TLSConfig, add_token, new_token, remove_token
from kvservice.health import reason_not_serving
from kvservice.v1 import events_pb2, pool_pb2, session_pb2

TIMEOUT_S = 20.0
METHODS = [f"/{service.full_name}/{method.name}" for service in SERVICES for method in service.methods]
OTHERS = [
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/kvservice.v1.NoService/NoMethod",
]
GARBAGE = b"\xff" * 64


@pytest.fixture
def channel(encrypted: Secured) -> Iterator[grpc.Channel]:
    with grpc.secure_channel(encrypted.address, encrypted.tls()) as connected:
        yield connected


def refusal_of(call: Any) -> tuple[str, str, str]:
    """Return the code, reason and cause of an RPC that failed."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return told_by(caught.value)


def told_by(error: Any) -> tuple[str, str, str]:
    info = error_details_pb2.ErrorInfo()
    status = rpc_status.from_call(error)
    for detail in status.details if status else ():
        detail.Unpack(info)
    return error.code().name, info.reason, info.metadata.get("cause", "")


def start(channel: grpc.Channel, method: str) -> Any:
    """Start an RPC of any method with a malformed message."""
    call: Any = channel.stream_stream(method)
    return call(iter([GARBAGE]), timeout=TIMEOUT_S)


def test_every_method_asks_for_a_token_before_it_reads_a_message(channel: grpc.Channel) -> None:
    calls = [start(channel, method) for method in (*METHODS, *OTHERS)]
    assert {refusal_of(call) for call in calls} == {("UNAUTHENTICATED", "UNAUTHENTICATED", "missing")}


def test_with_a_token_messages_are_read(encrypted: Secured, channel: grpc.Channel) -> None:
    known = with_token(channel, encrypted.tokens["alice"])
    codes = {refusal_of(start(known, method))[0] for method in (*METHODS, OTHERS[0])}
    assert codes <= {"INVALID_ARGUMENT", "UNKNOWN", "INTERNAL"}
    assert "UNAUTHENTICATED" not in codes


def test_a_large_message_of_a_stranger_is_not_received(encrypted: Secured, channel: grpc.Channel) -> None:
    """The message exceeds the size limit. The daemon would report that if it received the message. From an address that
    makes calls, the first message may be large, and come slowly."""
    refusal_of(start(with_token(channel, encrypted.tokens["alice"]), METHODS[0]))
    ping: Any = channel.unary_unary("/kvservice.v1.PoolService/Ping")
    with pytest.raises(grpc.RpcError) as caught:
        ping(b"\x0a" + bytes(6 << 20), timeout=TIMEOUT_S)
    assert told_by(caught.value)[0] == "UNAUTHENTICATED"


def test_what_is_no_token_of_the_daemon_is_refused(encrypted: Secured, channel: grpc.Channel) -> None:
    token = encrypted.tokens["alice"]
    malformed = [
        [f"Bearer {token[:-1]}"],
        [f"Bearer {token}A"],
        [f"Bearer  {token}"],
        [f"Basic {token}"],
        [token],
        ["Bearer"],
        [f"Bearer {token}", f"Bearer {token}"],
    ]
    causes = [
        *((headers, "malformed") for headers in malformed),
        ([f"Bearer {new_token()}"], "unknown"),
        ([], "missing"),
    ]
    calls = [
        (start(grpc.intercept_channel(channel, WithToken(*headers)), METHODS[0]), cause) for headers, cause in causes
    ]
    for call, cause in calls:
        assert refusal_of(call) == ("UNAUTHENTICATED", "UNAUTHENTICATED", cause)


def test_the_scheme_may_be_written_in_any_case(encrypted: Secured, channel: grpc.Channel, raw: Any) -> None:
    presenting = grpc.intercept_channel(channel, WithToken(f"bearer {encrypted.tokens['alice']}"))
    assert raw.Wire(presenting).stats().num_blocks > 0


@pytest.fixture
def wires(encrypted: Secured, channel: grpc.Channel, raw: Any) -> Iterator[dict[str, Any]]:
    """The wire of each identity; "" is the unix socket."""
    with grpc.insecure_channel(encrypted.daemon.address) as local:
        tokens = encrypted.tokens
        yield {name: raw.Wire(with_token(channel, tokens[name])) for name in tokens} | {"": raw.Wire(local)}


def test_a_session_is_its_owners(wires: dict[str, Any]) -> None:
    with each_row() as row:
        for owner in ("alice", ""):
            for other in ("alice", "bob", ""):
                with row((owner, other)):
                    assert_access(wires, owner, other)


def assert_access(wires: dict[str, Any], owner: str, other: str) -> None:
    opened = wires[owner].unary("open", session_pb2.OpenRequest())
    token, theirs = opened.session_token, wires[other]
    stream = theirs.stream()
    attached = stream.attach(token)
    closed = theirs.unary("close", session_pb2.CloseRequest(session_token=token))
    stream.cancel()
    if other == owner:
        assert attached.attach.session_id == opened.session_id
        assert closed == session_pb2.CloseResponse()
    else:
        assert attached.error.code == grpc.StatusCode.NOT_FOUND.value[0]
        assert (closed.code, closed.reason) == ("NOT_FOUND", "UNKNOWN_SESSION")
        absent = theirs.unary("close", session_pb2.CloseRequest(session_token=bytes(16)))
        assert closed == absent, "nothing tells it from one that never was"
        assert wires[owner].unary("close", session_pb2.CloseRequest(session_token=token)) == session_pb2.CloseResponse()


def test_the_log_names_peers_and_no_secrets(encrypted: Secured, wires: dict[str, Any]) -> None:
    opened = wires["alice"].unary("open", session_pb2.OpenRequest(name="engine"))
    refused = wires["bob"].unary("close", session_pb2.CloseRequest(session_token=opened.session_token))
    assert refused.code == "NOT_FOUND"
    wires["alice"].unary("close", session_pb2.CloseRequest(session_token=opened.session_token))
    log = encrypted.daemon.log.read_text()
    assert re.search(r"alice connected from ipv4:127\.0\.0\.1:\d+", log)
    assert f"session {opened.session_id} opened (engine) by alice" in log
    assert f"session {opened.session_id} refused to bob" in log
    for secret in (*encrypted.tokens.values(), opened.session_token.hex()):
        assert secret not in log


@pytest.fixture(scope="module")
def unencrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured(tmp_path_factory.mktemp("unencrypted"), tls=False) as running:
        yield running


@pytest.fixture
def own(unencrypted: Secured) -> Iterator[Secured]:
    """A daemon without TLS whose token file the test changes."""
    file = unencrypted.files / "tokens"
    text = file.read_text()
    yield unencrypted
    file.write_text(text)
    file.chmod(0o600)


def test_a_token_that_is_removed_ends_what_was_opened_with_it(own: Secured, raw: Any) -> None:
    """Tokens are also required on loopback without TLS."""
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(grpc.insecure_channel(own.address))
        assert refusal_of(start(plain, METHODS[0]))[2] == "missing"
        alice, bob = (raw.Wire(with_token(plain, own.tokens[name])) for name in ("alice", "bob"))
        local = raw.RawSession(raw.Wire(stack.enter_context(grpc.insecure_channel(own.daemon.address))))
        sessions = {wire: raw.RawSession(wire) for wire in (alice, bob)}
        as_alice = with_token(plain, own.tokens["alice"])
        stub: Any = health_pb2_grpc.HealthStub(as_alice)
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)
        next(watch)
        answers, questions = reflect(as_alice)
        not_attached = alice.stream()
        not_attached.send("ping", pool_pb2.PingRequest())
        events = alice.methods["subscribe"](events_pb2.SubscribeRequest(), timeout=60)
        scrape_until(own.http_port, lambda samples: value(samples, "kvservice_event_streams") == 1)
        remove_token(own.files / "tokens", "alice")
        with pytest.raises(grpc.RpcError) as caught:
            next(sessions[alice].stream.replies)
        assert told_by(caught.value) == ("UNAUTHENTICATED", "UNAUTHENTICATED", "unknown")
        assert alice.unary("ping", pool_pb2.PingRequest()).code == "UNAUTHENTICATED"
        for other in (sessions[bob], local):
            reply = other.stream.send("ping", pool_pb2.PingRequest(payload=b"still here"))
            assert reply.ping.payload == b"still here"
        for stream in (events, watch, answers):
            assert refusal_of(stream) == ("UNAUTHENTICATED", "UNAUTHENTICATED", "unknown")
        questions.put(None)
        attach = session_pb2.AttachRequest(session_token=sessions[alice].token)
        assert not_attached.send("attach", attach).error.code == grpc.StatusCode.UNAUTHENTICATED.value[0]
        for session in (sessions[bob], local):
            session.close()


def reflect(channel: grpc.Channel) -> tuple[Any, queue.Queue[Any]]:
    """Return a reflection stream that has answered once, and the queue of its requests."""
    questions: queue.Queue[Any] = queue.Queue()
    questions.put(reflection_pb2.ServerReflectionRequest(list_services=""))
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    answers = stub.ServerReflectionInfo(iter(questions.get, None), timeout=60)
    next(answers)
    return answers, questions


def test_a_new_token_is_good_at_once_and_a_wrong_file_changes_nothing(own: Secured, raw: Any) -> None:
    file = own.files / "tokens"
    with grpc.insecure_channel(own.address) as plain:
        carol = raw.Wire(with_token(plain, add_token(file, "carol")))
        until(lambda: carol.unary("ping", pool_pb2.PingRequest(payload=b"1")) == pool_pb2.PingResponse(payload=b"1"))
        good = file.read_text()
        file.write_text(good + "nonsense\n")
        until(lambda: "line 4: must be a name" in own.daemon.log.read_text())
        assert carol.unary("ping", pool_pb2.PingRequest()) == pool_pb2.PingResponse()
        file.unlink()
        until(lambda: "No such file" in own.daemon.log.read_text())
        assert carol.unary("ping", pool_pb2.PingRequest()) == pool_pb2.PingResponse()
        with pytest.raises(grpc.RpcError):
            raw.Wire(plain).stats()


def test_what_happens_is_counted(encrypted: Secured, channel: grpc.Channel, wires: dict[str, Any]) -> None:
    before = encrypted.samples()
    opened = wires["alice"].unary("open", session_pb2.OpenRequest())
    wires["bob"].unary("close", session_pb2.CloseRequest(session_token=opened.session_token))
    wires["alice"].unary("close", session_pb2.CloseRequest(session_token=opened.session_token))
    strangers = [[], ["Bearer short"], [f"Bearer {new_token()}"]]
    calls = [start(grpc.intercept_channel(channel, WithToken(*headers)), METHODS[0]) for headers in strangers]
    for call in calls:
        refusal_of(call)
    with grpc.insecure_channel(encrypted.address) as plain, pytest.raises(grpc.RpcError):
        raw_ping(plain)
    after = encrypted.samples()

    def more(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    causes = ("missing_token", "malformed_token", "unknown_token", "foreign_session")
    assert [more("kvservice_refused_calls_total", cause=cause) for cause in causes] == [1, 1, 1, 1]
    assert more("kvservice_tcp_connections_total") == 2, "two names on one connection"
    assert more("kvservice_tls_handshakes_total") >= 2, "one failed"
    assert "andshake failed" not in encrypted.daemon.log.read_text(), "strangers write no lines"


def test_a_health_check_is_a_connection_that_a_call_was_accepted_on(encrypted: Secured) -> None:
    """The alert about TLS handshakes that came to nothing compares the two counts."""
    (encrypted.files / "ca.crt").write_bytes(encrypted.authority.cert)
    credentials = ClientCredentials.for_address(
        encrypted.address, TLSConfig(encrypted.files / "ca.crt"), encrypted.tokens["alice"]
    )
    before = encrypted.samples()
    assert not reason_not_serving(encrypted.address, TIMEOUT_S, credentials)
    after = encrypted.samples()
    name = "kvservice_tcp_connections_total"
    assert value(after, name) == value(before, name) + 1


def raw_ping(channel: grpc.Channel) -> bytes:
    ping: Any = channel.unary_unary("/kvservice.v1.PoolService/Ping")
    return bytes(ping(b"", timeout=TIMEOUT_S))
