"""vLLM with its K/V blocks in a daemon's store: the same tokens as without, from blocks of another process.

The processes of vLLM are shared, since each takes seconds to start."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import free_port
from small_pool import SMALL_POOL
from store_memory import damage_values, zero_values
from tiny_llama import HIDDEN_SIZE, RANK, VOCABULARY, save_adapter
from vllm_processes import Engine, Server, connector, source_of
from waiting import until

from kvservice.launch import Daemon

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

BLOCK_SIZE = 32
HASHING = source_of("v1/core/kv_cache_utils.py")
# Blocks of the engine that saves: fewer than its requests need, so that it preempts them.
FEW_BLOCKS = 48


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


# The second one ends with a full block.
LONG = [prompt(0, 700), prompt(0, 400) + prompt(1, 304), prompt(2, 1000)]
# They grow while they are decoded.
GROWING = [prompt(10 + n, 60) for n in range(8)]
GROWN_TOKENS = 250
# Engine requests may have these besides tokens.
ENGINE = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK, "enable_prompt_embeds": True}
NUM_EMBEDDINGS = 300
SPECIAL = (("lora", "adapter"), ("embeds", "embeddings"))
Expected = dict[str, list[list[int]]]


def full_blocks(tokens: list[int]) -> int:
    """Return the number of tokens of a prompt that are not computed if all its blocks are loaded."""
    return min(len(tokens) // BLOCK_SIZE * BLOCK_SIZE, len(tokens) - 1)


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Requests with the same prompt that must not share a block: with adapters and with embeddings."""
    directory = tmp_path_factory.mktemp("special")
    for seed in (1, 2):
        save_adapter(directory / f"adapter{seed}", seed)
        embeddings = torch.randn(NUM_EMBEDDINGS, HIDDEN_SIZE, generator=torch.Generator().manual_seed(seed))
        torch.save(embeddings, directory / f"embeddings{seed}")
    return [{kind: str(directory / f"{name}{seed}")} for kind, name in SPECIAL for seed in (1, 2)]


