"""Sessions after a broken stream, the death of a process, and a takeover by another client."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from both_faces import Face
from cutting_proxy import CuttingProxy
from each_row import each_row
from raw_wire import tensor
from waiting import until

from kvservice.client import AsyncKVClient, KVClient, PoolStats, Session
from kvservice.errors import (
    CallTimeoutError,
    ConnectionLostError,
    DaemonAwayError,
    FailedPreconditionError,
    InvalidArgumentError,
    LayerWrittenError,
    MessageTooLargeError,
    QuotaExceededError,
    SessionTakenError,
    UnknownSessionError,
)
from kvservice.launch import Daemon
from kvservice.v1 import attention_pb2, session_pb2

GRACE_S = 0.5
PATIENCE_S = 60.0
SHAPE = (2, 6, 2, 32)  # layers, tokens, KV heads, head size
KEY, VALUE = (np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32) for seed in (1, 2))


@pytest.fixture(autouse=True)
def alone(client: KVClient, wire: Any, raw: Any) -> Iterator[None]:
    """Start without sessions of other tests and without cached blocks."""
    raw.await_no_sessions(wire)
    yield
    with client.session() as session:
        session.reset_prefix_cache()


@pytest.fixture
def proxy(tmp_path: Path, daemon: Daemon) -> Iterator[CuttingProxy]:
    with CuttingProxy(tmp_path, daemon.address) as between:
        yield between


@pytest.fixture
def far(proxy: CuttingProxy) -> Iterator[KVClient]:
    """A client whose connection can be cut. Its calls wait for the reconnect."""
    with KVClient(proxy.address, reconnect_wait_s=PATIENCE_S) as connected:
        yield connected


def computed(session: Session, tokens: list[int]) -> Any:
    """Return a sequence of six tokens whose K/V are KEY and VALUE."""
    sequence = session.allocate(tokens)
    session.open_step([sequence]).write(KEY, VALUE)
    return sequence


def assert_intact(session: Session, sequence: Any) -> None:
    for got, wanted in zip(session.read(sequence, 0, 6), (KEY, VALUE), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_cut_stream_is_resumed(proxy: CuttingProxy, far: KVClient) -> None:
    with far.session(detachable=True) as session:
        sequence = computed(session, [1, 2, 3, 4, 5, 6])
        for _ in range(3):
            proxy.cut()
            assert [info.length for info in session.describe()] == [6]
        assert_intact(session, sequence)


def test_a_line_that_is_broken_for_a_while(proxy: CuttingProxy, far: KVClient) -> None:
    with far.session(detachable=True) as session:
        sequence = computed(session, [1, 2, 3, 4, 5, 6])
        proxy.cut(stay_down=True)
        threading.Timer(0.1, proxy.up).start()
        assert_intact(session, sequence)


def test_a_broken_line_longer_than_the_grace_time(proxy: CuttingProxy, far: KVClient, client: KVClient) -> None:
    with far.session() as session:
        computed(session, [1, 2, 3, 4, 5, 6])
        cut_at = time.monotonic()
        proxy.cut(stay_down=True)
        until(lambda: client.stats().sessions == 0)
        assert time.monotonic() - cut_at >= GRACE_S * 0.9
        stats = client.stats()
        assert (stats.sequences, stats.active_blocks, stats.cached_blocks) == (0, 0, 1)
        proxy.up()
        with pytest.raises(UnknownSessionError):
            session.describe()


def test_a_daemon_out_of_reach_is_known_to_be_until_it_is_back(proxy: CuttingProxy) -> None:
    far = KVClient(proxy.address, timeout_s=60, reconnect_wait_s=0.05)
    with far, far.session(detachable=True) as session:
        threads = threading.active_count()
        proxy.cut(stay_down=True)
        for _ in range(2):  # the calls fail before their own limit of a minute
            with pytest.raises(DaemonAwayError, match="out of reach"), ThreadPoolExecutor(1) as pool:
                pool.submit(session.describe).result(30)
        proxy.up()
        until(lambda: answers(session))
        until(lambda: threading.active_count() <= threads)


def answers(session: Session) -> bool:
    try:
        return session.describe() == []
    except DaemonAwayError:
        return False


def test_a_call_has_a_time_limit(proxy: CuttingProxy, far: KVClient) -> None:
    """The connection is open, but the daemon does not answer."""
    with far.session(detachable=True) as session:
        proxy.lose_replies()
        with pytest.raises(CallTimeoutError, match="describe"):
            session.describe(timeout_s=0.05)
        with pytest.raises(CallTimeoutError):
            far.stats(timeout_s=0.05)
        proxy.cut()
        until(lambda: answers(session))


def test_a_time_limit_that_is_none(client: KVClient) -> None:
    wrong: tuple[Any, ...] = (0, -1.0, float("nan"), "1")
    with client.session() as session, each_row() as row:
        calls: dict[str, Callable[[Any], object]] = {
            "describe": lambda timeout_s: session.describe(timeout_s=timeout_s),
            "ping": lambda timeout_s: client.ping(timeout_s=timeout_s),
            "session": lambda timeout_s: client.session(timeout_s=timeout_s),
            "client": lambda timeout_s: KVClient("unix:none", timeout_s=timeout_s),
        }
        for name, call in calls.items():
            for timeout_s in wrong:
                with row((name, timeout_s)):
                    with pytest.raises(InvalidArgumentError) as error:
                        call(timeout_s)
                    assert error.value.field == "timeout_s"
    with pytest.raises(InvalidArgumentError, match="reconnect_wait_s"):
        KVClient("unix:none", reconnect_wait_s=-1)


CUT_CALLS: dict[str, tuple[Callable[[Session, dict[str, Any]], Any], dict[str, Any]]] = {
    # name: (the call, its changes of the pool's statistics)
    "allocate": (lambda session, _: session.allocate([7, 8]), {"sequences": 1, "tokens": 2}),
    "append": (lambda session, of: session.append([of["a"]], [9]), {"tokens": 1}),
    "fork": (lambda session, of: session.fork(of["a"]), {"sequences": 1, "tokens": 6, "shared_blocks": 2}),
    "truncate": (lambda session, of: session.truncate(of["a"], 4), {"tokens": -2}),
    "free": (lambda session, of: session.free([of["a"]]), {"sequences": -1, "tokens": -6, "cached_blocks": 1}),
    "swap_out": (lambda session, of: session.swap_out([of["a"]]), {"swapped_out_blocks": 2, "swapped_sequences": 1}),
    "swap_in": (lambda session, of: session.swap_in([of["b"]]), {"swapped_in_blocks": 1, "swapped_sequences": -1}),
    "pin": (lambda session, _: session.pin([40, 41, 42, 43], 60.0), {"pinned_blocks": 1}),
    "reset": (lambda session, _: session.reset_prefix_cache(), {"cached_blocks": -2}),
}


def test_a_call_whose_answer_was_lost_is_done_once(proxy: CuttingProxy, far: KVClient, client: KVClient) -> None:
    """The pool's statistics show each call's effect once."""
    with each_row() as row:
        for name, (call, change) in CUT_CALLS.items():
            with row(name):
                check_cut_call(proxy, far, client, call, change)
            with client.session() as cleaning:
                cleaning.reset_prefix_cache()


def check_cut_call(
    proxy: CuttingProxy, far: KVClient, client: KVClient, call: Callable[..., Any], change: dict[str, Any]
) -> None:
    with far.session(detachable=True) as session, ThreadPoolExecutor(1) as pool:
        session.free([computed(session, [40, 41, 42, 43, 44, 45])])  # leaves a cached block
        of = {"a": computed(session, [1, 2, 3, 4, 5, 6]), "b": computed(session, [11, 12, 13, 14, 15, 16])}
        session.swap_out([of["b"]])  # leaves another cached block
        before = client.stats()

        def changed(key: str) -> int:
            now: PoolStats = client.stats()
            return int(getattr(now, key) - getattr(before, key))

        proxy.lose_replies()
        answer = pool.submit(call, session, of)
        until(lambda: client.stats() != before)
        after = client.stats()
        assert not answer.done()
        proxy.cut()
        answer.result(PATIENCE_S)
        assert client.stats() == after
        assert {key: changed(key) for key in change} == change


def test_a_layer_whose_answer_was_lost_is_not_sent_again(proxy: CuttingProxy, far: KVClient, wire: Any) -> None:
    token = np.ones((1, 2, 32), np.float32)
    with far.session(detachable=True) as session, ThreadPoolExecutor(1) as pool:
        step = session.append([computed(session, [1, 2, 3, 4, 5, 6])], [7])

        def done() -> bool:
            # Refused before it writes anything: for the layer if that is written, else for the query's shape.
            wrong = tensor(1, 2, 31)
            request = attention_pb2.AttendRequest(
                session_token=session.token, step_id=step.step_id, query=wrong, key=wrong, value=wrong
            )
            return bool(getattr(wire.unary("extend", request), "reason", "") == "LAYER_WRITTEN")

        proxy.lose_replies()
        answer = pool.submit(step.decode, 0, token, token, token)
        until(done)
        proxy.cut()
        with pytest.raises(ConnectionLostError):
            answer.result(PATIENCE_S)
        with pytest.raises(LayerWrittenError):
            step.decode(0, token, token, token)
        step.decode(1, token, token, token)
        assert [info.num_computed_tokens for info in session.describe()] == [7]


def test_a_layer_is_sent_over_a_new_stream_if_the_old_one_is_known_to_be_broken(
    proxy: CuttingProxy, far: KVClient
) -> None:
    """On the old stream extend raises ConnectionLostError."""
    token = np.ones((1, 2, 32), np.float32)
    with far.session(detachable=True) as session:
        step = session.append([session.allocate([1])], [2])
        proxy.cut()
        assert len(session.describe()) == 1  # waits for the new stream
        step.extend(0, *3 * [np.repeat(token, 2, axis=0)])


RESUME = """
import hashlib, sys
from kvservice.client import KVClient
from kvservice.client.values import Sequence
with KVClient(sys.argv[1]) as client, client.resume(bytes.fromhex(sys.argv[2])) as session:
    [info] = session.describe(token_ids=True)
    key, value = session.read(Sequence(info.sequence_id, info.length), 0, info.num_computed_tokens)
    print(info.token_ids, info.num_computed_tokens, hashlib.sha256(key.tobytes() + value.tobytes()).hexdigest())
