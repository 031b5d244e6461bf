"""Access to the page: the token, its cookie, the Host header, and the headers of every response."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from each_row import each_row
from http_app import Answer, request, serving
from page_pool import PagePool
from starlette.datastructures import URL
from starlette.requests import HTTPConnection

from kvservice.observer.views import Views
from kvservice.observer.web_api import HttpOptions, Refusals, make_app

METRICS_TOKEN = "of-prometheus-0123"
REFUSALS = Refusals()
TOKEN = "a;quite, \"odd'=token".replace(" ", "_")
GUARDED = ["/", "/static/main.js", "/api/blocks", "/api/search", "/api/stream", "/nothing"]


async def metrics() -> tuple[bytes, str]:
    return b"kvservice_tokens 7\n", "text/plain; version=1.0.0"


@pytest.fixture(scope="module")
def views() -> Views:
    return PagePool(64, 16, 4).views


@contextmanager
def page(views: Views, *, loopback: bool = True, token: str = "", metrics_token: str = "") -> Iterator[int]:
    with serving(make_app(views, HttpOptions(loopback, token, metrics_token), metrics, REFUSALS)) as port:
        yield port


@pytest.fixture(scope="module")
def with_metrics_token(views: Views) -> Iterator[int]:
    with page(views, loopback=False, token=TOKEN, metrics_token=METRICS_TOKEN) as port:
        yield port


@pytest.fixture(scope="module")
def on_loopback(views: Views) -> Iterator[int]:
    with page(views) as port:
        yield port


@pytest.fixture(scope="module")
def with_token(views: Views) -> Iterator[int]:
    with page(views, loopback=False, token=TOKEN) as port:
        yield port


def cookie_of(port: int) -> str:
    quoted = TOKEN.replace(";", "%3B").replace("=", "%3D").replace('"', "%22")
    return request(port, f"/?token={quoted}").headers["set-cookie"].split(";")[0]


def test_this_machine_needs_no_token(on_loopback: int) -> None:
    with each_row() as row:
        for host in ("localhost", "localhost:9464", "LOCALHOST", "127.0.0.1", "127.0.0.1:80", "[::1]:9464"):
            with row(host):
                assert request(on_loopback, "/api/blocks", Host=host).status == 200


def test_a_name_that_was_pointed_here_is_refused(on_loopback: int) -> None:
    hosts = (
        "",
        "evil.example",
        "localhost.evil.example",
        "evil.example:9464",
        "127.0.0.1.evil.example",
        "127.0.0.1:9464.evil",
    )
    with each_row() as row:
        for path, host in itertools.product(GUARDED, hosts):
            with row(f"{path} of {host}"):
                before = REFUSALS.counts["page"]
                answer = request(on_loopback, path, Host=host)
                assert answer.status == 403
                assert REFUSALS.counts["page"] == before + 1
                assert b"Host" in answer.body


def test_off_loopback_nothing_is_shown_without_a_token(views: Views) -> None:
    with page(views, loopback=False) as port, each_row() as row:
        for path in GUARDED:
            with row(path):
                answer = request(port, path)
                assert answer.status == 403
                assert b"http_token" in answer.body


def test_the_host_header_does_not_say_what_the_path_is(views: Views, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of Starlette build `url` from the Host header. This is what they make of it."""
    url = URL("https://x/metrics?/api/search")
    monkeypatch.setattr(HTTPConnection, "url", property(lambda _: url))
    before = REFUSALS.counts.copy()
    with each_row() as row:
        for loopback, token, status in ((False, "", 403), (True, "", 403), (False, TOKEN, 401), (True, TOKEN, 401)):
            with row((loopback, token)), page(views, loopback=loopback, token=token) as port:
                for path in GUARDED:
                    assert request(port, path, Host="x/metrics?").status == status, path
                assert request(port, "/metrics", Host="x/metrics?").status == 200
    assert REFUSALS.counts == {"metrics": before["metrics"], "page": before["page"] + 4 * len(GUARDED)}


