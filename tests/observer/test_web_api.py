"""The page's requests: limits, responses, errors; and its static files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_app import request, serving
from page_pool import FIRST_SEQUENCE, PagePool

import kvservice.observer.web as web
from kvservice.errors import InvalidArgumentError
from kvservice.observer.access import Refusals
from kvservice.observer.web import HttpOptions, make_app
from kvservice.server import codec
from kvservice.telemetry.link import MAX_SEARCH_LENGTH
from kvservice.v1 import inspect_pb2

POOL = PagePool(5000, 64, 4)
VIEWS = POOL.views


async def metrics() -> tuple[bytes, str]:
    return b"", "text/plain"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(make_app(VIEWS, HttpOptions(loopback=True), metrics, Refusals())) as running:
        yield running


def ask(port: int, path: str) -> Any:
    answer = request(port, path)
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "application/json"
    return json.loads(answer.body)


@pytest.mark.parametrize(
    ("query", "tier", "start", "count"),
    [
        ("", "device", 0, 4096),
        ("?start=4990&count=10", "device", 4990, 10),
        ("?start=4990&count=4096", "device", 4990, 10),
        ("?tier=swap&start=3&count=1", "swap", 3, 1),
        ("?tier=device&count=4096", "device", 0, 4096),
    ],
)
def test_blocks(port: int, query: str, tier: str, start: int, count: int) -> None:
    answer = ask(port, f"/api/blocks{query}")
    assert answer == VIEWS.blocks(tier, start, count)
    assert len(answer["states"]) == len(answer["ref_counts"]) == count


def test_one_block_names_its_sequences_by_text(port: int) -> None:
    table = POOL.block_table(FIRST_SEQUENCE)
    answer = ask(port, f"/api/block?tier=device&id={table[3]}")
    assert answer["block_id"] == table[3]
    assert {"session_id": "1", "session_name": "chat-eu", "sequence_id": str(FIRST_SEQUENCE), "position": 3} in answer[
        "sequences"
    ]


def test_a_sequence(port: int) -> None:
    answer = ask(port, f"/api/sequence?session_id=1&sequence_id={FIRST_SEQUENCE}")
    expected = VIEWS.sequence(1, FIRST_SEQUENCE)
    assert answer == expected | {"session_id": "1", "sequence_id": str(FIRST_SEQUENCE)}


def test_search(port: int) -> None:
    everything = ask(port, "/api/search")["snapshot"]
    found = ask(port, "/api/search?q=batch")["snapshot"]
    assert {row["session_name"] for row in found["sequences"]} == {"batch"}
    assert [row["name"] for row in found["sessions"]] == ["batch"]
    assert len(everything["sequences"]) == 5
    one = ask(port, f"/api/search?q={FIRST_SEQUENCE + 1}")["snapshot"]
    assert [row["sequence_id"] for row in one["sequences"]] == [str(FIRST_SEQUENCE + 1)]


def test_searches_have_one_limit(port: int) -> None:
    longest = "x" * MAX_SEARCH_LENGTH
    assert ask(port, f"/api/search?q={longest}")["snapshot"]["sequences"] == []
    codec.check_snapshot_request(inspect_pb2.GetSnapshotRequest(search=longest))
    with pytest.raises(InvalidArgumentError, match=f"search: has more than {MAX_SEARCH_LENGTH}"):
        codec.check_snapshot_request(inspect_pb2.GetSnapshotRequest(search=f"{longest}x"))
    assert f'maxlength="{MAX_SEARCH_LENGTH}"' in (web.STATIC / "index.html").read_text()


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/api/blocks?tier=host", "tier"),
        ("/api/blocks?count=0", "count"),
        ("/api/blocks?count=4097", "count"),
        ("/api/blocks?count=", "count"),
        ("/api/blocks?start=-1", "start"),
        ("/api/blocks?start=1.0", "start"),
        ("/api/blocks?start=1_0", "start"),
        ("/api/blocks?start=%201", "start"),
        ("/api/blocks?start=%D9%A3", "start"),
        ("/api/blocks?start=5000", "start"),
        ("/api/block", "id"),
        ("/api/block?id=5000", "id"),
        ("/api/block?id=9223372036854775808", "id"),
        (f"/api/block?id={'9' * 5000}", "id"),
        ("/api/sequence?session_id=1", "sequence_id"),
        ("/api/sequence?sequence_id=1", "session_id"),
        (f"/api/search?q={'x' * (MAX_SEARCH_LENGTH + 1)}", "q"),
    ],
)
def test_bad_arguments_are_named(port: int, path: str, field: str) -> None:
    answer = request(port, path)
    assert answer.status == 400
    assert json.loads(answer.body)["error"].startswith(f"{field}: ")


@pytest.mark.parametrize("path", ["/api/sequence?session_id=1&sequence_id=5", "/nothing", "/api/", "/static/none.js"])
def test_what_is_not_there(port: int, path: str) -> None:
    answer = request(port, path)
    assert answer.status == 404
    assert set(json.loads(answer.body)) == {"error"}


@pytest.mark.parametrize("path", ["/static/../web.py", "/static/%2e%2e/web.py", "/static/..%2fweb.py", "/static/"])
def test_no_other_file_is_served(port: int, path: str) -> None:
    assert request(port, path).status == 404


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
    sources = [path for path in web.STATIC.iterdir() if path.is_file()]
    assert {path.suffix for path in sources} == {".html", ".js", ".css", ".svg"}
    for path in sources:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.[a-z]|@import|url\(", text), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), path.name
        assert not re.search(r"<style|<script(?![^>]*src=)|\son\w+=\"|style=\"", text), path.name


def test_every_module_is_used() -> None:
    modules = {path.name for path in web.STATIC.glob("*.js")}
    imported = {
        name for path in web.STATIC.glob("*.js") for name in re.findall(r'from "\./(\w+\.js)"', path.read_text())
    }
    assert imported | {"main.js"} == modules
