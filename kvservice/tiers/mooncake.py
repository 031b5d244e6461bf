"""A Mooncake Store as a tier: values that many daemons share.

The library runs in a child process (kvservice.mooncake), which maps the store's memory and moves values between it and
the nodes of the store. The child is killed if it does not answer in time: only then is it certain that the memory which
its requests name is not used any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import select
import socket
import sys
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict
from subprocess import DEVNULL
from typing import Any, Final

from kvservice.mooncake import (
    CALLS_AT_A_TIME,
    FRAME_BYTES,
    GETS_AT_A_TIME,
    KEY_BYTES,
    LENGTH,
    NOWHERE,
    PUTS_AT_A_TIME,
    REQUEST_VALUES,
    WORD_BYTES,
    MooncakeOptions,
    MooncakeReply,
    MooncakeRequest,
    Operation,
    Outcome,
    Status,
    listening_environment,
    values_in_request,
)
from kvservice.owned import OwnedProcess
from kvservice.tiers.protocol import GetResult, Space, TierError, TierStats, Values

# ---- child processes with Mooncake's library: one life of one, and what keeps one running


logger = logging.getLogger(__name__)

# The seconds that a child has to get ready.
START_S: Final = 30.0
# The pause before the next child. It doubles with each child that lived for less than STEADY_S.
BACKOFF_MIN_S, BACKOFF_MAX_S, STEADY_S = 0.5, 30.0, 60.0
READY_ID: Final = 0
# How long a start waits for children of the process before. The kernel kills them when their parent ends.
CHILDREN_S: Final = 10.0


class ChildrenPipe:
    """Tells whether child processes of the daemon, of an earlier process of it too, have ended: each has the writing
    end of one pipe. Nobody but the daemon and its keeper has the reading end."""

    def __init__(self, fd: int | None = None) -> None:
        """`fd` is the reading end that an earlier process made, which this object owns from now on."""
        if fd is None:
            fd, writing = os.pipe()
            os.close(writing)
        self.fd = fd
        self.close = weakref.finalize(self, os.close, fd)

    def have_ended(self, limit_s: float = CHILDREN_S) -> bool:
        """Wait until all children have ended and use no memory any more. Returns whether they have in time."""
        poll = select.poll()
        poll.register(self.fd, 0)
        return bool(poll.poll(1000 * limit_s))

    @contextlib.contextmanager
    def writing(self) -> Iterator[int]:
        """Open the writing end, for a child that is started meanwhile. Raises OSError."""
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)


class Child:
    """One child process, which runs a module. Its first reply has READY_ID.

    A request ends with its reply, or after the process has ended: until then it may use the memory that it names.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], descriptors: Sequence[int], environment: Mapping[str, str]
    ) -> None:
        """Start the process. Its first arguments name its end of the link. Raises OSError."""
        self._link, theirs = socket.socketpair()
        with theirs:
            link = theirs.fileno()
            self._process = OwnedProcess(
                [sys.executable, "-P", "-m", module, "--link", str(link), *arguments],
                pass_fds=[link, *descriptors],
                env=os.environ | dict(environment),
                stdin=DEVNULL,
            )
        self._pidfd = os.pidfd_open(self._process.pid)
        self._ids = itertools.count(READY_ID + 1)
        self._replies: dict[int, asyncio.Future[MooncakeReply]] = {}
        self._reason = "has ended"
        self.has_ended = False
        self.ready = self._expect(READY_ID)
        self._running = asyncio.ensure_future(self._run())

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ended(self) -> str:
        """Wait until the process has ended. Returns why."""
        await asyncio.shield(self._running)
        return self._reason

    def kill(self, reason: str) -> None:
        if self._process.returncode is None:
            self._reason = reason
            self._process.kill()

    async def ask(self, request: Callable[[int], MooncakeRequest], limit_s: float) -> bytes:
        """Send a request, which is made from its id, and return the body of its reply. If there is none in time, the
        process is killed. Raises TierError. A cancelled call ends no sooner."""
        if self.has_ended or self._writer.is_closing():  # uvloop raises RuntimeError for a write after that
            raise TierError(f"the process {self._reason}")
        request_id = next(self._ids)
        reply = self._expect(request_id)
        self._writer.write(request(request_id).encode())
        loop = asyncio.get_running_loop()
        limit = loop.call_later(limit_s, self.kill, f"did not answer within {limit_s:g} s and was killed")
        cancelled = False
        while not reply.done():
            try:
                await asyncio.wait({reply})
            except asyncio.CancelledError:
                cancelled = True
        limit.cancel()
        if cancelled:
            reply.exception()  # retrieved, so that asyncio does not log it
            raise asyncio.CancelledError
        return reply.result().body

    def _expect(self, request_id: int) -> asyncio.Future[MooncakeReply]:
        reply: asyncio.Future[MooncakeReply] = asyncio.get_running_loop().create_future()
        self._replies[request_id] = reply
        return reply

    async def _run(self) -> None:
        """Receive replies until the process ends, or closes the link. Then make sure that it has ended."""
        reader, self._writer = await asyncio.open_connection(sock=self._link)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                if length > FRAME_BYTES:
                    self.kill("sent a reply that is too long and was killed")
                    break
                self._receive(MooncakeReply.decode(await reader.readexactly(length)))
        self._writer.close()
        self._process.kill()
        await self._exit()
        self.has_ended = True
        for reply in self._replies.values():
            reply.set_exception(TierError(f"the process {self._reason}"))
            reply.exception()  # nobody may wait for it
        self._replies.clear()

    async def _exit(self) -> None:
        """Wait until the process has ended, with all of its threads, and its memory is unmapped."""
        loop = asyncio.get_running_loop()
        exited = asyncio.Event()
        loop.add_reader(self._pidfd, exited.set)
        await exited.wait()
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()

    def _receive(self, reply: MooncakeReply) -> None:
        future = self._replies.pop(reply.request_id)
        if reply.status is Status.OK:
            future.set_result(reply)
            return
        reason = reply.body.decode(errors="replace")
        if reply.request_id == READY_ID:
            self._reason = f"failed to start: {reason}"
        future.set_exception(TierError(reason))
        future.exception()  # nobody may wait for it


