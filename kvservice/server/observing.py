"""The daemon's side of the observer, a child process that reads the daemon's bookkeeping from shared memory.

The event loop answers only two requests of the observer: it writes the gauges of the whole daemon, and it returns the
hash of a block that a user has selected. The observer reads everything else from read-only shared memory and does the
computation in its own process; see kvservice.observer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable

from kvservice.errors import ObserverUnavailableError
from kvservice.telemetry.arrays import SharedArrays
from kvservice.telemetry.link import BLOCK_HASH, CONFIGURE, SNAPSHOT, WRITE_STATS, Asker, answer_all, open_link

logger = logging.getLogger(__name__)

RESTART_S = 1.0
# How long a client's call waits for the observer. The first call also waits until the observer has started.
ANSWER_S = 10.0


class Observing:
    """Starts the observer on first use, exchanges requests with it, and restarts it when it exits."""

    def __init__(
        self,
        arrays: SharedArrays,
        configuration: dict[str, object],
        write_stats: Callable[[], None],
        block_hash: Callable[[int], bytes],
    ) -> None:
        """`configuration` is sent to the observer. `block_hash` maps a block id to the hash of the block, and must
        accept any number."""
        self._arrays = arrays
        self._configuration = configuration
        self._write_stats = write_stats
        self._block_hash = block_hash
        self._wanted = asyncio.Event()
        self._ready = asyncio.Event()
        self._asker: Asker | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._http: socket.socket | None = None

    def serve_http(self, listening: socket.socket) -> None:
        """Let the observer serve HTTP on this socket."""
        self._http = listening
        self._wanted.set()

    async def snapshot(self, request: bytes) -> bytes:
        """Return the observer's response to a serialized GetSnapshotRequest. Raises ObserverUnavailableError."""
        self._wanted.set()
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._ready.wait()
                assert self._asker is not None, "it is ready"
                return await self._asker.ask(SNAPSHOT + request)
        except (TimeoutError, ConnectionError):
            raise ObserverUnavailableError("the observer does not answer yet; ask again") from None

    async def run(self) -> None:
        """Run the observer until cancelled."""
        await self._wanted.wait()
        while True:
            try:
                await self._run_once()
                logger.warning("the observer has ended; another is started")
            except OSError as error:
                logger.warning("the observer cannot be started: %s", error)
            finally:
                self._ready.clear()
                self._end()
            await asyncio.sleep(RESTART_S)

    async def _run_once(self) -> None:
        ours_asking, theirs_answering = socket.socketpair()
        ours_answering, theirs_asking = socket.socketpair()
        with theirs_asking, theirs_answering:
            self._process = self._start(theirs_asking, theirs_answering)
        self._asker = Asker(*await open_link(ours_asking))
        answering = asyncio.ensure_future(answer_all(*await open_link(ours_answering), self._answer))
        try:
            await self._asker.ask(CONFIGURE + json.dumps(self._configuration).encode())
            self._ready.set()
            await answering
        except ConnectionError:
            pass
        finally:
            answering.cancel()
            self._asker.close()

    def _start(self, asking: socket.socket, answering: socket.socket) -> subprocess.Popen[bytes]:
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
