"""Transfer Engines that do as a test says, in a daemon without its server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from daemon_lives import Life
from manual_clock import ManualClock

from kvservice.server.memory.remote import PEER
from kvservice.transfer import Ticket, TransferProcess
from kvservice.v1 import transfer_pb2

HOST = "127.0.0.1"
MIB = 1 << 20


class FakeEngines:
    """What the processes of all engines do: `begin` before they start, and `wait` with the engine and a limit in
    seconds for each of the waits. `made` are the engines, in order, and `events` what was asked of them."""

    def __init__(self) -> None:
        self.begin: Callable[[], object] = lambda: None
        self.wait: Callable[[Any, float], object] = lambda *_: None
        self.made: list[Any] = []
        self.events: list[str] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engines = self

        def init(engine: Any, *_: object, **__: object) -> None:
            engines.begin()
            engine.is_alive, engine.num_started = True, 0
            engine.waiting, engine.interrupted = threading.Event(), threading.Event()
            engines.made.append(engine)

        def start(engine: Any, *_: object) -> Ticket:
            engines.events.append("start")
            engine.num_started += 1
            return Ticket(engine.num_started)

        def wait(engine: Any, _: Ticket, timeout_s: float) -> None:
            engines.events.append("wait")
            engine.waiting.set()
            engines.wait(engine, timeout_s)

        def kill(engine: Any) -> None:
            engine.is_alive = False

        monkeypatch.setattr(TransferProcess, "__init__", init)
        monkeypatch.setattr(TransferProcess, "start", start)
        monkeypatch.setattr(TransferProcess, "wait", wait)
        monkeypatch.setattr(TransferProcess, "interrupt", lambda engine: engine.interrupted.set())
        monkeypatch.setattr(TransferProcess, "kill", kill)
        monkeypatch.setattr(TransferProcess, "is_running", property(lambda engine: engine.is_alive))


@contextmanager
def life_with_engines(clock: ManualClock, peer: str = HOST, **options: Any) -> Iterator[Life]:
    """Yield a daemon whose calls come from this peer."""
    given: dict[str, Any] = {"transfer_address": HOST, "store_gib": 1 / 64} | options
    life = Life(clock=clock, **given)
    token = PEER.set(peer)
    try:
        yield life
    finally:
        PEER.reset(token)
        life.kill()


async def create(life: Life, session: Any, name: str = "r", byte_size: int = MIB) -> None:
    """Create a remote region, for a MiB of the client's memory."""
    request = transfer_pb2.CreateRemoteRegionRequest(
        name=name, byte_size=byte_size, remote_bytes=MIB, ports=[9], address=1 << 40
    )
    await life.call(session, "create_remote_region", request)
