"""The stream of the sync API: a call that reaches its limit leaves the stream and other calls alone."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from waiting import PATIENCE_S, until

from kvservice.client.connection import SessionConnection
from kvservice.client.threads import BlockingStream, ThreadWaiting, finish
from kvservice.client.waiting import SessionStream
from kvservice.errors import CallTimeoutError, ConnectionLostError
from kvservice.v1 import blocks_pb2, pool_pb2, session_pb2, session_pb2_grpc

SHORT_S = 0.01


class Held(session_pb2_grpc.SessionServiceServicer):
    """A server that does not answer describe until `release`, which ends the stream instead if `ends` is set. It
    answers ping with its payload."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.release = threading.Event()
        self.ends = False

    def Connect(self, calls: Iterator[session_pb2.Call], _: Any) -> Iterator[session_pb2.Reply]:  # noqa: N802
        for call in calls:
            name = call.WhichOneof("call")
            self.calls.append(name)
            reply = session_pb2.Reply(call_id=call.call_id)
            if name == "attach":
                reply.attach.session_id = 7
            elif name == "ping":
                reply.ping.payload = call.ping.payload
            else:
                assert self.release.wait(PATIENCE_S)
                if self.ends:
                    self.ends = False
                    return
                reply.describe.SetInParent()
            yield reply


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, also where the tests were started with the signal ignored."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Held]:
    servicer = Held()
    running = grpc.server(futures.ThreadPoolExecutor(4))
    session_pb2_grpc.add_SessionServiceServicer_to_server(servicer, running)
    assert running.add_insecure_port(f"unix:{tmp_path}/socket")
    running.start()
    yield servicer
    servicer.release.set()
    running.stop(None).wait()


@pytest.fixture
def connection(server: Held, tmp_path: Path) -> Iterator[SessionConnection]:
    with grpc.insecure_channel(f"unix:{tmp_path}/socket") as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)

        def stream(on_end: Callable[[SessionStream], None], waits: bool) -> SessionStream:
            return BlockingStream(stub, (), on_end, waits)

        made = SessionConnection(ThreadWaiting(), stream, b"", timeout_s=None, reconnect_wait_s=PATIENCE_S)
        assert finish(made.connect(PATIENCE_S)) == 7
        yield made
        server.release.set()
        finish(made.close())


def describe(connection: SessionConnection, timeout_s: float | None = None) -> Any:
    return finish(connection.call("describe", blocks_pb2.DescribeRequest(), timeout_s))


def ping(connection: SessionConnection, payload: bytes, timeout_s: float | None = None) -> bytes:
    answer: bytes = finish(connection.call("ping", pool_pb2.PingRequest(payload=payload), timeout_s)).payload
    return answer


@pytest.mark.parametrize("limit_s", [None, PATIENCE_S])
def test_calls_after_one_without_an_answer_get_their_own_answers(
    server: Held, connection: SessionConnection, limit_s: float | None
) -> None:
    with pytest.raises(CallTimeoutError):
        describe(connection, SHORT_S)
    with futures.ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(ping, connection, payload, limit_s) for payload in (b"one", b"two")]
        with pytest.raises(CallTimeoutError):
            ping(connection, b"three", SHORT_S)
        server.release.set()
        assert [answer.result(PATIENCE_S) for answer in answers] == [b"one", b"two"]
    assert ping(connection, b"four", limit_s) == b"four"
    assert server.calls[:2] == ["attach", "describe"]
    assert server.calls.count("attach") == 1


def test_calls_are_not_sent_while_an_answer_is_missing(server: Held, connection: SessionConnection) -> None:
    for number in range(5):
        with pytest.raises(CallTimeoutError):
            ping(connection, b"%d" % number, SHORT_S) if number else describe(connection, SHORT_S)
    server.release.set()
    assert ping(connection, b"last") == b"last"
    assert server.calls == ["attach", "describe", "ping"]


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_call_leaves_the_stream_alone(server: Held, connection: SessionConnection) -> None:
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
                describe(connection)
        server.release.set()
        assert ping(connection, b"next") == b"next"
        assert server.calls == ["describe", "ping"], "it is the same stream"


def test_a_thread_that_was_interrupted_while_it_took_its_turn_has_it() -> None:
    turns = ThreadWaiting().turns()
    assert finish(turns.take(None))
    assert finish(turns.take(0.0)), "its first call was interrupted before the block that gives the turn back"
    with futures.ThreadPoolExecutor(1) as threads:
        assert not threads.submit(lambda: finish(turns.take(0.0))).result(PATIENCE_S)
        turns.give_back()
        assert threads.submit(lambda: finish(turns.take(0.0))).result(PATIENCE_S)


def test_a_stream_that_ends_after_a_limit_is_noticed(server: Held, connection: SessionConnection) -> None:
    server.ends = True
    with pytest.raises(CallTimeoutError):
        describe(connection, SHORT_S)
    with futures.ThreadPoolExecutor(1) as threads:
        answer = threads.submit(ping, connection, b"next")
        server.release.set()
        assert answer.result(PATIENCE_S) == b"next"
    assert server.calls == ["attach", "describe", "attach", "ping"]


def test_closing_ends_a_read_without_an_answer(connection: SessionConnection) -> None:
    stream: Any = connection._stream
    with pytest.raises(CallTimeoutError):
        describe(connection, SHORT_S)
    assert stream._reader._thread.is_alive()
    finish(connection.close())
    stream._reader._thread.join(PATIENCE_S)
    assert not stream._reader._thread.is_alive()
    with pytest.raises(ConnectionLostError):
        ping(connection, b"")


@pytest.mark.usefixtures("server")
def test_an_ended_stream_is_not_waited_for(tmp_path: Path) -> None:
    ended = threading.Event()
    with grpc.insecure_channel(f"unix:{tmp_path}/socket") as channel:
        stream = BlockingStream(
            session_pb2_grpc.SessionServiceStub(channel), (), lambda _: ended.set(), waits_for_daemon=False
        )
        finish(stream.end())
        assert ended.wait(PATIENCE_S)
        stream.error = None  # as if the end were not noticed yet
        with pytest.raises(ConnectionLostError):
            finish(stream.exchange("ping", pool_pb2.PingRequest(), ThreadWaiting.clock() + PATIENCE_S))


class EndedStub:
    """A stub whose stream has ended with CANCELLED, and which is the stream itself."""

    def __init__(self, details: str) -> None:
        self._details = details

    def Connect(self, *_: Any, **__: Any) -> EndedStub:  # noqa: N802
        return self

    def add_callback(self, _: Any) -> bool:
        return False

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.CANCELLED

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return ()


@pytest.mark.parametrize(
    ("details", "reason"),
    [("CANCELLED", "the daemon's gRPC ended the call"), ("Locally cancelled by application!", "was closed here")],
)
def test_the_error_says_which_side_cancelled_the_stream(details: str, reason: str) -> None:
    stream = BlockingStream(EndedStub(details), (), lambda _: None, False)  # type: ignore[arg-type]
    assert isinstance(stream.error, ConnectionLostError)
    assert reason in str(stream.error)
