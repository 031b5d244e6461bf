"""Lanes, regions and the mapped pool of a daemon with a pool on the GPU. Clients are this process and its children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
_cuda = pytest.importorskip("kvservice._cuda", reason="kvservice was built without CUDA")

from gpu_peer import allocate, peer  # noqa: E402

from kvservice.client import KVClient, Session  # noqa: E402
from kvservice.errors import (  # noqa: E402
    InvalidArgumentError,
    LayerWrittenError,
    RegionNotOpenedError,
    RegionsNotAllowedError,
    StaleStepError,
)
from kvservice.launch import Daemon  # noqa: E402
from kvservice.v1 import regions_pb2  # noqa: E402

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 2, 8, 2, 64
POOL: dict[str, Any] = {
    "device": "cuda",
    "num_layers": NUM_LAYERS,
    "num_kv_heads": NUM_KV_HEADS,
    "head_size": HEAD_SIZE,
    "dtype": "bfloat16",
    "block_size": 16,
    "num_blocks": 512,
    "swap_space_gib": 0.01,
    "session_grace_s": 0.3,
    "share_pool": "write",
}
GIB = 1 << 30


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    with Daemon(**POOL) as running:
        yield running


def tensors(num_tokens: int, seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_tokens, heads, HEAD_SIZE) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]
    return [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]


def attend_all(kv: Session, device: str, memory: Any = None, **options: Any) -> list[Any]:
    """Run a prefill of two sequences, a fork and three decode steps. Returns outputs and log-sum-exps."""
    results = []
    lengths = [40, 7]
    sequences = kv.allocate_batch([range(1000 * i, 1000 * i + length) for i, length in enumerate(lengths)])
    step = kv.open_step(sequences)
    for number in range(5):
        for layer in range(NUM_LAYERS):
            arrays = [tensor.to(device) for tensor in tensors(step.num_tokens, 100 * number + layer)]
            if memory is not None:
                arrays = [in_region(memory, tensor, index) for index, tensor in enumerate(arrays)]
            output, lse = step.attend(layer, *arrays, return_lse=True, **options)
            assert output.device.type == lse.device.type == torch.device(device).type
            results += [output.cpu().clone(), lse.cpu().clone()]
        if number == 0:
            sequences.append(kv.fork(sequences[0]))
        if number == 2:
            kv.swap_out(sequences[:1])
            kv.swap_in(sequences[:1])
        step = kv.append(sequences, [number] * len(sequences))
    kv.free(sequences)
    kv.reset_prefix_cache()
    return results


def in_region(memory: Any, tensor: Any, index: int) -> Any:
    place = memory.array(tuple(tensor.shape), "bfloat16", index << 18)
    place[...] = tensor
    return place


@pytest.fixture(scope="module")
def expected(shared: Daemon) -> list[Any]:
    with KVClient(shared.address, transport="inline") as client, client.session() as kv:
        return attend_all(kv, "cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("transport", ["inline", "region", "lane", "mapped"])
def test_every_transport_gives_the_same(shared: Daemon, expected: list[Any], transport: str, device: str) -> None:
    with KVClient(shared.address, transport=transport) as client, client.session() as kv:
        assert kv.transport == transport
        for found, wanted in zip(attend_all(kv, device), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_what_a_client_gets(shared: Daemon) -> None:
    with KVClient(shared.address) as client, client.session() as kv:
        assert kv.transport == "mapped"  # because torch is loaded here
    code = f"from kvservice.client import KVClient as C; print(C({shared.address!r}).session().transport)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "lane\n", done.stderr


@pytest.mark.parametrize("device", [None, 0])
@pytest.mark.parametrize("transport", ["inline", "region", "lane"])
def test_tensors_that_lie_in_a_region(shared: Daemon, expected: list[Any], transport: str, device: int | None) -> None:
    with KVClient(shared.address, transport=transport) as client, client.session() as kv:
        memory = kv.create_region(4 << 20, device=device)
        found = attend_all(kv, "cpu", HostTensors(memory)) if device is None else attend_all(kv, "cuda:0", memory)
        for one, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(one, wanted, rtol=0, atol=0)
        assert (memory.name, device) in {(one.name, one.device_id) for one in kv.regions()}
        kv.unregister_region(memory)
        assert memory.name not in {one.name for one in kv.regions()}


class HostTensors:
    """A region whose arrays are torch tensors."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def array(self, shape: tuple[int, ...], dtype: str, offset: int) -> Any:
        return torch.from_numpy(self._memory.array(shape, dtype, offset).view(np.int16)).view(torch.bfloat16)