class ChildKeeper:
    """Keeps a child running: it starts another one when one ends, after a pause."""

    def __init__(
        self,
        name: str,
        start: Callable[[], Child],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        start_s: float = START_S,
    ) -> None:
        """`name` is for the log. `clock` returns seconds. A child that is not ready after `start_s` seconds is
        killed."""
        self._name, self._start, self._sleep, self._clock = name, start, sleep, clock
        self._start_s = start_s
        self._child: Child | None = None
        self._reason = "is starting"
        self._logged = ""
        self._began_s = 0.0
        self.num_deaths = 0
        self._running: asyncio.Task[None] | None = None
        # A keeper that is dropped in this turn of the loop starts nothing: a daemon's start may fail, and try again.
        asyncio.get_running_loop().call_soon(_begin, weakref.ref(self))

    def child(self) -> Child:
        """Return the child. Raises TierError if none is ready."""
        if self._child is None or self._child.has_ended:
            raise TierError(f"{self._name} {self._reason}")
        return self._child

    @property
    def fault(self) -> str:
        """Why no child is ready."""
        return "" if self.state == "open" else f"{self._name} {self._reason}"

    @property
    def state(self) -> str:
        """ "open" while a child is ready, "opening" until the first one is ready or has ended, otherwise "failed"."""
        if self._child is not None and not self._child.has_ended:
            return "open"
        return "failed" if self.num_deaths or self._child is not None else "opening"

    async def close(self) -> None:
        was_open = self.state == "open"
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        if was_open:
            logger.info("%s is closed", self._name)

    def begin(self) -> None:
        self._running = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        pause_s = BACKOFF_MIN_S
        while True:
            self._began_s = self._clock()
            self._reason = await self._live()
            self.num_deaths += 1
            pause_s = BACKOFF_MIN_S if self._clock() - self._began_s >= STEADY_S else pause_s
            self._log(pause_s)
            await self._sleep(pause_s)
            pause_s = min(2 * pause_s, BACKOFF_MAX_S)

    async def _live(self) -> str:
        """Run one child. Returns why it has ended."""
        try:
            child = self._start()
        except OSError as error:
            return f"cannot be started: {error}"
        limit = asyncio.get_running_loop().call_later(
            self._start_s, child.kill, f"was not ready within {self._start_s:g} s"
        )
        try:
            child.ready.add_done_callback(lambda ready: self._on_ready(child, ready, limit))
            return await child.ended()
        finally:
            limit.cancel()
            self._child = None
            child.kill("is closed")
            await child.ended()

    def _on_ready(self, child: Child, ready: asyncio.Future[MooncakeReply], limit: asyncio.TimerHandle) -> None:
        limit.cancel()
        if ready.exception() is None:
            self._child = child
            self._logged = ""
            logger.info("%s is open after %.2f s", self._name, self._clock() - self._began_s)

    def _log(self, pause_s: float) -> None:
        """Log why there is no child, once for each reason until one is ready."""
        if self._reason != self._logged:
            logger.warning("%s %s; another is started in %g s", self._name, self._reason, pause_s)
            self._logged = self._reason