"""


def test_a_detached_session_is_resumed_by_another_process(daemon: Daemon, client: KVClient) -> None:
    session = client.session(detachable=True, detach_ttl_s=30.0)
    computed(session, [1, 2, 3, 4, 5, 6])
    token = session.detach()
    session.close()  # a client cannot close a session that it has detached
    time.sleep(2 * GRACE_S)
    child = subprocess.run(
        [sys.executable, "-P", "-c", RESUME, daemon.address, token.hex()], capture_output=True, text=True, timeout=60
    )
    digest = hashlib.sha256(KEY.tobytes() + VALUE.tobytes()).hexdigest()
    assert child.stdout.strip() == f"(1, 2, 3, 4, 5, 6) 6 {digest}", child.stderr
    assert client.stats().sessions == 0  # the child's block closed it


def test_a_session_that_cannot_be_resumed_is_left_as_it_was(client: KVClient, proxy: CuttingProxy) -> None:
    """A proxy carries no file descriptors, so no shared memory is set up through it."""
    faces: tuple[Face, ...] = ("blocking", "asyncio")
    with each_row() as row:
        for transport in ("lane", "mapped", "region"):
            for face in faces:
                with row((transport, face)):
                    session = client.session(detachable=True)
                    sequence = computed(session, [1, 2, 3, 4, 5, 6])
                    token = session.detach()
                    with pytest.raises(ConnectionLostError, match="fds"):
                        asyncio.run(resume(face, proxy.address, transport, token))
                    with client.resume(token) as again:
                        assert_intact(again, sequence)
                        assert again.regions() == []
                        again.free([sequence])
                        again.reset_prefix_cache()


async def resume(face: Face, address: str, transport: str, token: bytes) -> None:
    if face == "blocking":
        with KVClient(address, transport=transport) as client, client.resume(token):
            pytest.fail("it was resumed")
    async with AsyncKVClient(address, transport=transport) as waiting, waiting.resume(token):
        pytest.fail("it was resumed")


HOLD = """
import sys, time
from kvservice.client import KVClient
with KVClient(sys.argv[1]) as client, client.session(detachable=True) as session:
    session.allocate([1, 2, 3])
    print(session.token.hex(), flush=True)
    time.sleep(60)