def test_the_host_header_does_not_say_where_the_token_is(with_token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = TOKEN.replace(";", "%3B").replace('"', "%22").replace("=", "%3D")
    monkeypatch.setattr(HTTPConnection, "url", property(lambda _: URL("https://x/")))
    assert request(with_token, f"/api/blocks?token={right}", Host="x/?").status == 401
    assert "secure" not in request(with_token, f"/?token={right}").headers["set-cookie"].lower(), "it came unencrypted"


def test_metrics_are_open(views: Views) -> None:
    with each_row() as row:
        for loopback, token in itertools.product((True, False), ("", TOKEN)):
            with row((loopback, token)), page(views, loopback=loopback, token=token) as port:
                answer = request(port, "/metrics", Host="prometheus.example")
                assert (answer.status, answer.body) == (200, b"kvservice_tokens 7\n")
                assert answer.headers["content-type"] == "text/plain; version=1.0.0"


def test_metrics_with_a_token_of_their_own(with_metrics_token: int) -> None:
    with each_row() as row:
        for authorization in ("", f"Bearer {TOKEN}", f"Bearer {METRICS_TOKEN[:-1]}", METRICS_TOKEN):
            with row(authorization):
                before = REFUSALS.counts.copy()
                answer = request(with_metrics_token, "/metrics", Authorization=authorization)
                assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert REFUSALS.counts == {"metrics": before["metrics"] + 1, "page": before["page"]}
    before = REFUSALS.counts.copy()
    answer = request(with_metrics_token, "/metrics", Authorization=f"Bearer {METRICS_TOKEN}", Host="a.example")
    assert (answer.status, answer.body) == (200, b"kvservice_tokens 7\n")
    assert request(with_metrics_token, "/", Authorization=f"Bearer {METRICS_TOKEN}").status == 401
    assert REFUSALS.counts == {"metrics": before["metrics"], "page": before["page"] + 1}


def test_no_or_another_token_is_refused(with_token: int) -> None:
    wrong = (
        "",
        "Bearer",
        "Bearer ",
        f"Basic {TOKEN}",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        TOKEN,
        "Bearer \xe9\xff",
    )
    with each_row() as row:
        for path, authorization in itertools.product(GUARDED, wrong):
            with row(f"{path} with {authorization!r}"):
                answer = request(with_token, path, Authorization=authorization)
                assert answer.status == 401
                assert answer.headers["www-authenticate"] == "Bearer"


def test_the_token_opens_everything(with_token: int) -> None:
    for scheme, path in itertools.product(("Bearer", "bearer"), ("/", "/static/main.js", "/api/blocks")):
        answer = request(with_token, path, Authorization=f"{scheme} {TOKEN}", Host="any.example")
        assert answer.status == 200, (scheme, path)


def test_a_token_is_asked_for_on_loopback_too(views: Views) -> None:
    with page(views, token=TOKEN) as port:
        assert request(port, "/").status == 401


def test_the_address_with_the_token_leaves_a_cookie(with_token: int) -> None:
    answer = request(with_token, "/?token=" + "".join(f"%{ord(character):02x}" for character in TOKEN))
    assert (answer.status, answer.headers["location"]) == (303, "/")
    value, *attributes = answer.headers["set-cookie"].split("; ")
    assert {"httponly", "samesite=strict", "path=/"} <= {attribute.lower() for attribute in attributes}
    assert TOKEN not in str(answer)
    for path in ("/", "/static/main.js", "/api/blocks"):
        assert request(with_token, path, Cookie=value).status == 200


def test_a_cookie_is_one_daemons(views: Views, with_token: int) -> None:
    name, _, value = cookie_of(with_token).partition("=")
    assert name == f"kvservice_{with_token}"
    assert request(with_token, "/", Cookie=f"{name}={value}x").status == 401
    assert request(with_token, "/", Cookie=f"kvservice_1={value}").status == 401
    with page(views, token=TOKEN + "other") as other:
        assert request(other, "/", Cookie=f"kvservice_{other}={value}").status == 401


def test_a_wrong_token_in_the_address_is_refused(with_token: int) -> None:
    right = TOKEN.replace(";", "%3B").replace('"', "%22")
    for path in ("/?token=wrong", "/?token=%C3%A9", f"/api/blocks?token={right}"):
        answer = request(with_token, path)
        assert answer.status == 401, path
        assert "set-cookie" not in answer.headers
    assert request(with_token, "/?token=wrong", Cookie=cookie_of(with_token)).status == 401


def test_nothing_but_get(on_loopback: int) -> None:
    methods = ("HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
    with each_row() as row:
        for path, method in itertools.product(("/metrics", *GUARDED), methods):
            with row(f"{method} {path}"):
                answer = request(on_loopback, path, method)
                assert (answer.status, answer.headers["allow"]) == (405, "GET")


def test_every_answer_carries_the_policy(on_loopback: int) -> None:
    """check_headers fails if a header is missing."""
    with each_row() as row:
        for path in ("/", "/metrics", "/static/main.js", "/api/blocks", "/api/block?id=x", "/nothing"):
            with row(path):
                check_headers(request(on_loopback, path))


def test_refusals_carry_the_policy(on_loopback: int, with_token: int) -> None:
    for answer in (request(with_token, "/"), request(on_loopback, "/", "POST"), request(on_loopback, "/", Host="x")):
        check_headers(answer)
        assert answer.headers["cache-control"] == "no-store"


def check_headers(answer: Answer) -> None:
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert set(policy.values()) == {"'none'", "'self'"}
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert re.fullmatch("no-(store|cache)", answer.headers["cache-control"])
    assert "access-control-allow-origin" not in answer.headers
