"""Health and reflection, as used by load balancers and command line clients with any gRPC server."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from each_row import each_row
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from v1_services import SERVICES

from kvservice.client import KVClient
from kvservice.launch import Daemon

NAMES = [service.full_name for service in SERVICES]
STATUS = health_pb2.HealthCheckResponse
TIMEOUT_S = 10


@pytest.fixture
def channel(daemon: Daemon) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(daemon.address) as connected:
        yield connected


def test_check_and_watch_say_that_every_service_serves(channel: grpc.Channel) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    assert len(NAMES) > 10
    with each_row() as row:
        for name in ("", *NAMES):
            with row(name):
                request = health_pb2.HealthCheckRequest(service=name)
                assert stub.Check(request, timeout=TIMEOUT_S).status == STATUS.SERVING
                watch = stub.Watch(request, timeout=TIMEOUT_S)
                assert next(watch).status == STATUS.SERVING
                watch.cancel()


def test_a_service_that_is_none_of_ours_is_unknown(channel: grpc.Channel) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service="kvservice.v2.None")
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(request, timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(request, timeout=TIMEOUT_S)  # must stay open, because the service could be registered later
    assert next(watch).status == STATUS.SERVICE_UNKNOWN
    watch.cancel()


def test_every_watcher_hears_of_draining_and_a_late_check_as_well() -> None:
    pool: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 1, "head_size": 32, "dtype": "float32", "num_blocks": 4}
    with (
        Daemon(swap_space_gib=0, **pool) as daemon,
        grpc.insecure_channel(daemon.address) as channel,
        KVClient(daemon.address) as client,
        client.session() as kv,
    ):
        step, ones = kv.open_step([kv.allocate([1])]), np.ones((1, 1, 32), np.float32)
        step.extend(0, ones, ones, ones)  # the drain waits for layer 1
        stub: Any = health_pb2_grpc.HealthStub(channel)
        heard = queue.SimpleQueue[tuple[str, int]]()
        watching = [threading.Thread(target=_watch, args=(stub, name, heard)) for name in ("", *NAMES)]
        for thread in watching:
            thread.start()
        for status in (STATUS.SERVING, STATUS.NOT_SERVING):
            if status == STATUS.NOT_SERVING:
                daemon.process.send_signal(signal.SIGTERM)
            assert {heard.get(timeout=TIMEOUT_S) for _ in watching} == {(name, status) for name in ("", *NAMES)}
        for name in ("", *NAMES):
            request = health_pb2.HealthCheckRequest(service=name)
            assert stub.Check(request, timeout=TIMEOUT_S).status == STATUS.NOT_SERVING
        step.extend(1, ones, ones, ones)
        assert daemon.process.wait(TIMEOUT_S) == 0
        for thread in watching:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


def _watch(stub: Any, name: str, heard: queue.SimpleQueue[tuple[str, int]]) -> None:
    try:
        for answer in stub.Watch(health_pb2.HealthCheckRequest(service=name)):
            heard.put((name, answer.status))
    except grpc.RpcError:
        pass  # the daemon has exited


def test_reflection_lists_the_services(channel: grpc.Channel) -> None:
    others = ["grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"]
    assert sorted(ProtoReflectionDescriptorDatabase(channel).get_services()) == sorted(NAMES + others)


def test_reflection_tells_the_whole_contract(channel: grpc.Channel) -> None:
    """Reflection returns every file and its imports exactly as in the package."""
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    ours, told = (
        {file.name: file for file in _closure(source)}
        for source in ([s.file for s in SERVICES], [pool.FindServiceByName(name).file for name in NAMES])
    )
    assert told.keys() == ours.keys()
    for name, file in ours.items():
        assert _proto(told[name]) == _proto(file)


def _closure(files: list[FileDescriptor]) -> Iterator[FileDescriptor]:
    for file in files:
        yield file
        yield from _closure(list(file.dependencies))


def _proto(file: FileDescriptor) -> FileDescriptorProto:
    proto = FileDescriptorProto()
    file.CopyToProto(proto)
    return proto


def test_a_call_can_be_made_of_what_reflection_tells_alone(channel: grpc.Channel) -> None:
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    method = pool.FindServiceByName("kvservice.v1.PoolService").FindMethodByName("Ping")
    request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    path = f"/{method.containing_service.full_name}/{method.name}"
    ping: Any = channel.unary_unary(path, request.SerializeToString, response.FromString)
    assert ping(request(payload=b"reflected"), timeout=TIMEOUT_S).payload == b"reflected"
