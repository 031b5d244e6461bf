"""Starts of a daemon with the state of a process before, into each of which one error is put.

The places are the functions of the package that a start calls, until the daemon serves. Prints a JSON object: the
number of starts, and what went wrong. Each start is in a process of its own.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import gc
import json
import logging
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from daemon_lives import Life
from kept_files import HeldFiles
from manual_clock import ManualClock
from small_pool import SMALL_POOL

import kvservice
from kvservice.config import ServeConfig
from kvservice.keeper import READY
from kvservice.server.daemon import KVServer
from kvservice.v1 import blocks_pb2

PACKAGE = str(Path(kvservice.__file__).parent)
# Lacks, after which the next start takes over; and an error as damage or a bug causes it.
LACKS: tuple[Callable[[], Exception], ...] = (
    lambda: OSError(errno.ENOMEM, "injected"),
    lambda: OSError(errno.EMFILE, "injected"),
    lambda: MemoryError("injected"),
)
LIMIT_S = 120
ODD = KeyError
TOKENS = list(range(10))
OPTIONS: dict[str, Any] = SMALL_POOL | {"max_sessions": 4}
Files = tuple[tuple[str, bytes], ...]


async def leave_state() -> tuple[list[tuple[str, str]], str]:
    """Return the files of a process that was killed, and its session's token, in hexadecimal. Sequence 1 is in the
    pool, 2 is swapped out, 3 is pinned and has a pending token."""
    held, clock = HeldFiles(), ManualClock()
    life = Life(held, clock, max_sessions=4)
    session = life.open(detachable=True)
    for name in (1, 2, 3):
        await life.compute(session, name, [name, *TOKENS])
    await life.call(session, "swap_out", blocks_pb2.SwapOutRequest(sequence_ids=[2]))
    await life.call(session, "pin", blocks_pb2.PinRequest(token_ids=[3, *TOKENS], ttl_s=600))
    await life.call(session, "append", blocks_pb2.AppendRequest(request_id=9, sequence_ids=[3], token_ids=[5]))
    life.kill()
    return [(name, data.hex()) for name, data in held.content()], session.token.hex()


class Manager(HeldFiles):
    """A keeper that has the daemon hand over as soon as it serves."""

    def send(self, *lines: str) -> None:
        if READY in lines:
            sys.settrace(None)
            os.kill(os.getpid(), signal.SIGUSR1)


def start(manager: Any, folder: str) -> KVServer:
    """Run a process of the daemon until it serves, and hand over. Raises what its start raises."""
    config = ServeConfig(**OPTIONS | {"unix_socket": f"{folder}/k.sock", "tcp_address": "127.0.0.1:0"})

    async def serve() -> KVServer:
        server = KVServer(config, manager.start(), manager)
        await asyncio.wait_for(server.serve(), LIMIT_S)
        return server

    return asyncio.run(serve())


def places(files: Files, folder: str) -> list[str]:
    """Return the functions that a start calls, in order."""
    found: dict[str, None] = {}
    manager = Manager.of(files)

    def note(frame: FrameType, *_: Any) -> None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            found.setdefault(f"{code.co_filename}:{code.co_qualname}")

    sys.settrace(note)
    start(manager, folder)
    return [*found]


def scenario(files: Files, token: bytes, folder: str, place: str, make: Callable[[], Exception]) -> str:
    """Start with an error at a place, and again without. Returns what is wrong, or an empty string."""
    manager: Any = Manager.of(files)
    file, name = place.split(":")

    def throw(frame: FrameType, *_: Any) -> None:
        """Python calls this for each function. It stops tracing after the error."""
        if frame.f_code.co_qualname == name and frame.f_code.co_filename == file:
            raise make()

    sys.settrace(throw)
    try:
        start(manager, folder)
    except TimeoutError:
        return "it hangs"
    except Exception:
        pass  # the keeper starts the next process
    finally:
        sys.settrace(None)
    try:
        server = start(manager, folder)
    except Exception as error:
        return f"the next start fails: {error!r}"
    if make is not ODD:
        if server.core.report.outcome != "taken over":
            return f"the state is lost: {server.core.report}"
        session = server.sessions.attach(token, 1, True, lambda _: None)
        if set(session.namespace.sequence_ids()) != {1, 2, 3}:
            return f"sequences are lost: {session.namespace.sequence_ids()}"
    return ""


def in_child(call: Callable[[], Any]) -> Any:
    """Return the result of a call in a process of its own, or how that ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # gRPC waits forever if a server that was never stopped is garbage, and collected while there is no other one.
        gc.disable()
        os.close(reading)
        try:
            result = call()
        except BaseException:
            result = traceback.format_exc()
        with open(writing, "w") as stream:
            json.dump(result, stream)
        os._exit(0)
    os.close(writing)
    with open(reading) as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else f"it ended with {status}"


def main() -> None:
    """`argv` has the number of the first place, and the step to the next."""
    first, step = map(int, sys.argv[1:3])
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        left = in_child(lambda: asyncio.run(leave_state()))
        assert isinstance(left, list), left
        files, token = tuple((name, bytes.fromhex(data)) for name, data in left[0]), bytes.fromhex(left[1])
        # Otherwise a collection in each child goes through all modules, and copies the pages that they are in.
        gc.collect()
        gc.freeze()
        found = in_child(lambda: places(files, folder))
        assert isinstance(found, list), found
        tried, wrong = 0, {}
        for number, place in list(enumerate(found))[first::step]:
            for make in (LACKS[number % len(LACKS)], ODD):
                tried += 1
                problem = in_child(functools.partial(scenario, files, token, folder, place, make))
                if problem:
                    wrong[f"{place} {make()!r}"] = problem
    print(json.dumps({"places": len(found), "tried": tried, "wrong": wrong}))


if __name__ == "__main__":
    main()
