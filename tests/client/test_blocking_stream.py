"""The stream of a session: calls that reach their limits leave it and other calls alone, and its end is an error."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from each_row import each_row
from google.rpc import code_pb2
from grpc_status import rpc_status
from scripted_daemon import ScriptedDaemon, serving
from waiting import PATIENCE_S, until

from kvservice.client import AsyncKVClient, KVClient, Session
from kvservice.client.connection import BegunCall
from kvservice.client.messages import open_stub
from kvservice.client.threads import BlockingStream, ThreadWaiting, finish
from kvservice.errors import (
    CallTimeoutError,
    ConnectionLostError,
    KVServiceError,
    MessageTooLargeError,
    ResourceExhaustedError,
    SessionTakenError,
    TLSHandshakeError,
)
from kvservice.v1 import blocks_pb2, pool_pb2, session_pb2
from kvservice.wire import to_status

SHORT_S = 0.01


class Held(ScriptedDaemon):
    """A server that does not answer describe until `release`, which ends the stream instead if `ends` is set. The
    answer to match_prefix is the number of tokens that it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()
        self.ends = False

    def answer(self, name: str, call: session_pb2.Call, reply: session_pb2.Reply, context: Any) -> bool:
        if name == "match_prefix":
            reply.match_prefix.num_cached_tokens = len(call.match_prefix.token_ids)
            return True
        assert self.release.wait(PATIENCE_S)
        if self.ends:
            self.ends = False
            return False
        return super().answer(name, call, reply, context)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, also where the tests were started with the signal ignored."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Held]:
    held = Held()
    with serving(held, f"unix:{tmp_path}/socket"):
        yield held
        held.release.set()


@pytest.fixture
def kv(server: Held, tmp_path: Path) -> Iterator[Session]:
    address = f"unix:{tmp_path}/socket"
    with KVClient(address, transport="inline", reconnect_wait_s=PATIENCE_S) as client:
        session = client.resume(b"token")
        yield session
        server.release.set()
        session.close()


def ask(kv: Session, number: int, timeout_s: float | None = None) -> int:
    """Make a call whose answer is this number."""
    return kv.match_prefix([1] * number, timeout_s=timeout_s)


def test_calls_after_one_without_an_answer_get_their_own_answers(server: Held, kv: Session) -> None:
    for limit_s in (None, PATIENCE_S):
        server.release.clear()
        with pytest.raises(CallTimeoutError):
            kv.describe(timeout_s=SHORT_S)
        with futures.ThreadPoolExecutor(2) as threads:
            answers = [threads.submit(ask, kv, number, limit_s) for number in (1, 2)]
            with pytest.raises(CallTimeoutError):
                ask(kv, 3, SHORT_S)
            server.release.set()
            assert [answer.result(PATIENCE_S) for answer in answers] == [1, 2]
        assert ask(kv, 4, limit_s) == 4
    assert server.calls[:2] == ["attach", "describe"]
    assert server.calls.count("attach") == 1


def test_calls_are_not_sent_while_an_answer_is_missing(server: Held, kv: Session) -> None:
    with pytest.raises(CallTimeoutError):
        kv.describe(timeout_s=SHORT_S)
    for number in range(1, 5):
        with pytest.raises(CallTimeoutError):
            ask(kv, number, SHORT_S)
    server.release.set()
    assert ask(kv, 5) == 5
    assert server.calls == ["attach", "describe", "match_prefix"]


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_call_leaves_the_stream_alone(server: Held, kv: Session) -> None:
    """The main thread is interrupted as by Ctrl-C, in a call without a limit."""
    main = threading.main_thread().ident
    assert main == threading.get_ident(), "signals reach the main thread"

    def interrupt() -> None:
        until(lambda: "describe" in server.calls)
        signal.pthread_kill(main, signal.SIGINT)

    for _ in range(3):
        server.calls.clear()
        server.release.clear()
        with futures.ThreadPoolExecutor(1) as threads:
            threads.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                kv.describe()
        server.release.set()
        assert ask(kv, 6) == 6
        assert server.calls == ["describe", "match_prefix"], "it is the same stream"


def test_a_thread_that_was_interrupted_while_it_took_its_turn_has_it() -> None:
    turns = ThreadWaiting().turns()
    assert finish(turns.take(None))
    assert finish(turns.take(0.0)), "its first call was interrupted before the block that gives the turn back"
    with futures.ThreadPoolExecutor(1) as threads:
        assert not threads.submit(lambda: finish(turns.take(0.0))).result(PATIENCE_S)
        turns.give_back()
        assert threads.submit(lambda: finish(turns.take(0.0))).result(PATIENCE_S)


