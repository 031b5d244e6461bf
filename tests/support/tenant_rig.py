"""Tenants of daemons under test: their file, and calls as one of their callers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from daemon_lives import Life, caller

from kvservice.auth import add_token
from kvservice.server.tenants import DOOR, Door
from kvservice.v1 import blocks_pb2

FILE = """
[tenant.red]
engines = ["alice"]
[tenant.blue]
engines = ["bob", "dual"]
observers = ["dual", "grafana"]
admins = ["ops"]
[tenant.local]
unix_socket = "engine"
"""
NAMES = ("alice", "bob", "dual", "grafana", "ops", "carol")
TOKENS = list(range(1, 13))


def in_loop(scenario: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(scenario)
    def run(*args: Any, **fixtures: Any) -> None:
        asyncio.run(scenario(*args, **fixtures))

    return run


def written(folder: Path, text: str = FILE) -> Path:
    file = folder / "tenants.toml"
    file.write_text(text)
    return file


@contextlib.contextmanager
def calling(name: str = "", door: Door = Door.TCP) -> Iterator[None]:
    """Call as the owner of this token, or without a name over another door."""
    token = DOOR.set(door)
    try:
        with caller(name):
            yield
    finally:
        DOOR.reset(token)


def tenant_options(folder: Path) -> dict[str, Any]:
    """Return the options of a daemon with these tenants and tokens."""
    tokens = folder / "tokens"
    for name in NAMES:
        add_token(tokens, name)
    return {"tenants": str(written(folder)), "auth_tokens": str(tokens)}


def match(tokens: list[int], *extra: tuple[int, bytes]) -> blocks_pb2.MatchPrefixRequest:
    found = [blocks_pb2.ExtraKey(position=position, key=key) for position, key in extra]
    return blocks_pb2.MatchPrefixRequest(token_ids=tokens, extra_keys=found)


async def cached(life: Life, session: Any, *extra: tuple[int, bytes]) -> int:
    answer = await life.call(session, "match_prefix", match(TOKENS, *extra))
    return int(answer.num_cached_tokens)
