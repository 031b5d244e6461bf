"""The observer as the daemon sees it: a process that it starts, and that reads the daemon's memory.

Looking at the daemon costs its event loop two things only: figures of the whole, written when the observer asks for
them, and the hash of a block that somebody clicked at. All else the observer finds in memory that is shared read-only,
and computes there: see kvservice.observer.
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
from kvservice.telemetry.link import BLOCK_HASH, CONFIGURE, SNAPSHOT, WRITE_VITALS, Asker, answer_all, open_link

logger = logging.getLogger(__name__)

RESTART_S = 1.0
# How long a client's call waits for the observer: it may be the first that wants it to be started.
ANSWER_S = 10.0


class Observing:
    """Starts the observer when it is wanted, answers it, asks it, and starts it again when it ends."""

    def __init__(
        self,
        arrays: SharedArrays,
        configuration: dict[str, object],
        write_vitals: Callable[[], None],
        block_hash: Callable[[int], bytes],
    ) -> None:
        """`configuration` is what the observer is to know of the daemon; `block_hash` is asked for any number."""
        self._arrays = arrays
        self._configuration = configuration
        self._write_vitals = write_vitals
        self._block_hash = block_hash
        self._wanted = asyncio.Event()
        self._ready = asyncio.Event()
        self._asker: Asker | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._http: socket.socket | None = None

    def serve_http(self, listening: socket.socket) -> None:
        """Have it answer HTTP on this socket."""
        self._http = listening
        self._wanted.set()

    async def snapshot(self, request: bytes) -> bytes:
        """The observer's answer to a GetSnapshotRequest. Raises ObserverUnavailableError."""
        self._wanted.set()
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._ready.wait()
                assert self._asker is not None, "it is ready"
                return await self._asker.ask(SNAPSHOT + request)
        except (TimeoutError, ConnectionError):
            raise ObserverUnavailableError("the observer does not answer yet; ask again") from None

    async def run(self) -> None:
        """Until cancelled."""
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
            # A session of its own: what a terminal sends to the daemon is not for it. It ends when the daemon does.
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "kvservice.observer", *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(memory)

    async def _answer(self, question: bytes) -> bytes:
        if question[:1] == WRITE_VITALS:
            self._write_vitals()
            return b""
        assert question[:1] == BLOCK_HASH, "the observer asks nothing else"
        return self._block_hash(int.from_bytes(question[1:], "little"))

    def _end(self) -> None:
        """Kill it if it still runs: it holds nothing that could be lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