@pytest.fixture(scope="module")
def expected(model: Path, special: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """The tokens of a vLLM without a connector."""
    with Engine(model, tmp_path_factory.mktemp("baseline") / "log", **ENGINE) as engine:
        return {
            "long": engine.generate(LONG)["tokens"],
            "growing": engine.generate(GROWING, GROWN_TOKENS)["tokens"],
            "special": [engine.generate(LONG[:1], **request)["tokens"][0] for request in special],
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
    # All blocks of such a small pool may be held.
    transfer = connector(store.running.address, verify=True, max_held_percent=49)
    with Engine(model, log, kv_transfer_config=transfer, num_gpu_blocks_override=FEW_BLOCKS, **ENGINE) as engine:
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


@pytest.fixture(scope="module")
def loader(model: Path, store: Restartable, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine that does not verify its loads, so that they are part of its steps, and a daemon without blocks."""
    store.restart()
    transfer = connector(store.running.address, max_held_percent=49)
    log = tmp_path_factory.mktemp("loader") / "log"
    with Engine(model, log, kv_transfer_config=transfer, num_gpu_blocks_override=FEW_BLOCKS) as engine:
        yield engine


def test_saving_changes_no_token(saver: Engine, expected: Expected) -> None:
    assert [saver.generate([tokens])["tokens"][0] for tokens in LONG] == expected["long"]


@pytest.mark.skipif("lora_path" not in HASHING, reason="vLLM itself mixes adapters with the same name up")
def test_adapters_and_embeddings_have_blocks_of_their_own(
    saver: Engine, special: list[dict[str, Any]], expected: Expected
) -> None:
    """The prompt without them is in the store already."""
    lengths = [full_blocks(LONG[0])] * 2 + [full_blocks([0] * NUM_EMBEDDINGS)] * 2
    for found in ([0] * 4, lengths):
        saver.reset()
        done = [saver.generate(LONG[:1], **request) for request in special]
        assert [each["tokens"][0] for each in done] == expected["special"]
        assert [each["cached"][0] for each in done] == found
    assert len({tuple(tokens) for tokens in [*expected["special"], expected["long"][0]]}) == 5


def test_preempted_requests_have_the_same_tokens(saver: Engine, expected: Expected) -> None:
    """Requests that continue where the first ended have them, too: the blocks that were saved meanwhile are right."""
    done = saver.generate(GROWING, GROWN_TOKENS)
    assert done["preemptions"] > 0
    assert done["tokens"] == expected["growing"]
    saver.reset()
    rest = GROWN_TOKENS // 5
    grown = [tokens + more[:-rest] for tokens, more in zip(GROWING, expected["growing"], strict=True)]
    done = saver.generate(grown, rest)
    assert done["tokens"] == [tokens[-rest:] for tokens in expected["growing"]]
    assert sum(done["cached"]) > 0


def test_another_process_loads_the_blocks_and_generates_the_same_tokens(server: Server, expected: Expected) -> None:
    for tokens, generated in zip(LONG, expected["long"], strict=True):
        assert server.complete(tokens) == (generated, full_blocks(tokens))


def test_the_statistics_of_vllm_count_the_blocks(server: Server) -> None:
    metrics = server.get("/metrics")
    for name in ("blocks_loaded", "blocks_loaded_in_step"):
        (loaded,) = re.findall(rf"^vllm:kvservice_{name}_total{{.*}} (\S+)$", metrics, re.MULTILINE)
        assert float(loaded) >= full_blocks(LONG[0]) // BLOCK_SIZE, name


def test_the_log_of_vllm_has_the_statistics(server: Server) -> None:
    """Fails if the line never comes."""
    until(lambda: re.search(r"KV Transfer metrics: .*blocks_loaded=", server.log))


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


def test_damaged_blocks_are_computed_again_if_loads_are_verified(
    saver: Engine, store: Restartable, expected: Expected
) -> None:
    """All blocks are zeros at first."""
    for number in range(3):
        saver.reset()
        done = saver.generate(LONG[2:])
        assert done["tokens"] == expected["long"][2:]
        if number == 1:
            # These are verified loads of what was computed again.
            assert done["cached"] == [full_blocks(LONG[2])]
            damage_values(store.running.process.pid)


def assert_is_used_again(engine: Engine, expected: list[list[int]]) -> None:
    """The client of the engine finds the new daemon in the background."""
    for _ in range(200):
        back = engine.generate(LONG[:1])
        assert back["tokens"] == expected
        engine.reset()
        if back["cached"] == [full_blocks(LONG[0])]:
            return
        time.sleep(0.1)
    pytest.fail("the new daemon is never used")


def assert_is_not_missed(engine: Engine, stop: Callable[[], None], expected: Expected, found: int) -> None:
    """Stop the daemon in the middle, and see that neither tokens nor times change. So many tokens are found then."""
    engine.reset()
    engine.begin(GROWING, GROWN_TOKENS, pause_at=40)
    assert engine.result() == "paused"
    stop()
    engine.proceed()
    done = engine.result()
    assert done["tokens"] == expected["growing"]
    before_s = max(done["steps_s"][:40])
    assert max(done["steps_s"][40:]) < before_s + 1.0

    engine.reset()
    away = engine.generate(LONG[:1])
    assert (away["tokens"], away["cached"]) == (expected["long"][:1], [found])
    assert max(away["steps_s"]) < before_s + 1.0


def test_requests_that_are_preempted_load_in_steps(loader: Engine, expected: Expected) -> None:
    for _ in range(2):
        done = loader.generate(GROWING, GROWN_TOKENS)
        assert done["preemptions"] > 0
        assert not done["frees_late"], "vLLM takes loads for ones that do not wait for a step that runs"
        assert done["tokens"] == expected["growing"]
        for tokens, generated in zip(LONG, expected["long"], strict=True):
            assert loader.generate([tokens])["tokens"] == [generated]
        loader.reset()


def test_a_daemon_that_is_frozen_changes_no_token(loader: Engine, store: Restartable, expected: Expected) -> None:
    process = store.running.process
    try:
        # The blocks are in memory that the engine maps.
        found = full_blocks(LONG[0])
        assert_is_not_missed(loader, lambda: process.send_signal(signal.SIGSTOP), expected, found)
    finally:
        process.send_signal(signal.SIGCONT)
    loader.reset()
    assert_is_used_again(loader, expected["long"][:1])


def test_a_daemon_that_is_killed_and_restarted_changes_no_token(
    loader: Engine, store: Restartable, expected: Expected
) -> None:
    store.restart()
    assert_is_not_missed(loader, store.kill, expected, 0)
    store.restart()
    loader.reset()
    assert_is_used_again(loader, expected["long"][:1])


def test_one_engine_computes_prompts_and_another_one_decodes(
    model: Path, store: Restartable, expected: Expected, tmp_path: Path
) -> None:
    transfer = connector(store.running.address, tenant="roles")
    with (
        Engine(model, tmp_path / "prompts", kv_transfer_config=transfer | {"kv_role": "kv_producer"}) as first,
        Engine(model, tmp_path / "answers", kv_transfer_config=transfer | {"kv_role": "kv_consumer"}) as second,
    ):
        for tokens, said in zip(LONG, expected["long"], strict=True):
            assert first.generate([tokens], 1)["tokens"] == [said[:1]]
            answered = second.generate([tokens])
            assert (answered["tokens"], answered["cached"]) == ([said], [full_blocks(tokens)])
        first.reset()
        assert first.generate(LONG[:1], 1)["cached"] == [0], "it loads nothing"


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
