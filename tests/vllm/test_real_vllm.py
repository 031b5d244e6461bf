"""vLLM with its K/V blocks in a daemon's store: the same tokens as without, from blocks of another process.

The processes of vLLM are shared, since each takes up to a minute to start."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_port
from small_pool import SMALL_POOL
from store_memory import zero_values
from tiny_llama import VOCABULARY, save_tiny_llama
from vllm_processes import Engine, Server, connector

from kvservice.launch import Daemon

pytestmark = pytest.mark.timeout(600)

BLOCK_SIZE = 32
# Blocks of the engine that saves: fewer than its requests need, so that it preempts them.
FEW_BLOCKS = 48


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


LONG = [prompt(0, 700), prompt(0, 400) + prompt(1, 300), prompt(2, 1000)]
# They grow while they are decoded.
GROWING = [prompt(10 + n, 60) for n in range(8)]
GROWN_TOKENS = 250


def full_blocks(tokens: list[int]) -> int:
    """Return the number of tokens of a prompt in blocks that can be loaded."""
    return (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_llama(directory)
    return directory


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """The tokens of a vLLM without a connector."""
    with Engine(model, tmp_path_factory.mktemp("baseline") / "log") as engine:
        return {
            "long": engine.generate(LONG)["tokens"],
            "growing": engine.generate(GROWING, GROWN_TOKENS)["tokens"],
        }


@pytest.fixture(scope="module")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("daemon") / "kvservice.sock"


class Restartable:
    """A daemon that can be killed, and started again at the same address."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.running = self._start()

    def _start(self) -> Daemon:
        return Daemon(**SMALL_POOL | {"store_gib": 0.125, "unix_socket": self.socket}).__enter__()

    def kill(self) -> None:
        self.running.process.kill()
        self.running.process.wait()

    def restart(self) -> None:
        self.kill()
        self.running.__exit__()
        self.running = self._start()


@pytest.fixture(scope="module")
def store(socket: Path) -> Iterator[Restartable]:
    daemon = Restartable(socket)
    yield daemon
    daemon.running.__exit__()


@pytest.fixture(scope="module")
def saver(model: Path, store: Restartable, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("saver") / "log"
    transfer = connector(store.running.address)
    with Engine(model, log, kv_transfer_config=transfer, num_gpu_blocks_override=FEW_BLOCKS) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(
    model: Path, store: Restartable, saver: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Another process that shares the store with the saver. One that has saved everything."""
    for number in range(len(LONG)):
        saver.generate(LONG[number : number + 1])
    log = tmp_path_factory.mktemp("server") / "log"
    with Server(model, log, free_port(), connector(store.running.address)) as running:
        yield running


Expected = dict[str, list[list[int]]]


def test_saving_changes_no_token(saver: Engine, expected: Expected) -> None:
    assert [saver.generate([tokens])["tokens"][0] for tokens in LONG] == expected["long"]


def test_preempted_requests_have_the_same_tokens(saver: Engine, expected: Expected) -> None:
    done = saver.generate(GROWING, GROWN_TOKENS)
    assert done["preemptions"] > 0
    assert done["tokens"] == expected["growing"]


def test_another_process_loads_the_blocks_and_generates_the_same_tokens(server: Server, expected: Expected) -> None:
    for tokens, generated in zip(LONG, expected["long"], strict=True):
        assert server.complete(tokens) == (generated, full_blocks(tokens))


def test_the_statistics_of_vllm_count_the_blocks(server: Server) -> None:
    metrics = server.get("/metrics")
    (loaded,) = re.findall(r"^vllm:kvservice_blocks_loaded_total{.*} (\S+)$", metrics, re.MULTILINE)
    assert float(loaded) >= full_blocks(LONG[0]) // BLOCK_SIZE


def test_another_salt_finds_nothing(server: Server, expected: Expected) -> None:
    server.post("/reset_prefix_cache")
    assert server.complete(LONG[0], cache_salt="theirs") == (expected["long"][0], 0)


def test_zeroed_blocks_give_other_tokens(server: Server, store: Restartable, expected: Expected) -> None:
    """The other tests would fail if blocks were wrong."""
    server.post("/reset_prefix_cache")
    assert zero_values(store.running.process.pid) > 0
    tokens, cached = server.complete(LONG[2])
    assert cached == full_blocks(LONG[2])
    assert tokens != expected["long"][2]


def assert_is_used_again(engine: Engine, expected: list[list[int]]) -> None:
    """The client of the engine finds the new daemon in the background."""
    for _ in range(200):
        back = engine.generate(LONG[:1])
        assert back["tokens"] == expected
        engine.reset()
        if back["cached"] == [full_blocks(LONG[0])]:
            return
    pytest.fail("the new daemon is never used")


def test_a_daemon_that_is_killed_and_restarted_changes_no_token(
    saver: Engine, store: Restartable, expected: Expected
) -> None:
    store.restart()
    saver.reset()
    saver.begin(GROWING, GROWN_TOKENS, pause_at=40)
    assert saver.result() == "paused"
    store.kill()
    saver.proceed()
    done = saver.result()
    assert done["tokens"] == expected["growing"]
    assert max(done["steps_s"][40:]) < max(done["steps_s"][:40]) + 1.0

    saver.reset()
    away = saver.generate(LONG[:1])
    assert (away["tokens"], away["cached"]) == (expected["long"][:1], [0])
    assert max(away["steps_s"]) < max(done["steps_s"][:40]) + 1.0

    store.restart()
    saver.reset()
    assert_is_used_again(saver, expected["long"][:1])


def test_ranks_of_a_tensor_parallel_engine_load_their_own_blocks(
    model: Path, store: Restartable, tmp_path: Path
) -> None:
    """The engine starts before the daemon."""
    store.kill()
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with Engine(model, tmp_path / "log", kv_transfer_config=connector(store.running.address), **options) as engine:
        first = engine.generate(LONG[:1])
        assert first["cached"] == [0]
        store.restart()
        assert_is_used_again(engine, first["tokens"])