def test_a_stream_that_ends_after_a_limit_is_noticed(server: Held, kv: Session) -> None:
    server.ends = True
    with pytest.raises(CallTimeoutError):
        kv.describe(timeout_s=SHORT_S)
    with futures.ThreadPoolExecutor(1) as threads:
        answer = threads.submit(ask, kv, 7)
        server.release.set()
        assert answer.result(PATIENCE_S) == 7
    assert server.calls == ["attach", "describe", "attach", "match_prefix"]


def test_calls_that_were_begun_get_their_own_answers(server: Held, kv: Session) -> None:
    """So do calls behind them, also if nobody waits for those that were begun, or not for long."""
    connection = kv._core.context.connection

    def begun(number: int) -> BegunCall:
        return finish(connection.begin("match_prefix", blocks_pb2.MatchPrefixRequest(token_ids=[1] * number)))

    held = finish(connection.begin("describe", blocks_pb2.DescribeRequest()))
    first, second, dropped = begun(1), begun(2), begun(3)
    with pytest.raises(CallTimeoutError):
        finish(first.answer(time.monotonic() + SHORT_S))
    with pytest.raises(CallTimeoutError):
        ask(kv, 4, SHORT_S)
    server.release.set()
    dropped.drop()
    assert ask(kv, 5) == 5
    assert finish(second.answer(None)).num_cached_tokens == 2
    assert finish(held.answer(None)) is not None
    assert server.calls == ["attach", "describe", *["match_prefix"] * 4], "the one with 4 tokens was not sent"


def test_calls_that_were_begun_fail_with_their_stream(server: Held, kv: Session) -> None:
    connection = kv._core.context.connection
    begun = [finish(connection.begin("describe", blocks_pb2.DescribeRequest())) for _ in range(2)]
    server.ends = True
    server.release.set()
    for call in begun:
        with pytest.raises(ConnectionLostError):
            finish(call.answer(time.monotonic() + PATIENCE_S))
    assert ask(kv, 6) == 6, "over another stream"


