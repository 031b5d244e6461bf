"""The thread that runs the loop of an engine for tasks that come and go."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from kvservice.engines.core import EngineCore
from kvservice.engines.outputs import RequestOutput
from kvservice.engines.params import SamplingParams
from kvservice.engines.prompts import PromptLike
from kvservice.engines.requests import EngineRequest
from kvservice.errors import FailedPreconditionError, InternalError

Publish = Callable[[RequestOutput], None]


class EngineWorker:
    """Runs the loop while there are requests. Only its thread touches the loop; others leave commands."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._commands: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._failure: BaseException | None = None
        self._publish: dict[int, Publish] = {}
        self._thread = threading.Thread(target=self._run, name="kvservice-engine", daemon=True)
        self._thread.start()

    def add(self, prompt: PromptLike, params: SamplingParams, publish: Publish) -> Future[EngineRequest]:
        """Check and queue a request. `publish` gets its outputs in the worker's thread."""
        added: Future[EngineRequest] = Future()
        self._command(lambda: self._add(prompt, params, publish, added))
        return added

    def abort_added(self, added: Future[EngineRequest]) -> None:
        """End the request of an `add` that is done, if it was queued. It does not end twice."""
        if not added.cancelled() and added.exception() is None:
            with contextlib.suppress(FailedPreconditionError):  # the engine is closed, and ends it
                self._command(lambda: self._abort(added.result()))

    def close(self) -> None:
        """End all requests and close the engine, unless this process is a fork of the engine's."""
        if not self._core.is_owned:
            return
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._core.close()

    def _command(self, command: Callable[[], None]) -> None:
        with self._changed:
            if self._closing:
                raise FailedPreconditionError("the engine is closed")
            self._commands.append(command)
            self._changed.notify()

    def _run(self) -> None:
        while self._wait():
            while self._commands:
                self._commands.popleft()()
            if self._core.loop.live:
                self._step()
        for request in list(self._core.loop.live.values()):
            request.end("abort", FailedPreconditionError("the engine is closed"))
            self._show(request)
        for command in self._commands:
            command()

    def _wait(self) -> bool:
        """Wait until there is something to do. Returns whether the engine goes on."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._commands or self._core.loop.live)
            return not self._closing

    def _step(self) -> None:
        running = list(self._core.loop.live.values())
        try:
            changed = self._core.loop.step()
        except BaseException as error:  # it has ended all requests, and their generators raise it; the thread goes on
            changed = running
            if not self._core.host.usable:
                self._failure = error
        for request in changed:
            self._show(request)

    def _show(self, request: EngineRequest) -> None:
        publish = self._publish.get(request.request_id)
        if publish is None:
            return
        if request.finished:
            del self._publish[request.request_id]
        try:
            publish(request.output())
        except RuntimeError:  # its event loop is closed
            self._core.loop.abort(request)

    def _add(self, prompt: PromptLike, params: SamplingParams, publish: Publish, added: Future[EngineRequest]) -> None:
        if not added.set_running_or_notify_cancel():
            return
        try:
            if self._closing:
                raise FailedPreconditionError("the engine is closed")
            if self._failure is not None:
                raise FailedPreconditionError(f"the engine has failed: {self._failure}")
            (request,) = self._core.new_requests([prompt], [params])
            ended = self._core.loop.add([request])
        except Exception as error:  # the caller gets any error from the future
            added.set_exception(error)
            return
        except BaseException as error:  # such as SystemExit of a copied logits processor
            added.set_exception(InternalError(f"the request was ended by {error!r}"))
            return
        self._publish[request.request_id] = publish
        added.set_result(request)
        for one in ended:
            self._show(one)

    def _abort(self, request: EngineRequest) -> None:
        self._publish.pop(request.request_id, None)
        self._core.loop.abort(request)