@pytest.mark.parametrize("transport", ["lane", "mapped", "region"])
@pytest.mark.parametrize(
    "options", [{"scale": 0.3}, {"sliding_window": 9}, {"alibi_slopes": [0.1] * NUM_HEADS}], ids=str
)
def test_options(shared: Daemon, transport: str, options: dict[str, Any]) -> None:
    results = []
    for name, device in (("inline", "cpu"), (transport, "cuda:0")):
        with KVClient(shared.address, transport=name) as client, client.session() as kv:
            results.append(attend_all(kv, device, **options))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("transport", ["lane", "mapped"])
def test_results_go_where_they_are_wanted(shared: Daemon, transport: str) -> None:
    with KVClient(shared.address, transport=transport) as client, client.session() as kv:
        memory = kv.create_region(4 << 20, device=0)
        query, key, value = (tensor.cuda() for tensor in tensors(9, 1))
        sequence = kv.allocate(range(9))
        step = kv.open_step([sequence])
        plain = step.extend(0, query, key, value)
        inside = memory.array(tuple(query.shape), "bfloat16", 2 << 20)
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device="cuda:0")
        output, lse_out = step.extend(1, query, key, value, return_lse=True, out=inside, lse_out=lse)
        assert output is inside
        assert lse_out is lse
        torch.testing.assert_close(inside, plain, rtol=0, atol=0)
        with pytest.raises(InvalidArgumentError) as caught:
            kv.append([sequence], [1]).decode(0, query[:1], key[:1], value[:1], out=torch.empty(1, 8, 64))
        assert caught.value.field == "out"


@pytest.mark.parametrize("transport", ["lane", "mapped"])
def test_wrong_calls_are_refused(shared: Daemon, transport: str) -> None:
    with KVClient(shared.address, transport=transport) as client, client.session() as kv:
        query, key, value = (tensor.cuda() for tensor in tensors(3, 1))
        sequence = kv.allocate(range(3))
        step = kv.open_step([sequence])
        step.extend(0, query, key, value)
        with pytest.raises(LayerWrittenError):
            step.extend(0, query, key, value)
        with pytest.raises(InvalidArgumentError, match="layer"):
            step.extend(NUM_LAYERS, query, key, value)
        with pytest.raises(InvalidArgumentError) as caught:
            step.extend(1, query, key[:2], value)
        assert caught.value.field == "key.shape"
        kv.append([sequence], [1])
        with pytest.raises(StaleStepError):
            step.extend(1, query, key, value)


def test_a_direct_write_counts_when_it_is_committed(shared: Daemon) -> None:
    prompt = list(range(70_000, 70_033))
    with KVClient(shared.address, transport="mapped") as client, client.session() as kv:
        sequence = kv.allocate(prompt)
        step = kv.open_step([sequence])
        _, key, value = (tensor.cuda() for tensor in tensors(33, 5))
        step.write(key, value, 0)
        assert kv.match_prefix(prompt) == 0
        step.write(key, value, 1)
        assert kv.match_prefix(prompt) == 32
        found, _ = kv.read(sequence, 0, 33)
        for layer in range(NUM_LAYERS):
            np.testing.assert_array_equal(found[layer].view(np.int16), key.cpu().view(torch.int16).numpy())
        kv.reset_prefix_cache()


# ---- handles


def free_bytes() -> int:
    return int(_cuda.memory_info(0)[0])


def wait_until(true: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.02)


def register_request(name: str, raw_handle: bytes, num_bytes: int, device: int = 0) -> Any:
    return regions_pb2.RegisterCudaRegionRequest(
        name=name, raw_handle=raw_handle, device_id=device, byte_size=num_bytes
    )