"""


def test_a_detachable_session_outlives_its_killed_client(daemon: Daemon, client: KVClient) -> None:
    command = [sys.executable, "-P", "-c", HOLD, daemon.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        token = bytes.fromhex(child.stdout.readline())
        child.kill()
    time.sleep(2 * GRACE_S)
    with client.resume(token) as session:
        assert [info.length for info in session.describe()] == [3]


def test_a_session_that_was_left_ends(client: KVClient) -> None:
    session = client.session()
    session.allocate([1, 2, 3])
    left_at = time.monotonic()
    token = session.detach()
    until(lambda: client.stats().sessions == 0)
    assert time.monotonic() - left_at >= GRACE_S * 0.9
    assert client.stats().sequences == 0
    with pytest.raises(UnknownSessionError):
        client.resume(token)


@pytest.mark.parametrize("noticed", [True, False])
def test_who_lost_a_session_neither_takes_it_back_nor_closes_it(
    daemon: Daemon, client: KVClient, noticed: bool
) -> None:
    old = client.session(detachable=True)
    sequence = computed(old, [1, 2, 3, 4, 5, 6])
    with KVClient(daemon.address) as second, second.resume(old.token) as new:
        if noticed:
            for _ in range(2):
                with pytest.raises(SessionTakenError):
                    old.describe()
        old.close()
        time.sleep(2 * GRACE_S)
        assert_intact(new, sequence)
    assert client.stats().sessions == 0


def test_who_lost_a_session_unawares_is_refused_and_asks_no_more(
    proxy: CuttingProxy, far: KVClient, client: KVClient
) -> None:
    """The connection is down during the takeover, so the old client notices neither."""
    with far.session(detachable=True) as old:
        proxy.cut(stay_down=True)
        with client.resume(old.token) as new:
            proxy.up()
            with pytest.raises(SessionTakenError):
                old.describe()
            proxy.cut(stay_down=True)
            with pytest.raises(SessionTakenError):
                old.describe()
            proxy.up()
            assert new.describe() == []
    assert client.stats().sessions == 0


def test_who_lost_a_session_unawares_does_not_close_it(proxy: CuttingProxy, far: KVClient, client: KVClient) -> None:
    def reached() -> bool:
        try:
            return far.ping(b"x") == b"x"
        except ConnectionLostError:
            return False

    old = far.session(detachable=True)
    proxy.cut(stay_down=True)
    with client.resume(old.token) as new:
        proxy.up()
        until(reached)
        old.close()
        assert new.describe() == []


def test_who_resumes_its_own_session_is_its_holder_now(client: KVClient) -> None:
    with client.session(detachable=True) as first, client.resume(first.token) as second:
        with pytest.raises(SessionTakenError):
            first.describe()
        with client.resume(first.token) as third:
            with pytest.raises(SessionTakenError):
                second.describe()
            assert third.describe() == []


def test_a_session_that_was_closed_is_not_one_that_was_taken(client: KVClient, wire: Any) -> None:
    with client.session() as session:
        wire.unary("close", session_pb2.CloseRequest(session_token=session.token))
        until(lambda: is_known_to_be_closed(session))
        for _ in range(2):
            with pytest.raises(FailedPreconditionError, match="the session was closed") as error:
                session.describe()
            assert not isinstance(error.value, SessionTakenError)


def is_known_to_be_closed(session: Session) -> bool:
    """Return whether the client has read the end of its stream; until then a call finds the session unknown."""
    try:
        session.describe()
    except FailedPreconditionError:
        return True
    except UnknownSessionError:
        return False
    return False


def test_resuming_what_is_not_there_leaves_nothing(client: KVClient) -> None:
    for number in range(6):
        with pytest.raises(UnknownSessionError):
            client.resume(bytes(16))
        if number == 0:  # the client's thread for deadlines exists from now on
            threads = threading.active_count()
    until(lambda: threading.active_count() <= threads)


def test_closing_frees_and_keeps_what_is_computed_cached(client: KVClient) -> None:
    session = client.session()
    sequence = computed(session, [1, 2, 3, 4, 5, 6])
    session.fork(sequence)
    session.pin([1, 2, 3, 4], 60.0)
    session.close()
    stats = client.stats()
    gone = (stats.sessions, stats.sequences, stats.active_blocks, stats.shared_blocks, stats.pinned_blocks)
    assert gone == (0, 0, 0, 0, 0)
    assert (stats.cached_blocks, stats.free_blocks) == (1, stats.num_blocks - 1)
    session.close()
    with pytest.raises(ConnectionLostError):
        session.describe()
    with client.session() as other:
        assert other.allocate([1, 2, 3, 4, 5, 6]).num_cached_tokens == 4
        other.free([sequence])  # the first sequence of the other session has the same id, but is not the same sequence


def test_threads_may_share_a_session(client: KVClient) -> None:
    with client.session() as session, ThreadPoolExecutor(4) as pool:

        def work(base: int) -> list[tuple[int, ...]]:
            seen = []
            for n in range(25):
                sequence = session.allocate([base, n])
                session.append([sequence], [n])
                [info] = session.describe([sequence], token_ids=True)
                seen.append(info.token_ids)
                session.free([sequence])
            return seen

        for base, seen in enumerate(pool.map(work, range(4))):
            assert seen == [(base, n, n) for n in range(25)]


def test_a_call_that_waits_ends_when_another_thread_closes(proxy: CuttingProxy, far: KVClient) -> None:
    session = far.session()
    with ThreadPoolExecutor(1) as pool:
        proxy.lose_replies()
        answer = pool.submit(session.describe)
        time.sleep(0.1)
        session.detach()
        with pytest.raises(ConnectionLostError):
            answer.result(PATIENCE_S)


def test_a_message_over_the_limit_is_refused_and_the_session_lives(daemon: Daemon) -> None:
    with KVClient(daemon.address, transport="inline") as client, client.session(detachable=True) as session:
        with pytest.raises(MessageTooLargeError):
            session.match_prefix(range(2_000_000))
        assert session.describe() == []
        sequence = session.allocate([1])
        big = np.ones((1, 40_000, 32), np.float32)  # over the limit of 4 MiB, and one token is not cut
        key = value = np.ones((1, 2, 32), np.float32)
        with pytest.raises(MessageTooLargeError):
            session.open_step([sequence]).extend(0, big, key, value)
        assert len(session.describe()) == 1


def test_the_limit_of_sessions(raw: Any) -> None:
    options: dict[str, Any] = {
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_size": 32,
        "num_blocks": 8,
        "swap_space_gib": 0.0,
    }
    with Daemon(**options, max_sessions=2, session_grace_s=0.3) as small, KVClient(small.address) as client:
        first, second = client.session(), client.session()
        for _ in range(8):
            with pytest.raises(QuotaExceededError) as refused:
                client.session()
            assert refused.value.metadata == {"limit": "max_sessions", "value": "2"}
        wire = raw.Wire(small.address)
        answer = wire.unary("open", session_pb2.OpenRequest())
        assert (answer.code, answer.reason) == ("RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED")
        assert "QuotaFailure" in answer.details
        first.close()
        first = client.session()
        first.detach()
        until(lambda: client.stats().sessions == 1)
        with client.session():
            assert second.describe() == []
        second.close()
        wire.close()


def test_a_client_may_choose_the_token_of_its_session(daemon: Daemon, client: KVClient, raw: Any) -> None:
    """The request can then be repeated, also after a stream has attached."""
    wire = raw.Wire(daemon.address)
    request = session_pb2.OpenRequest(name="chosen", session_token=secrets.token_bytes(16))
    before = client.stats().sessions
    first = wire.unary("open", request)
    assert first.session_token == request.session_token
    assert wire.unary("open", request) == first
    with client.resume(request.session_token) as session:
        assert wire.unary("open", request) == first
        assert session.session_id == first.session_id
        assert client.stats().sessions == before + 1
    for wrong in (b"short", bytes(17)):
        refused = wire.unary("open", session_pb2.OpenRequest(session_token=wrong))
        assert (refused.code, refused.field) == ("INVALID_ARGUMENT", "session_token")
    assert client.stats().sessions == before
    wire.close()
