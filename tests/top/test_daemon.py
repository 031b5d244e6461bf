"""`kvservice top` with a real daemon and clients."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_pool import SMALL_POOL
from top_screen import text_of, top, until
from waiting import PATIENCE_S

from kvservice.client import KVClient
from kvservice.errors import OutOfBlocksError
from kvservice.launch import Daemon
from kvservice.top import Source
from kvservice.top.app import TopApp


def top_json(daemon: Daemon, *arguments: str) -> dict[str, Any]:
    done = top("--once", "--json", "--address", daemon.address, *arguments)
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def top_until(daemon: Daemon, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Poll until the condition holds. The observer reads once per second."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition(found := top_json(daemon)):
        assert time.monotonic() < deadline, found
    return found


def test_it_tells_what_the_daemon_holds() -> None:
    kv_of = np.ones((2, 8, 2, 32), np.float32)
    with Daemon(**SMALL_POOL) as daemon, KVClient(daemon.address) as client:
        with client.session("engine", tenant="acme") as kv, client.session("other") as other:
            parent = kv.allocate(range(8), sequence_id=1 << 60)
            kv.open_step([parent]).write(kv_of, kv_of)
            child = kv.fork(parent)
            away = other.allocate(range(100, 112))
            other.swap_out([away])
            with pytest.raises(OutOfBlocksError):
                other.allocate(range(500))

            found = top_until(daemon, lambda found: found["pool"]["swapped_sequences"] == 1)

            stats = client.stats()
            assert {name: found["pool"][name] for name in vars(stats) if name in found["pool"]} == {
                name: value for name, value in vars(stats).items() if name in found["pool"]
            }
            assert found["pool"]["shared_blocks"] == 2
            assert [(row["name"], row["tenant"], row["sequences"]) for row in found["sessions"]] == [
                ("engine", "acme", 2),
                ("other", "", 1),
            ]
            rows = {row["sequence_id"]: row for row in found["sequences"]}
            assert rows[1 << 60]["computed"] == 8
            assert rows[child.sequence_id]["blocks"] == 2
            assert [row["sequence_id"] for row in found["sequences"] if row["swapped"]] == [away.sequence_id]
            calls = {row["method"]: row for row in found["calls"]}
            assert (calls["allocate"]["calls"], calls["allocate"]["errors"]) == (3, 1)
            assert [row["name"] for row in top_json(daemon, "--filter", "acme")["sessions"]] == ["engine"]
        top_until(daemon, lambda found: found["sessions"] == [])


@pytest.mark.slow
def test_the_screen_outlives_the_daemon(tmp_path: Path) -> None:
    socket = tmp_path / "kvservice.sock"

    async def scene() -> None:
        with Daemon(unix_socket=socket, **SMALL_POOL) as daemon:
            async with Source(daemon.address) as source:
                app = TopApp(source, await source.first_snapshot(), 0.1, "blocks", "")
                async with app.run_test(size=(130, 60)):
                    await until(lambda: "64 blocks" in text_of(app))
                    await asyncio.to_thread(daemon.stop)
                    await until(lambda: "No answer" in text_of(app))
                    with Daemon(unix_socket=socket, **(SMALL_POOL | {"num_blocks": 77})):
                        await until(lambda: "77 blocks" in text_of(app))
                        assert "No answer" not in text_of(app)

    asyncio.run(scene())
