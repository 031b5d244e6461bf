"""The page's requests: limits, responses, errors; and its static files."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from each_row import each_row
from http_app import request, serving
from page_pool import FIRST_SEQUENCE, PagePool

import kvservice
from kvservice.errors import InvalidArgumentError
from kvservice.launch import Daemon
from kvservice.observer.web_api import HttpOptions, Refusals, make_app
from kvservice.telemetry import MAX_SEARCH_LENGTH
from kvservice.top import Source

STATIC = Path(kvservice.__file__).parent / "observer" / "static"


@pytest.fixture(scope="module")
def pool() -> PagePool:
    return PagePool(5000, 64, 4)


async def metrics() -> tuple[bytes, str]:
    return b"", "text/plain"


@pytest.fixture(scope="module")
def port(pool: PagePool) -> Iterator[int]:
    with serving(make_app(pool.views, HttpOptions(loopback=True), metrics, Refusals())) as running:
        yield running


def ask(port: int, path: str) -> Any:
    answer = request(port, path)
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "application/json"
    return json.loads(answer.body)


def test_blocks(pool: PagePool, port: int) -> None:
    queries = {
        "": ("device", 0, 4096),
        "?start=4990&count=10": ("device", 4990, 10),
        "?start=4990&count=4096": ("device", 4990, 10),
        "?tier=swap&start=3&count=1": ("swap", 3, 1),
        "?tier=device&count=4096": ("device", 0, 4096),
    }
    with each_row() as row:
        for query, (tier, start, count) in queries.items():
            with row(query):
                answer = ask(port, f"/api/blocks{query}")
                assert answer == pool.views.blocks(tier, start, count)
                assert len(answer["states"]) == len(answer["ref_counts"]) == count


def test_one_block_names_its_sequences_by_text(pool: PagePool, port: int) -> None:
    table = pool.block_table(FIRST_SEQUENCE)
    answer = ask(port, f"/api/block?tier=device&id={table[3]}")
    assert answer["block_id"] == table[3]
    assert {"session_id": "1", "session_name": "chat-eu", "sequence_id": str(FIRST_SEQUENCE), "position": 3} in answer[
        "sequences"
    ]


def test_a_sequence(pool: PagePool, port: int) -> None:
    answer = ask(port, f"/api/sequence?session_id=1&sequence_id={FIRST_SEQUENCE}")
    expected = pool.views.sequence(1, FIRST_SEQUENCE)
    assert answer == expected | {"session_id": "1", "sequence_id": str(FIRST_SEQUENCE)}


def test_search(port: int) -> None:
    everything = ask(port, "/api/search")["snapshot"]
    found = ask(port, "/api/search?q=batch")["snapshot"]
    assert {row["session_name"] for row in found["sequences"]} == {"batch"}
    assert [row["name"] for row in found["sessions"]] == ["batch"]
    assert len(everything["sequences"]) == 5
    one = ask(port, f"/api/search?q={FIRST_SEQUENCE + 1}")["snapshot"]
    assert [row["sequence_id"] for row in one["sequences"]] == [str(FIRST_SEQUENCE + 1)]


def test_searches_have_one_limit(port: int, daemon: Daemon) -> None:
    longest = "x" * MAX_SEARCH_LENGTH
    assert ask(port, f"/api/search?q={longest}")["snapshot"]["sequences"] == []
    assert f'maxlength="{MAX_SEARCH_LENGTH}"' in (STATIC / "index.html").read_text()

    async def search_at_a_daemon() -> None:
        async with Source(daemon.address) as source:
            assert len((await source.first_snapshot(longest)).sequences) == 0
            with pytest.raises(InvalidArgumentError, match=f"search: has more than {MAX_SEARCH_LENGTH}"):
                await source.snapshot(f"{longest}x")

    asyncio.run(search_at_a_daemon())


def test_bad_arguments_are_named(port: int) -> None:
    paths = {
        "/api/blocks?tier=host": "tier",
        "/api/blocks?count=0": "count",
        "/api/blocks?count=4097": "count",
        "/api/blocks?count=": "count",
        "/api/blocks?start=-1": "start",
        "/api/blocks?start=1.0": "start",
        "/api/blocks?start=1_0": "start",
        "/api/blocks?start=%201": "start",
        "/api/blocks?start=%D9%A3": "start",
        "/api/blocks?start=5000": "start",
        "/api/block": "id",
        "/api/block?id=5000": "id",
        "/api/block?id=9223372036854775808": "id",
        f"/api/block?id={'9' * 5000}": "id",
        "/api/sequence?session_id=1": "sequence_id",
        "/api/sequence?sequence_id=1": "session_id",
        f"/api/search?q={'x' * (MAX_SEARCH_LENGTH + 1)}": "q",
    }
    with each_row() as row:
        for path, field in paths.items():
            with row(path[:60]):
                answer = request(port, path)
                assert answer.status == 400
                assert json.loads(answer.body)["error"].startswith(f"{field}: ")


def test_what_is_not_there(port: int) -> None:
    for path in ("/api/sequence?session_id=1&sequence_id=5", "/nothing", "/api/", "/static/none.js"):
        answer = request(port, path)
        assert answer.status == 404, path
        assert set(json.loads(answer.body)) == {"error"}
    for path in ("/static/../web.py", "/static/%2e%2e/web.py", "/static/..%2fweb.py", "/static/"):
        assert request(port, path).status == 404, path


def test_the_page_and_its_files(port: int) -> None:
    page = request(port, "/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["cache-control"] == "no-store"
    files = re.findall(rb'(?:href|src)="(/static/[^"]+)"', page.body)
    assert len(files) == 5
    types = {".js": "javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    for file in map(bytes.decode, files):
        answer = request(port, file)
        assert types[Path(file).suffix] in answer.headers["content-type"]
        assert answer.headers["cache-control"] == "no-cache"
        assert request(port, file, If_None_Match=answer.headers["etag"]).status == 304


def test_the_files_name_no_other_address_and_put_no_markup_together() -> None:
    sources = [path for path in STATIC.iterdir() if path.is_file()]
    assert {path.suffix for path in sources} == {".html", ".js", ".css", ".svg"}
    for path in sources:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.[a-z]|@import|url\(", text), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), path.name
        assert not re.search(r"<style|<script(?![^>]*src=)|\son\w+=\"|style=\"", text), path.name


def test_every_module_is_used() -> None:
    modules = {path.name for path in STATIC.glob("*.js")}
    imported = {name for path in STATIC.glob("*.js") for name in re.findall(r'from "\./(\w+\.js)"', path.read_text())}
    assert imported | {"main.js"} == modules