def _begin(keeper: weakref.ref[ChildKeeper]) -> None:
    if (alive := keeper()) is not None:
        alive.begin()


# Time limits on a request. They are longer than those of the library on its own calls of the master.
CALL_S, TRANSFER_S = 10.0, 20.0

_DONE: Final = bytes([Outcome.DONE])
# Maps an outcome to whether the value is there.
_IS_THERE: Final = bytes(outcome == Outcome.DONE for outcome in range(256))


def start_client(options: MooncakeOptions, memory_fd: int, num_bytes: int, children: ChildrenPipe) -> Child:
    """Start the child that serves requests. Raises OSError."""
    arguments = [str(memory_fd), str(num_bytes), options.to_json()]
    with children.writing() as writing:
        return Child("kvservice.mooncake.serving", arguments, [memory_fd, writing], listening_environment(NOWHERE))


def start_node(options: MooncakeOptions, segment_gib: float) -> Child:
    """Start a child that gives memory to the store. It is another one, because whoever reaches it can read and write
    its memory. Raises OSError."""
    arguments = [f"--{name}={value}" for name, value in asdict(options).items()]
    arguments.append(f"--segment-gib={segment_gib}")
    return Child("kvservice.mooncake.node", arguments, [], listening_environment(options.address))


class MooncakeTier:
    """Values of a block store's memory in a Mooncake Store."""

    name = "mooncake"

    def __init__(self, client: ChildKeeper, node: ChildKeeper | None = None) -> None:
        self._client, self._node = client, node
        # The child has a thread for each request. Lookups and removals do not wait for values that travel.
        self._calls = asyncio.Semaphore(CALLS_AT_A_TIME)
        self._gets = asyncio.Semaphore(GETS_AT_A_TIME)
        self._puts = asyncio.Semaphore(PUTS_AT_A_TIME)
        self._outcomes: Counter[int] = Counter()
        self._num_removed = 0

    @property
    def fault(self) -> str:
        return self._client.fault

    @classmethod
    def open(
        cls,
        options: MooncakeOptions,
        memory_fd: int,
        num_bytes: int,
        segment_gib: float = 0.0,
        children: ChildrenPipe | None = None,
    ) -> MooncakeTier:
        """Return a tier over the memory file of a block store, which gives `segment_gib` of other memory to the store.
        `children` will tell whether the processes that use the memory have ended. To be called in the event loop."""
        start = functools.partial(start_client, options, memory_fd, num_bytes, children or ChildrenPipe())
        client = ChildKeeper(f"the Mooncake client of {options.master}", start)
        if not segment_gib:
            return cls(client)
        name = f"the Mooncake node of {options.master} with {segment_gib:g} GiB"
        return cls(client, ChildKeeper(name, functools.partial(start_node, options, segment_gib)))

    async def lookup(self, space: Space, keys: bytes) -> bytes:
        batches = _batches(len(keys) // KEY_BYTES, REQUEST_VALUES)
        replies = await _all([self._call(Operation.EXIST, space, _part(keys, at, KEY_BYTES)) for at in batches])
        return b"".join(replies).translate(_IS_THERE)

    async def get(self, space: Space, values: Values) -> GetResult:
        replies = await self._transfer(Operation.GET, self._gets, space, values)
        outcomes, checksums = [], []
        for reply in replies:
            num_values = len(reply) // (1 + WORD_BYTES)
            outcomes.append(self._count(reply[:num_values]))
            checksums.append(reply[num_values:])
        return GetResult(b"".join(outcomes).translate(_IS_THERE), b"".join(checksums))

    async def put(self, space: Space, values: Values) -> bytes:
        replies = await self._transfer(Operation.PUT, self._puts, space, values)
        return b"".join(map(self._count, replies)).translate(_IS_THERE)

    async def remove(self, space: Space, keys: bytes) -> int:
        batches = _batches(len(keys) // KEY_BYTES, REQUEST_VALUES)
        replies = await _all([self._call(Operation.REMOVE, space, _part(keys, at, KEY_BYTES)) for at in batches])
        num_removed = sum(reply.count(_DONE) for reply in replies)
        self._num_removed += num_removed
        return num_removed

    async def clear(self, space: Space) -> None:
        await self._call(Operation.CLEAR, space, b"")

    def stats(self) -> TierStats:
        return TierStats(
            self.name,
            self._client.state,
            removed=self._num_removed,
            refused=self._outcomes[Outcome.REFUSED],
            corrupt=self._outcomes[Outcome.CORRUPT],
            errors=self._outcomes[Outcome.BROKEN] + self._client.num_deaths,
        )

    async def close(self) -> None:
        await self._client.close()
        if self._node is not None:
            await self._node.close()

    def _count(self, outcomes: bytes) -> bytes:
        self._outcomes.update(outcomes)
        return outcomes

    async def _call(self, operation: Operation, space: Space, keys: bytes) -> bytes:
        async with self._calls:
            return await self._client.child().ask(
                lambda request_id: MooncakeRequest(operation, request_id, space.digest, space.block_bytes, keys), CALL_S
            )

    async def _transfer(
        self, operation: Operation, turns: asyncio.Semaphore, space: Space, values: Values
    ) -> list[bytes]:
        async def transfer(at: slice) -> bytes:
            async with turns:
                return await self._client.child().ask(
                    lambda request_id: MooncakeRequest(
                        operation,
                        request_id,
                        space.digest,
                        space.block_bytes,
                        _part(values.keys, at, KEY_BYTES),
                        _part(values.offsets, at, WORD_BYTES),
                        _part(values.checksums, at, WORD_BYTES),
                    ),
                    TRANSFER_S,
                )

        return await _all([transfer(at) for at in _batches(len(values), values_in_request(space.block_bytes))])


async def _all(calls: Sequence[Coroutine[Any, Any, bytes]]) -> list[bytes]:
    """Run calls at a time and return their results, when all have ended. If one fails or the caller is cancelled,
    those that have not begun are dropped."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    cancelled = False
    waiting = set(tasks)
    while waiting:
        try:
            ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            cancelled, ended = True, set()
        if cancelled or any(task.cancelled() or task.exception() for task in ended):
            for task in waiting:
                task.cancel()
    if cancelled:
        raise asyncio.CancelledError
    failures = [task.exception() for task in tasks if not task.cancelled() and task.exception()]
    if failures:
        raise failures[0]  # type: ignore[misc]
    return [task.result() for task in tasks]


def _batches(num_values: int, most: int) -> list[slice]:
    return [slice(at, at + most) for at in range(0, num_values, most)]


def _part(packed: bytes, values: slice, size: int) -> bytes:
    return packed[values.start * size : values.stop * size]
