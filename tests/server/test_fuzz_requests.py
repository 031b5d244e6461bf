"""Requests of every RPC with random and extreme content, over each transport, for KVSERVICE_FUZZ_SECONDS. A client
beside them reads what it has written, and nothing of them is left."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from good_requests import good_requests, key_of, prepare, shared_object
from google.protobuf.message_factory import GetMessageClass
from random_requests import vary
from raw_wire import SERVICES, RawSession, Wire, call_name, is_of_session, tensor
from secure_daemon import Secured, secured, with_token
from waiting import PATIENCE_S, until

from kvservice.client import KVClient, StoreNamespace
from kvservice.v1 import session_pb2

pytestmark = [pytest.mark.slow, pytest.mark.third]

SECONDS = int(os.environ.get("KVSERVICE_FUZZ_SECONDS", "10"))
RPCS = [(service.full_name, method) for service in SERVICES for method in service.methods]
CONNECT = "/kvservice.v1.SessionService/Connect"
# The requests of a session before it is closed, and the calls of a stream.
NUM_REQUESTS = 12
# What a request may get. INTERNAL would be a fault of the daemon.
ANSWERS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
INTERNAL = grpc.StatusCode.INTERNAL.value[0]
# A client's own word, or the time that it gives a stream.
ENDED_BY_CLIENT = {grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}


class Requests:
    """Sessions of one transport whose requests are random. `num_sent` counts them by RPC, `answers` by status."""

    def __init__(self, channel: grpc.Channel, source: random.Random, *, is_local: bool) -> None:
        self._channel, self._source, self._is_local = channel, source, is_local
        self._wire = Wire(channel)
        self.num_sent: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()

    def request(self, method: Any, token: bytes) -> Any:
        """Return a request of the session, which begins as a valid one in most cases."""
        kind = GetMessageClass(method.input_type)
        made = good_requests(token, tensor).get(key_of(method)) if self._source.random() < 0.8 else None
        if made is None:
            made = kind(session_token=token) if "session_token" in kind.DESCRIPTOR.fields_by_name else kind()
        for _ in range(self._source.choice((0, 1, 1, 2))):
            vary(made, self._source)
        return made

    def try_one(self, service: str, method: Any) -> None:
        """Send some requests of an RPC, in a session that has what the valid ones need."""
        victim = RawSession(self._wire)
        prepare(victim, tensor, service, method, is_local=self._is_local)
        for _ in range(NUM_REQUESTS):
            request = self.request(method, victim.token)
            data = request.SerializeToString()
            status = self._send(f"/{service}/{method.name}", method, data)
            self.num_sent[f"{service}/{method.name}"] += 1
            self.answers[status.name] += 1
            allowed = ANSWERS | ENDED_BY_CLIENT if method.server_streaming else ANSWERS
            assert status in allowed, (method.full_name, status, data[:500])
        victim.close()

    def _send(self, path: str, method: Any, data: bytes) -> grpc.StatusCode:
        try:
            if method.server_streaming:
                opened: Any = self._channel.unary_stream(path)
                for _ in opened(data, timeout=0.05):
                    pass
                return grpc.StatusCode.OK
            sent: Any = self._channel.unary_unary(path)
            call = sent.future(data, timeout=PATIENCE_S)
            if self._source.random() < 0.02:
                call.cancel()
                return grpc.StatusCode.OK
            answer = call.result()
        except grpc.RpcError as error:
            return error.code()
        if method.name == "Open" and not method.client_streaming:
            token = session_pb2.OpenResponse.FromString(answer).session_token
            self._wire.unary("close", session_pb2.CloseRequest(session_token=token))
        return grpc.StatusCode.OK

    def try_stream(self) -> None:
        """Send calls of all kinds on a session's stream, some of them together."""
        victim = RawSession(self._wire)
        _, method = self._source.choice([each for each in RPCS if is_of_session(each[1])])
        prepare(victim, tensor, method.containing_service.full_name, method, is_local=self._is_local)
        victim.stream.cancel()
        calls = [self._call(victim.token, number) for number in range(2, NUM_REQUESTS + 2)]
        together = session_pb2.Call(calls=calls)
        attach = session_pb2.AttachRequest(session_token=victim.token, reconnects=True)

        def sent() -> Iterator[bytes]:
            yield session_pb2.Call(call_id=1, attach=attach).SerializeToString()
            if self._source.random() < 0.3:
                yield together.SerializeToString()
            else:
                for call in calls:
                    yield call.SerializeToString()

        connect: Any = self._channel.stream_stream(CONNECT)
        stream = connect(sent(), timeout=PATIENCE_S)
        try:
            for data in stream:
                reply = session_pb2.Reply.FromString(data)
                assert reply.call_id <= NUM_REQUESTS + 1
                assert reply.error.code != INTERNAL, calls
                self.answers[str(reply.WhichOneof("reply"))] += 1
        except grpc.RpcError as error:
            status = error.code()
            assert status in ANSWERS | {grpc.StatusCode.ABORTED}, (status, calls)
        self.num_sent["calls of streams"] += len(calls)
        self._wire.unary("close", session_pb2.CloseRequest(session_token=victim.token))

    def _call(self, token: bytes, number: int) -> session_pb2.Call:
        _, method = self._source.choice([each for each in RPCS if is_of_session(each[1])])
        return session_pb2.Call(call_id=number, **{call_name(method): self.request(method, token)})


