"""The page of a real daemon with a client: it shows the client's sequences and figures."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest
from chromium import OpenPage
from page_pool import page_info
from small_pool import SMALL_POOL

from kvservice import __version__
from kvservice.client import KVClient, Sequence, Session
from kvservice.config import ServeConfig
from kvservice.launch import Daemon

SHAPE = (SMALL_POOL["num_layers"], -1, SMALL_POOL["num_kv_heads"], SMALL_POOL["head_size"])
STATES = ("free", "active", "shared", "cached", "pinned")
# Digits that occur in no other figure.
PROMPT = [1_987_654_000 + index for index in range(22)]


@pytest.fixture
def running(free_port: int) -> Iterator[tuple[Daemon, int]]:
    with Daemon(http_address=f"127.0.0.1:{free_port}", **SMALL_POOL) as daemon:
        yield daemon, free_port


def compute(kv: Session, token_ids: list[int]) -> Sequence:
    sequence = kv.allocate(token_ids)
    step = kv.open_step([sequence])
    tensor = np.ones((SHAPE[0], step.num_tokens, *SHAPE[2:]), np.float32)
    step.write(tensor, tensor)
    return sequence


@pytest.mark.slow
def test_it_shows_what_the_client_knows(running: tuple[Daemon, int], open_page: OpenPage) -> None:
    daemon, port = running
    with KVClient(daemon.address) as client, client.session("writer", tenant="acme") as kv:
        first, second = compute(kv, PROMPT), compute(kv, [*PROMPT[:12], 1, 2, 3])
        kv.free([compute(kv, list(range(100, 116)))])
        swapped = compute(kv, list(range(200, 209)))
        kv.swap_out([swapped])
        kv.pin(list(range(100, 104)), ttl_s=600)
        known = {info.sequence_id: info for info in kv.describe(block_ids=True)}
        stats = client.stats()

        page = open_page(port)
        page.wait("document.querySelectorAll('#sequences tbody tr').length === 3")
        counts = [getattr(stats, f"{state}_blocks") for state in STATES]
        page.wait(
            f"[...document.querySelectorAll('#pool > .legend .number')].map((at) => at.innerText).join() === "
            f"'{','.join(map(str, counts))}'"
        )
        assert min(counts) > 0
        for sequence in (first, second, swapped):
            page.click(f"#sequences button[aria-label='Sequence {sequence.sequence_id}']")
            page.wait_for_text("#detail-title", f"Sequence {sequence.sequence_id}")
            page.wait("document.querySelector('#detail .ids')?.innerText")
            ids = [int(number) for number in re.findall(r"\d+", page.text("#detail .ids"))]
            table = known[sequence.sequence_id].block_ids
            assert {ids[0], ids[-1]} == {table[0], table[-1]}
            tier = "#pool .swap .cells" if sequence is swapped else "#pool > .cells"
            shown = {block for block, (*_, opacity) in enumerate(page.pixels(tier)) if opacity == 255}
            assert shown == set(table)


@pytest.mark.slow
def test_a_shared_block_names_those_that_share_it(running: tuple[Daemon, int], open_page: OpenPage) -> None:
    daemon, port = running
    with KVClient(daemon.address) as client, client.session("one") as kv, client.session("two") as other:
        first, second = compute(kv, PROMPT), compute(other, PROMPT)
        [info] = kv.describe([first], block_ids=True)
        page = open_page(port, f"#block/device/{info.block_ids[1]}")
        page.wait_for_text("#chosen", "shared")
        assert page.texts("#detail tbody td:nth-child(2)") == ["one", "two"]
        ids = page.texts("#detail tbody button")
        assert ids == [str(first.sequence_id), str(second.sequence_id)]
        assert re.fullmatch("[0-9a-f]{64}", page.texts("#detail dd")[-1])
        other.free([second])
        page.wait_for_text("#chosen", "active")


def test_tokens_appear_nowhere(running: tuple[Daemon, int]) -> None:
    daemon, port = running
    with KVClient(daemon.address) as client, client.session("one") as kv:
        sequence = compute(kv, PROMPT)
        [info] = kv.describe([sequence], block_ids=True)
        paths = [
            "metrics",
            "api/search",
            "api/blocks",
            f"api/block?id={info.block_ids[0]}",
            f"api/sequence?session_id={session_id(port)}&sequence_id={sequence.sequence_id}",
        ]
        for path in paths:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as answer:
                assert b"1987654" not in answer.read(), path


def test_the_page_is_told_about_the_daemon(running: tuple[Daemon, int]) -> None:
    """The pages of other tests are told the same, with other values."""
    _, port = running
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/stream", timeout=20) as stream:
        hello = next(line for line in stream if line.startswith(b"data: "))
    info = json.loads(hello.removeprefix(b"data: "))["info"]
    assert {name: type(value) for name, value in info.items()} == {
        name: type(value) for name, value in page_info(64, 32).items()
    }
    assert (info["version"], info["device"], info["kv_cache_dtype"]) == (__version__, "cpu", SMALL_POOL["dtype"])
    shape = ("num_layers", "num_kv_heads", "head_size", "dtype", "block_size", "num_blocks", "max_sequences")
    assert {name: info[name] for name in shape} == {name: SMALL_POOL[name] for name in shape}
    assert (info["num_swap_blocks"], info["block_bytes"], info["prefix_caching"]) == (32, 4096, True)
    assert info["max_sessions"] == ServeConfig().max_sessions


def session_id(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/search", timeout=10) as answer:
        return str(json.load(answer)["snapshot"]["sessions"][0]["session_id"])
