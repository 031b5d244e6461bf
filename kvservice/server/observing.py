"""The daemon's side of the observer, a child process that reads the daemon's bookkeeping from shared memory.

The event loop answers only two requests of the observer: it writes the gauges of the whole daemon, and it returns the
hash of a block that a user has selected. The observer reads everything else from read-only shared memory and does the
computation in its own process; see kvservice.observer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable

from kvservice import plain_json
from kvservice.errors import ObserverUnavailableError
from kvservice.kept.report import RestartReport
from kvservice.telemetry.arrays import SharedArrays
from kvservice.telemetry.link import BLOCK_HASH, CONFIGURE, SNAPSHOT, WRITE_STATS, Asker, answer_all, open_link

logger = logging.getLogger(__name__)

RESTART_S = 1.0
# How long a client's call waits for the observer. `kvservice top` waits for longer, so that it gets the error. Until
# the first observer has started, calls wait for its start too.
ANSWER_S, FIRST_ANSWER_S = 4.0, 10.0
# The observer makes a request every second. It is replaced when it has made none for SILENT_S, or has not started
# within STARTING_S.
SILENT_S, STARTING_S = 20, 120
_REPLACED = f"if it makes no request for {SILENT_S} s, another is started"


class Observing:
    """Starts the observer on first use, exchanges requests with it, and restarts it when it exits or hangs."""

    def __init__(
        self,
        arrays: SharedArrays,
        configuration: dict[str, object],
        write_stats: Callable[[], None],
        block_hash: Callable[[int], bytes],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`configuration` is sent to the observer. `block_hash` maps a block id to the hash of the block, and must
        accept any number."""
        self._arrays = arrays
        self._configuration = configuration
        self._write_stats = write_stats
        self._block_hash = block_hash
        self._sleep = sleep
        self._answer_s = FIRST_ANSWER_S
        self._silent_s = 0
        self._hangs = False
        self._wanted = asyncio.Event()
        self._ready = asyncio.Event()
        self._asker: Asker | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._http: socket.socket | None = None

    def report_restart(self, report: RestartReport) -> None:
        """Tell the observer what the daemon took over at its start. Called before `run`."""
        self._configuration["restart"] = report.to_json()

    def serve_http(self, listening: socket.socket) -> None:
        """Let the observer serve HTTP on this socket."""
        self._http = listening
        self._wanted.set()

    async def snapshot(self, request: bytes) -> bytes:
        """Return the observer's response to a serialized GetSnapshotRequest. Raises ObserverUnavailableError."""
        self._wanted.set()
        try:
            async with asyncio.timeout(self._answer_s):
                await self._ready.wait()
                assert self._asker is not None, "it is ready"
                return await self._asker.ask(SNAPSHOT + request)
        except ConnectionError:
            raise ObserverUnavailableError("the observer has ended; another is started") from None
        except TimeoutError:
            raise self._no_answer() from None

    def _no_answer(self) -> ObserverUnavailableError:
        """Log that the observer hangs, once for each observer. Returns the error for the client."""
        if not self._ready.is_set():
            return ObserverUnavailableError("the observer, which computes the answer, is starting; ask again")
        if not self._hangs:
            self._hangs = True
            logger.warning("the observer does not answer for %g s; %s", self._answer_s, _REPLACED)
        return ObserverUnavailableError(f"the observer, which computes the answer, does not answer; {_REPLACED}")

    async def run(self) -> None:
        """Run the observer until cancelled."""
        await self._wanted.wait()
        while True:
            try:
                logger.warning("the observer %s; another is started", await self._run_once())
            except OSError as error:
                logger.warning("the observer cannot be started: %s", error)
            finally:
                self._ready.clear()
                self._end()
            await self._sleep(RESTART_S)

    async def _run_once(self) -> str:
        """Run one observer. Returns why another is needed."""
        ours_asking, theirs_answering = socket.socketpair()
        ours_answering, theirs_asking = socket.socketpair()
        with theirs_asking, theirs_answering:
            self._process = self.start_process(theirs_asking, theirs_answering)
        self._asker = Asker(*await open_link(ours_asking))
        exchange = asyncio.ensure_future(self._exchange(self._asker, *await open_link(ours_answering)))
        silence = asyncio.ensure_future(self._silence())
        try:
            await asyncio.wait((exchange, silence), return_when=asyncio.FIRST_COMPLETED)
            if not exchange.done():
                return f"has made no request for {self._silent_s} s and is killed"
            exchange.result()
            return "has ended"
        finally:
            exchange.cancel()
            silence.cancel()
            self._asker.close()

    async def _exchange(self, asker: Asker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Configure the observer, and answer its requests until it ends."""
        answering = asyncio.ensure_future(answer_all(reader, writer, self._answer))
        try:
            await asker.ask(CONFIGURE + plain_json.dumps(self._configuration).encode())
            self._ready.set()
            self._answer_s = ANSWER_S
            await answering
        except ConnectionError:
            pass
        finally:
            answering.cancel()

    async def _silence(self) -> None:
        """Return when the observer hangs. The seconds are counted one by one, because those in which the daemon itself
        was stopped do not count."""
        self._silent_s, self._hangs = 0, False
        while self._silent_s < (SILENT_S if self._ready.is_set() else STARTING_S):
            await self._sleep(1.0)
            self._silent_s += 1

    def start_process(self, asking: socket.socket, answering: socket.socket) -> subprocess.Popen[bytes]:
        """Start the observer with its ends of the two links. Raises OSError."""
        memory = self._arrays.read_only()
        descriptors = [memory, asking.fileno(), answering.fileno()]
        if self._http is not None:
            descriptors.append(self._http.fileno())
        try:
            # The observer runs in its own process session, so that signals of the daemon's terminal do not reach it. It
            # exits when the daemon does.
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "kvservice.observer", *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(memory)

    async def _answer(self, question: bytes) -> bytes:
        self._silent_s = 0
        if question[:1] == WRITE_STATS:
            self._write_stats()
            return b""
        assert question[:1] == BLOCK_HASH, "the observer asks nothing else"
        return self._block_hash(int.from_bytes(question[1:], "little"))

    def _end(self) -> None:
        """Kill the observer if it still runs. It has no state to lose."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