def num_files(daemon: Secured) -> int:
    return len(os.listdir(f"/proc/{daemon.daemon.process.pid}/fd"))


@pytest.mark.timeout(300 + SECONDS)
def test_whatever_is_asked_a_client_beside_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSERVICE_FUZZ_SECONDS", raising=False)  # it is no option of the daemon
    seed = random.SystemRandom().randrange(2**32)
    source = random.Random(seed)
    ours = np.random.default_rng(seed)
    values = ours.standard_normal((2, 2, 6, 2, 32), np.float32)
    keys, stored = [ours.bytes(32) for _ in range(4)], ours.integers(0, 256, (4, 4096), np.uint8)
    with (
        secured(tmp_path, allow_client_shm="on", max_sessions=64) as daemon,
        contextlib.ExitStack() as stack,
        shared_object(),
        KVClient(daemon.daemon.address) as client,
        client.session() as kv,
        client.store(StoreNamespace("beside", 4096)) as store,
    ):
        stack.callback(lambda: print(f"seed {seed}", daemon.daemon.log.read_text(errors="replace")[-8192:], sep="\n"))
        sequence = kv.allocate(range(6))
        kv.open_step([sequence]).write(values[0], values[1])
        tcp = stack.enter_context(grpc.secure_channel(daemon.address, daemon.tls()))
        local = stack.enter_context(grpc.insecure_channel(daemon.daemon.address))
        remote = with_token(tcp, daemon.tokens["alice"])
        transports = [Requests(local, source, is_local=True), Requests(remote, source, is_local=False)]
        before = num_files(daemon)
        stop = time.monotonic() + SECONDS
        is_first = True
        while is_first or time.monotonic() < stop:
            for service, method in RPCS:
                transport = source.choice(transports)
                if not method.client_streaming:
                    transport.try_one(service, method)
                transport.try_stream()
                assert client.ping(b"still here") == b"still here"
                found = kv.read(sequence, 0, 6)
                assert all(np.array_equal(*pair) for pair in zip(found, values, strict=True)), seed
            store.put(keys, stored)
            out = np.zeros_like(stored)
            got = np.asarray(store.get(keys, out), bool)
            assert np.array_equal(out[got], stored[got]), seed
            is_first = False
        said = daemon.daemon.log.read_text(errors="replace")
        assert "Traceback" not in said, (seed, said)
        assert daemon.daemon.process.poll() is None
        until(lambda: client.stats().sessions == 2)
        stats = client.stats()
        assert stats.sequences == 1, (seed, stats)
        until(lambda: num_files(daemon) <= before + 4)
        sent = transports[0].num_sent + transports[1].num_sent
        print(f"{sent.total()} requests, {min(sent.values())} or more of each RPC")
        print(*(each.answers for each in transports), sep="\n")
