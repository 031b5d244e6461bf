"""K and V of Write and Read in remote regions: what arrives, what is refused, and that nothing has changed then."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from each_row import each_row
from ports import free_port
from raw_wire import RawSession, Refusal, Wire
from transfer_rig import LOOPBACK, TRANSFERS, Side, engines_of, frozen, is_gone
from waiting import until

from kvservice import _ext
from kvservice.launch import Daemon
from kvservice.v1 import attention_pb2, blocks_pb2, session_pb2, tensor_pb2, transfer_pb2

pytestmark = pytest.mark.usefixtures("transfer_engine")

MIB = 1 << 20
LAYERS, KV_HEADS, HEAD_SIZE, NUM_TOKENS = 2, 2, 32, 100
SHAPE = (LAYERS, NUM_TOKENS, KV_HEADS, HEAD_SIZE)
TENSOR_BYTES = 4 * LAYERS * NUM_TOKENS * KV_HEADS * HEAD_SIZE
# Where K and V lie in the client's memory.
KEY, VALUE = 4096, MIB - TENSOR_BYTES


@pytest.fixture(scope="module")
def daemon() -> Iterator[tuple[Daemon, str]]:
    address = f"{LOOPBACK}:{free_port()}"
    with Daemon(**TRANSFERS | {"tcp_address": address, "max_message_mib": 1}) as running:
        yield running, address


@pytest.fixture
def session(daemon: tuple[Daemon, str]) -> Iterator[RawSession]:
    wire = Wire(daemon[1])
    opened = RawSession(wire)
    opened.ok("reset_prefix_cache", blocks_pb2.ResetPrefixCacheRequest(request_id=1))
    yield opened
    opened.close()
    until(lambda: not engines_of(daemon[0].process.pid))
    wire.close()


@pytest.fixture
def client(session: RawSession) -> Iterator[Side]:
    """The client's engine, for the region r of its session. K and V fit into the daemon's memory for it, exactly."""
    made = Side(MIB, shared=True, num_engines=2)
    create(session, made, "r", 2 * TENSOR_BYTES)
    yield made
    made.process.kill()


@pytest.fixture
def step_id(session: RawSession) -> int:
    """The id of a step over the tokens of sequence 1."""
    prompt = blocks_pb2.SequenceAllocation(sequence_id=1, token_ids=range(NUM_TOKENS))
    session.ok("allocate", blocks_pb2.AllocateRequest(request_id=2, sequences=[prompt]))
    return session.ok("open_step", blocks_pb2.OpenStepRequest(request_id=3, sequence_ids=[1])).step_id


def create(session: RawSession, side: Side, name: str, byte_size: int) -> None:
    where: dict[str, Any] = {"remote_bytes": MIB, "ports": side.ports, "address": side.process.address}
    request = transfer_pb2.CreateRemoteRegionRequest(name=name, byte_size=byte_size, **where)
    session.ok("create_remote_region", request)


def contents(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    key, value = (rng.standard_normal(SHAPE).astype(np.float32) for _ in range(2))
    return key, value


def fill(client: Side, key: np.ndarray, value: np.ndarray) -> None:
    for place, array in ((KEY, key), (VALUE, value)):
        client.bytes[place : place + TENSOR_BYTES] = array.reshape(-1).view(np.uint8)


def place(offset: int, array: np.ndarray | None = None, **changes: Any) -> tensor_pb2.SharedMemoryPlace:
    """Return the place of a tensor, with the checksum of the array; None of `changes` leaves a field out."""
    fields: dict[str, Any] = {"region": "r", "offset": offset, "byte_size": TENSOR_BYTES}
    if array is not None:
        data = np.ascontiguousarray(array)
        packed = _ext.store_checksums(data.ctypes.data, bytes(8), data.nbytes, 1)
        fields["checksum"] = int.from_bytes(packed, "little")
    fields |= changes
    return tensor_pb2.SharedMemoryPlace(**{name: value for name, value in fields.items() if value is not None})


def placed(where: tensor_pb2.SharedMemoryPlace, shape: tuple[int, ...] = SHAPE) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=shape, shared_memory=where)


def write_request(step_id: int, seed: int, **value_changes: Any) -> attention_pb2.WriteRequest:
    """Return the request for K and V of `contents`, with changes of the place of V."""
    key, value = contents(seed)
    fields: dict[str, Any] = {"offset": VALUE, "array": value}
    changed = place(**fields | value_changes)
    return attention_pb2.WriteRequest(step_id=step_id, key=placed(place(KEY, key)), value=placed(changed))


def read_request(**changes: Any) -> attention_pb2.ReadRequest:
    fields: dict[str, Any] = {"key_place": place(KEY), "value_place": place(VALUE)}
    whole = attention_pb2.SequenceRange(sequence_id=1, start=0, stop=NUM_TOKENS)
    return attention_pb2.ReadRequest(**{"ranges": [whole]} | fields | changes)


def num_computed(session: RawSession) -> int:
    return session.describe().sequences[0].num_computed_tokens


def by_message(session: RawSession) -> tuple[np.ndarray, np.ndarray]:
    answer = session.ok("read", read_request(key_place=None, value_place=None))
    key, value = (np.frombuffer(one.inline, np.float32).reshape(SHAPE) for one in (answer.key, answer.value))
    return key, value


def check_refused(answer: Any, code: str, reason: str, field: str = "") -> None:
    assert isinstance(answer, Refusal), answer
    assert (answer.code, answer.reason, answer.field) == (code, reason, field)


def test_tensors_arrive_byte_by_byte(session: RawSession, client: Side, step_id: int) -> None:
    fill(client, *contents(1))
    before = client.bytes.copy()
    request = write_request(step_id, 1)
    assert session.call("write", request, "unary") == attention_pb2.WriteResponse()
    np.testing.assert_array_equal(client.bytes, before)
    assert num_computed(session) == NUM_TOKENS
    for found, expected in zip(by_message(session), contents(1), strict=True):
        np.testing.assert_array_equal(found, expected)
    larger = place(KEY, byte_size=TENSOR_BYTES + 1)
    for transport in ("unary", "stream"):
        client.bytes[:] = 0
        answer = session.call("read", read_request(key_place=larger), transport)
        np.testing.assert_array_equal(client.bytes, before)  # nothing else was written
        key, value = contents(1)
        assert answer == attention_pb2.ReadResponse(key=placed(place(KEY, key)), value=placed(place(VALUE, value)))
    session.ok("truncate", blocks_pb2.TruncateRequest(request_id=4, sequence_ids=[1], lengths=[0]))
    prompt: dict[str, Any] = {"sequence_ids": [1], "token_ids": range(NUM_TOKENS), "num_tokens": [NUM_TOKENS]}
    step = session.ok("append", blocks_pb2.AppendRequest(request_id=5, **prompt))
    request = write_request(step.step_id, 1)
    assert session.call("write", request, "stream") == attention_pb2.WriteResponse()
    assert num_computed(session) == NUM_TOKENS


REFUSED_WRITES: list[tuple[dict[str, Any], str]] = [
    ({"region": "x"}, "region"),
    ({"region": "other"}, "region"),
    ({"offset": MIB}, "offset"),
    ({"offset": (1 << 64) - 1}, "offset"),
    ({"offset": VALUE + 1}, "byte_size"),
    ({"byte_size": (1 << 64) - 1}, "byte_size"),
    ({"byte_size": 0}, "byte_size"),
    ({"byte_size": TENSOR_BYTES - 4, "array": contents(2)[1].reshape(-1)[:-1]}, "byte_size"),
    ({"offset": 0, "byte_size": TENSOR_BYTES + 4096}, "byte_size"),
    ({"checksum": None}, "checksum"),
]


def test_places_of_writes_that_are_refused(session: RawSession, client: Side, step_id: int) -> None:
    create(session, client, "other", 4096)
    fill(client, *contents(2))
    with each_row() as row:
        for changes, field in REFUSED_WRITES:
            with row(changes):
                answer = session.call("write", write_request(step_id, 2, **changes))
                reason = "UNKNOWN_REGION" if changes == {"region": "x"} else "INVALID_ARGUMENT"
                code = "NOT_FOUND" if changes == {"region": "x"} else "INVALID_ARGUMENT"
                check_refused(answer, code, reason, f"value.shared_memory.{field}")
                assert num_computed(session) == 0
    check_refused(session.call("write", write_request(step_id, 2, checksum=1)), "UNAVAILABLE", "TRANSFER_FAILED")
    assert num_computed(session) == 0
    session.ok("write", write_request(step_id, 2))
    for found, expected in zip(by_message(session), contents(2), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_both_tensors_lie_in_the_region(session: RawSession, client: Side, step_id: int) -> None:
    fill(client, *contents(3))
    key, value = contents(3)
    inline = tensor_pb2.Tensor(data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=SHAPE, inline=value.tobytes())
    remote = placed(place(KEY, key))
    mixed = attention_pb2.WriteRequest(step_id=step_id, key=remote, value=inline)
    check_refused(session.call("write", mixed), "INVALID_ARGUMENT", "INVALID_ARGUMENT", "value.shared_memory.checksum")
    mixed = attention_pb2.WriteRequest(step_id=step_id, key=inline, value=remote)
    check_refused(session.call("write", mixed), "INVALID_ARGUMENT", "INVALID_ARGUMENT", "value.shared_memory.region")
    answer = session.call("read", read_request(value_place=None))
    check_refused(answer, "INVALID_ARGUMENT", "INVALID_ARGUMENT", "value_place.byte_size")
    assert num_computed(session) == 0


@pytest.mark.slow
def test_tensors_of_a_call_are_no_larger_than_a_message(session: RawSession, client: Side, step_id: int) -> None:
    create(session, client, "large", 2 * MIB)
    answer = session.call("write", write_request(step_id, 3, region="large", byte_size=MIB))
    check_refused(answer, "INVALID_ARGUMENT", "INVALID_ARGUMENT", "value.shared_memory.byte_size")
    assert num_computed(session) == 0


@pytest.mark.slow
def test_attention_takes_no_remote_regions(session: RawSession, client: Side, step_id: int) -> None:
    fill(client, *contents(3))
    request = attention_pb2.AttendRequest(step_id=step_id, query=placed(place(KEY, contents(3)[0])))
    answer = session.call("extend", request)
    check_refused(answer, "INVALID_ARGUMENT", "INVALID_ARGUMENT", "query.shared_memory.region")
    assert num_computed(session) == 0


INVALID = ("INVALID_ARGUMENT", "INVALID_ARGUMENT")


def tokens_of(start: int, stop: int, sequence_id: int = 1) -> dict[str, Any]:
    return {"ranges": [attention_pb2.SequenceRange(sequence_id=sequence_id, start=start, stop=stop)]}


REFUSED_READS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"value_place": place(VALUE, region="x")}, "NOT_FOUND", "UNKNOWN_REGION", "value_place.region"),
    ({"value_place": place(VALUE + 1)}, *INVALID, "value_place.byte_size"),
    ({"key_place": place(MIB)}, *INVALID, "key_place.offset"),
    ({"key_place": place(0, byte_size=TENSOR_BYTES - 1)}, *INVALID, "key_place.byte_size"),
    ({"key_place": place(KEY, byte_size=(1 << 64) - 1)}, *INVALID, "key_place.byte_size"),
    ({"value_place": place(KEY)}, *INVALID, "value_place.offset"),
    ({"value_place": place(KEY + TENSOR_BYTES - 1)}, *INVALID, "value_place.offset"),
    ({"value_place": place(KEY - 4)}, *INVALID, "value_place.offset"),
    ({"layer": LAYERS}, *INVALID, "layer"),
    (tokens_of(7, 7), *INVALID, "ranges[0]"),
    (tokens_of(8, 7), *INVALID, "ranges[0]"),
    (tokens_of(1, NUM_TOKENS + 1), *INVALID, "ranges[0].stop"),
    (tokens_of(0, NUM_TOKENS, sequence_id=2), "NOT_FOUND", "UNKNOWN_SEQUENCE", "ranges[0].sequence_id"),
]


def test_places_of_reads_that_are_refused(session: RawSession, client: Side, step_id: int) -> None:
    fill(client, *contents(4))
    session.ok("write", write_request(step_id, 4))
    client.bytes[:] = 9
    with each_row() as row:
        for changes, code, reason, field in REFUSED_READS:
            with row(changes):
                check_refused(session.call("read", read_request(**changes)), code, reason, field)
                assert (client.bytes == 9).all()
    session.ok("read", read_request())
    assert client.bytes[KEY : KEY + TENSOR_BYTES].tobytes() == contents(4)[0].tobytes()


@pytest.mark.slow
def test_neighbouring_places_of_reads(session: RawSession, client: Side, step_id: int) -> None:
    fill(client, *contents(4))
    session.ok("write", write_request(step_id, 4))
    client.bytes[:] = 0
    session.ok("read", read_request(value_place=place(KEY + TENSOR_BYTES)))
    expected = b"".join(one.tobytes() for one in contents(4))
    assert client.bytes[KEY : KEY + 2 * TENSOR_BYTES].tobytes() == expected


def test_calls_with_regions_need_a_session(session: RawSession) -> None:
    """A client on another host is told that its session has ended, whether or not its request names a region."""
    for name, request in (("read", read_request()), ("write", write_request(1, 1))):
        request.session_token = bytes(16)
        check_refused(session.wire.unary(name, request), "NOT_FOUND", "UNKNOWN_SESSION", "session_token")


@pytest.mark.slow
def test_an_engine_that_is_gone_changes_nothing(
    daemon: tuple[Daemon, str], session: RawSession, client: Side, step_id: int
) -> None:
    fill(client, *contents(5))
    client.process.kill()
    until(lambda: is_gone(client.process.pid))
    for _ in range(2):
        check_refused(session.call("write", write_request(step_id, 5)), "UNAVAILABLE", "TRANSFER_FAILED")
    assert num_computed(session) == 0
    until(lambda: not engines_of(daemon[0].process.pid))
    key, value = contents(5)
    inline = [
        tensor_pb2.Tensor(data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=SHAPE, inline=one.tobytes())
        for one in (key, value)
    ]
    session.ok("write", attention_pb2.WriteRequest(step_id=step_id, key=inline[0], value=inline[1]))
    check_refused(session.call("read", read_request()), "UNAVAILABLE", "TRANSFER_FAILED")
    for found, expected in zip(by_message(session), (key, value), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_a_session_that_is_closed_meanwhile_is_not_written(
    daemon: tuple[Daemon, str], session: RawSession, client: Side, step_id: int
) -> None:
    fill(client, *contents(6))
    request = write_request(step_id, 6)
    request.session_token = session.token
    with ThreadPoolExecutor(1) as threads, frozen(client.process.pid):
        answer = threads.submit(session.wire.unary, "write", request)
        session.wire.unary("close", session_pb2.CloseRequest(session_token=session.token))
        assert isinstance(answer.result(), Refusal)
    until(lambda: not engines_of(daemon[0].process.pid))
    assert session.wire.stats().active_blocks == 0
