"""Real daemons: the pool's blocks are found again after the machine has lost its memory, and by clients that map it."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each_row import each_row
from kv_model import reference_attention
from small_pool import SMALL_POOL

from kvservice.client import KVClient, Session
from kvservice.launch import Daemon

PROMPT = list(range(100, 141))
NUM_CACHED = 40
pytestmark = pytest.mark.usefixtures("_room")


@pytest.fixture
def _room(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()


def options(directory: Path, **changes: Any) -> dict[str, Any]:
    """Return the options of a daemon whose values go to a disk, and whose loads are always worth it."""
    disk = {"disk": str(directory / "disk"), "disk_gib": 0.25, "disk_sessions_gib": 0.0}
    return SMALL_POOL | disk | {"weights": "w", "prefill_tokens_per_s": 1.0} | changes


def kv_of(tokens: list[int], info: Any) -> Any:
    """Return K/V of these tokens, which depend on all of them."""
    shape = (2, info.num_layers, len(tokens), info.num_kv_heads, info.head_size)
    return np.random.default_rng(tokens).standard_normal(shape, np.float32)


def fill(session: Session, tokens: list[int]) -> Any:
    """Compute what is missing of a prompt, and free it. Returns K/V of all its tokens."""
    sequence = session.allocate(tokens)
    kv = kv_of(tokens, session.info)
    step = session.open_step([sequence])
    first = sequence.num_cached_tokens
    step.write(kv[0][:, first:], kv[1][:, first:])
    session.free([sequence])
    return kv


def check(session: Session, tokens: list[int], kv: Any, num_cached: int) -> None:
    sequence = session.allocate(tokens)
    assert sequence.num_cached_tokens == num_cached
    key, value = session.read(sequence, 0, num_cached)
    np.testing.assert_array_equal(key, kv[0][:, :num_cached])
    np.testing.assert_array_equal(value, kv[1][:, :num_cached])
    session.free([sequence])


def eventually(session: Session, tokens: list[int]) -> None:
    """Wait until a prompt can be loaded: until the disk is open, at most a minute."""
    pause = threading.Event()
    for _ in range(1200):
        sequence = session.allocate(tokens)
        found = sequence.num_cached_tokens
        session.free([sequence])
        if found:
            return
        pause.wait(0.05)
    pytest.fail("the blocks are not found")


def test_after_a_reboot_a_prompt_is_found_on_the_disk_with_the_same_weights_only(tmp_path: Path) -> None:
    with Daemon(**options(tmp_path)) as daemon, KVClient(daemon.address) as client:
        with client.session() as session:
            kv = fill(session, PROMPT)
        assert daemon.stop() == 0
    for changes, num_cached in (({"weights": "v"}, 0), ({}, NUM_CACHED)):
        with Daemon(**options(tmp_path, **changes)) as daemon, KVClient(daemon.address) as client:
            with client.session() as session:
                if num_cached:
                    eventually(session, PROMPT)
                    check(session, PROMPT, kv, num_cached)
                else:
                    for _ in range(20):  # the disk is open by then, or its values would be found below
                        sequence = session.allocate(PROMPT)
                        assert sequence.num_cached_tokens == 0
                        session.free([sequence])
            assert daemon.stop() == 0


@pytest.mark.slow
def test_killed_again_and_again_no_prompt_has_wrong_bytes(tmp_path: Path) -> None:
    """After each SIGKILL the daemon's memory is lost, and only the disk is left. The memory is small: most blocks leave
    it."""
    shape = {"num_layers": 8, "num_kv_heads": 8, "head_size": 128, "num_blocks": 32, "swap_space_gib": 0.0}
    rng = np.random.default_rng(0)
    prompts = [[1000 * n + token for token in range(int(rng.integers(9, 60)))] for n in range(24)]
    found = 0
    for life in range(5):
        with Daemon(**options(tmp_path, **shape)) as daemon, KVClient(daemon.address) as client:
            session = client.session()
            for n in rng.permutation(len(prompts))[: 12 + life]:
                tokens = prompts[n]
                sequence = session.allocate(tokens)
                kv, cached = kv_of(tokens, session.info), sequence.num_cached_tokens
                if cached:
                    key, value = session.read(sequence, 0, cached)
                    np.testing.assert_array_equal(key, kv[0][:, :cached])
                    np.testing.assert_array_equal(value, kv[1][:, :cached])
                    found += 1
                step = session.open_step([sequence])
                step.write(kv[0][:, cached:], kv[1][:, cached:])
                session.free([sequence])
            daemon.process.send_signal(signal.SIGKILL)
            daemon.process.wait()
    assert found > 0


def test_clients_of_every_transport_get_loaded_blocks(tmp_path: Path) -> None:
    """Prompts that push each other out of a small pool come back byte by byte, while attention runs over them."""
    with Daemon(**options(tmp_path, num_blocks=32, share_pool="write")) as daemon, each_row() as row:
        for number, transport in enumerate(("mapped", "lane", "region", "inline")):
            with row(transport), KVClient(daemon.address, transport=transport) as client, client.session() as session:
                assert session.transport == transport
                assert push_out(session, 10_000 * number) > 0


def push_out(session: Session, first: int) -> int:
    """Compute prompts again and again, and compare what they give. Returns how many of their tokens were cached."""
    prompts = [[first + 1000 * n + token for token in range(41)] for n in range(5)]
    contents = [fill(session, tokens) for tokens in prompts]
    num_cached = 0
    for round_ in range(6):
        for tokens, kv in zip(prompts, contents, strict=True):
            sequence = session.allocate(tokens)
            cached = sequence.num_cached_tokens
            num_cached += cached * (round_ > 0)
            step = session.open_step([sequence])
            query = np.ones((len(tokens) - cached, 4, 32), np.float32)
            for layer in range(session.info.num_layers):
                out = step.extend(layer, query, kv[0][layer, cached:], kv[1][layer, cached:])
                expected = reference_attention(query, kv[0][layer], kv[1][layer])
                np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
            session.free([sequence])
    return num_cached