@pytest.mark.usefixtures("server")
def test_closing_ends_a_read_without_an_answer(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with KVClient(f"unix:{tmp_path}/socket", transport="inline") as client:
        kv = client.resume(b"token")
        with pytest.raises(CallTimeoutError):
            kv.describe(timeout_s=SHORT_S)
        (reading,) = (one for one in set(threading.enumerate()) - before if one.name == "kvservice-replies")
        kv.close()
        reading.join(PATIENCE_S)
        assert not reading.is_alive()
        with pytest.raises(ConnectionLostError):
            ask(kv, 8)


@pytest.mark.parametrize("asyncio_client", [False, True])
def test_streams_are_closed_and_not_cancelled(server: Held, tmp_path: Path, asyncio_client: bool) -> None:
    """gRPC's server for Python loses memory with each cancelled stream."""
    address = f"unix:{tmp_path}/socket"

    async def main() -> None:
        async with AsyncKVClient(address, transport="inline") as client, client.resume(b"token") as session:
            assert await session.match_prefix([1] * 5) == 5

    if asyncio_client:
        asyncio.run(main())
    else:
        with KVClient(address, transport="inline") as client, client.resume(b"token") as session:
            assert ask(session, 5) == 5
    until(lambda: server.num_closed == 1)


@pytest.mark.usefixtures("server")
def test_an_ended_stream_is_not_waited_for(tmp_path: Path) -> None:
    ended = threading.Event()
    with grpc.insecure_channel(f"unix:{tmp_path}/socket") as channel:
        stub = open_stub(channel)
        stream = BlockingStream(stub, (), lambda _: ended.set(), waits_for_daemon=False)
        finish(stream.end())
        assert ended.wait(PATIENCE_S)
        stream.error = None  # as if the end were not noticed yet
        with pytest.raises(ConnectionLostError):
            finish(stream.exchange("ping", pool_pb2.PingRequest(), ThreadWaiting.clock() + PATIENCE_S))


class Ended:
    """A stream that has ended with a status, and the stub that it comes from."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> None:
        self.status, self.text, self.metadata = code, details, trailing_metadata

    def Connect(self, *_: Any, **__: Any) -> Ended:  # noqa: N802
        return self

    def add_callback(self, _: Any) -> bool:
        return False

    def code(self) -> grpc.StatusCode:
        return self.status

    def details(self) -> str:
        return self.text

    def trailing_metadata(self) -> Any:
        return self.metadata


def taken() -> Any:
    status = to_status(SessionTakenError("taken"))
    status.code = code_pb2.ABORTED
    return rpc_status.to_status(status)


FAILED = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: "
REFUSED = "Failed to connect to remote host: connect: Connection refused"
HANDSHAKE = "Ssl handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:"
ENDS: dict[str, tuple[Ended, type[KVServiceError], str]] = {
    "taken": (Ended(*taken()), SessionTakenError, "taken"),
    # gRPC mixes both statuses if a call is cancelled here while the daemon's status arrives.
    "taken and cancelled": (
        Ended(grpc.StatusCode.CANCELLED, "Locally cancelled by application!", taken().trailing_metadata),
        ConnectionLostError,
        "was closed here",
    ),
    "cancelled and taken": (
        Ended(grpc.StatusCode.ABORTED, "Locally cancelled", taken().trailing_metadata),
        ConnectionLostError,
        "Locally cancelled",
    ),
    "cancelled here": (
        Ended(grpc.StatusCode.CANCELLED, "Locally cancelled by application!"),
        ConnectionLostError,
        "was closed here",
    ),
    "cancelled there": (
        Ended(grpc.StatusCode.CANCELLED, "CANCELLED"),
        ConnectionLostError,
        "the daemon's gRPC ended the call; it may have too many calls waiting",
    ),
    # grpc.aio reports this if the stream ends during a send; the reason is lost.
    "hidden": (Ended(grpc.StatusCode.INTERNAL, "Internal error from Core", None), ConnectionLostError, "Internal"),
    "cut": (Ended(grpc.StatusCode.UNAVAILABLE, "Socket closed"), ConnectionLostError, "UNAVAILABLE: Socket closed"),
    "received": (
        Ended(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max"),
        MessageTooLargeError,
        "larger than max",
    ),
    "sent": (
        Ended(grpc.StatusCode.RESOURCE_EXHAUSTED, "Sent message larger than max (9 vs. 4)"),
        MessageTooLargeError,
        "larger than max",
    ),
    "too many": (
        Ended(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!"),
        ResourceExhaustedError,
        "limit exceeded",
    ),
    # The words of older versions of gRPC.
    "expired": (
        Ended(grpc.StatusCode.UNAVAILABLE, f"{FAILED}{HANDSHAKE}CERTIFICATE_VERIFY_FAILED: certificate has expired"),
        TLSHandshakeError,
        "has expired",
    ),
    "plain text": (
        Ended(grpc.StatusCode.UNAVAILABLE, f"{FAILED}{HANDSHAKE}WRONG_VERSION_NUMBER: Invalid"),
        TLSHandshakeError,
        "does not speak TLS",
    ),
    "alert": (
        Ended(grpc.StatusCode.UNAVAILABLE, f"{FAILED}{HANDSHAKE}TLSV1_ALERT_INTERNAL_ERROR"),
        TLSHandshakeError,
        "do not agree",
    ),
    "name": (
        Ended(grpc.StatusCode.UNAVAILABLE, f"{FAILED}Peer name localhost is not in peer certificate"),
        TLSHandshakeError,
        "for another name",
    ),
    # The last address of localhost is not all of them.
    "IPv6": (
        Ended(grpc.StatusCode.UNAVAILABLE, f"last error: UNKNOWN: ipv6:[::1]:50051: {REFUSED}"),
        ConnectionLostError,
        "127.0.0.1, it may expect TLS",
    ),
    "IPv6, quoted": (
        Ended(grpc.StatusCode.UNAVAILABLE, f"last error: UNKNOWN: ipv6:%5B::1%5D:50051: {REFUSED}"),
        ConnectionLostError,
        "127.0.0.1, it may expect TLS",
    ),
}
# Messages that are passed on as they are.
PLAIN = ("no route", f"{FAILED}connect: Connection refused (111)", f"last error: ipv4:127.0.0.1:50051: {REFUSED}")


def test_the_error_of_an_ended_stream() -> None:
    def error_of(ended: Any) -> KVServiceError | None:
        return BlockingStream(ended, (), lambda _: None, False).error

    with each_row() as row:
        for name, (ended, kind, text) in ENDS.items():
            with row(name):
                error = error_of(ended)
                assert type(error) is kind
                assert text in str(error)
                assert kind is not TLSHandshakeError or ended.text in str(error)
        for text in PLAIN:
            with row(text):
                error = error_of(Ended(grpc.StatusCode.UNAVAILABLE, text))
                assert type(error) is ConnectionLostError
                assert str(error) == f"UNAVAILABLE: {text}"


def test_a_restarted_daemon_is_found_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC connects again without a call. A pause of its back-off is up to a fifth longer than its limit."""
    given: list[dict[str, Any]] = []
    open_channel = grpc.insecure_channel

    def opened(address: str, options: Any) -> grpc.Channel:
        given.append(dict(options))
        return open_channel(address, options)

    monkeypatch.setattr(grpc, "insecure_channel", opened)
    for address in ("unix:///run/kv.sock", "127.0.0.1:50051"):
        KVClient(address, connect_timeout_s=None).close()
    assert [options["grpc.max_reconnect_backoff_ms"] for options in given] == [50, 250]