def test_handles_that_are_wrong_foreign_repeated_or_stale(shared: Daemon, raw: Any) -> None:
    with KVClient(shared.address, transport="lane") as client, client.session() as kv, peer() as other:
        handle = other.run(allocate, "memory", 4 << 20, 6)
        wire = raw.Wire(shared.address)
        session = raw.RawSession(wire)

        def refused(name: str, raw_handle: bytes, num_bytes: int, device: int = 0) -> str:
            answer = session.call("register_cuda_region", register_request(name, raw_handle, num_bytes, device))
            assert isinstance(answer, raw.Refusal)
            assert answer.code == "INVALID_ARGUMENT" or answer.reason == RegionNotOpenedError.reason
            return str(answer.field)

        session.ok("register_cuda_region", register_request("good", handle, 4 << 20))
        listed = session.ok("list_regions", regions_pb2.ListRegionsRequest()).regions
        assert list(listed) == [regions_pb2.Region(name="good", byte_size=4 << 20, device_id=0)]
        for field, wrong in (
            ("raw_handle", ("again", handle, 4 << 20)),
            ("raw_handle", ("short", handle[:63], 4 << 20)),
            ("raw_handle", ("random", os.urandom(64), 4 << 20)),
            ("device_id", ("device", handle, 4 << 20, 1)),
        ):
            assert refused(*wrong) == field
        request = regions_pb2.UnregisterRegionRequest(name="good")
        session.ok("unregister_region", request)
        for wrong_size in (0, (4 << 20) + 1, 1 << 63, (1 << 64) - 1):
            assert refused("size", handle, wrong_size) == "byte_size"
        other.kill()
        refused("stale", handle, 4 << 20)
        attend_all(kv, "cuda:0")
        session.close()
        wire.close()


def test_memory_of_a_gpu_is_taken_from_those_who_are_known(raw: Any) -> None:
    """If other users can connect, GPU memory is accepted only from clients that the daemon has identified."""
    with (
        Daemon(**POOL | {"unix_socket_mode": "0666"}) as daemon,
        KVClient(daemon.address, transport="inline") as client,
        client.session() as kv,
        peer() as other,
    ):
        request = register_request("theirs", other.run(allocate, "memory", 4 << 20, 6), 4 << 20)
        wire = raw.Wire(daemon.address)
        session = raw.RawSession(wire)
        answer = session.call("register_cuda_region", request)
        assert (type(answer), answer.reason) == (raw.Refusal, RegionsNotAllowedError.reason)
        session.close()
        wire.close()
        kv.create_region(4096)  # first proves to the daemon who owns the session
        kv.create_region(4 << 20, device=0)


CLIENT = """
import sys, time
from kvservice.client import KVClient
import torch
with KVClient(sys.argv[1], transport="lane") as client, client.session() as kv:
    memory = kv.create_region({num_bytes}, device=0)
    query, key, value = (memory.array((1, heads, 64), "bfloat16", index << 12) for index, heads in enumerate((8, 2, 2)))
    for tensor in (query, key, value):
        tensor.normal_()
    sequence = kv.allocate(range(50))
    kv.open_step([sequence])
    print("ready", flush=True)
    number = 0
    while True:
        sequence = kv.allocate([number])
        step = kv.open_step([sequence])
        for layer in range(2):
            step.extend(layer, query, key, value)
        kv.free([sequence])
        number += 1
"""


@pytest.mark.alone
def test_the_memory_of_killed_clients_comes_back(shared: Daemon) -> None:
    with KVClient(shared.address) as client, client.session() as kv:
        attend_all(kv, "cuda:0")
        blocks, free = client.stats().free_blocks, free_bytes()
        for _ in range(3):
            code = CLIENT.format(num_bytes=4 * GIB)
            with subprocess.Popen([sys.executable, "-P", "-c", code, shared.address], stdout=subprocess.PIPE) as child:
                assert child.stdout is not None
                assert child.stdout.readline() == b"ready\n"
                assert free_bytes() < free - 4 * GIB
                time.sleep(0.2)  # the child makes calls
                os.kill(child.pid, signal.SIGKILL)
            wait_until(lambda: free_bytes() > free - GIB // 4)
            wait_until(lambda: client.stats().free_blocks == blocks)
        attend_all(kv, "cuda:0")


def test_a_daemon_that_is_killed_is_noticed() -> None:
    from kvservice.errors import KVServiceError

    # It does not come back, so the client need not wait for it.
    with Daemon(**POOL) as daemon, KVClient(daemon.address, reconnect_wait_s=1) as client, client.session() as kv:
        sequence = kv.allocate(range(20))
        step = kv.open_step([sequence])
        arrays = [tensor.cuda() for tensor in tensors(20, 0)]
        step.extend(0, *arrays)
        daemon.process.kill()
        daemon.process.wait()
        start = time.monotonic()
        with pytest.raises(KVServiceError):
            step.extend(1, *arrays)
        assert time.monotonic() - start < 30
