"""`AsyncLLM`: streams the outputs of requests that come and go."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Unpack

import torch
from transformers import PreTrainedTokenizerBase

from kvservice.engines.core import EngineArguments, EngineCore, EngineOptions
from kvservice.engines.params import RequestOutput, SamplingParams
from kvservice.engines.prompts import ChatArguments, PromptLike, Verbatim, conversations_of, params_of_each
from kvservice.engines.requests import EngineRequest
from kvservice.engines.samples import failure
from kvservice.errors import FailedPreconditionError, InternalError, InvalidArgumentError

_logger: Final = logging.getLogger(__name__)
# Gets the outputs of a request, or the error that ended the engine.
Publish = Callable[[RequestOutput | FailedPreconditionError], None]


class AsyncLLM:
    """LLM for asyncio: each request is an async generator of its growing output, and requests join a running batch.

    The arguments are those of LLM without a journal: see EngineArguments. One thread runs the model. `generate` may be
    called from any number of tasks of one event loop. It is an async context manager.
    """

    def __init__(
        self,
        model: torch.nn.Module | str | Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **arguments: Unpack[EngineArguments],
    ) -> None:
        options = EngineOptions(**arguments)
        if options.journal is not None:
            raise InvalidArgumentError("is not supported by AsyncLLM", field="journal")
        self.core = EngineCore(model, tokenizer, options)
        self._worker = _EngineWorker(self.core)

    async def generate(
        self, prompt: PromptLike, sampling_params: SamplingParams | None = None, *, add_special_tokens: bool = True
    ) -> AsyncGenerator[RequestOutput]:
        """Generate for one prompt, as LLM does. Yields its output whenever it has grown, the last time when it is
        finished. Outputs that are not taken in time are left out, since each one contains those before.

        Closing the generator aborts the request. Raises InvalidArgumentError for a wrong prompt or parameter, the
        daemon's errors when it refuses the request, and the error of the request itself.
        """
        self.core.check_usable()
        (params,) = params_of_each(sampling_params, 1)
        if params.best_of is not None and params.best_of > params.n:
            raise InvalidArgumentError("is not known before the end of a stream", field="best_of")
        if isinstance(prompt, str) and not add_special_tokens:
            prompt = Verbatim(prompt)
        stream = _OutputStream(asyncio.get_running_loop())
        adding = self._worker.add(prompt, params, stream.publish)
        finished = False
        try:
            await asyncio.wrap_future(adding)
            while not finished:
                output = await stream.next()
                finished = output.finished
                if output.error is not None:
                    raise output.error
                yield output
        finally:
            if not finished:
                adding.add_done_callback(self._worker.abort_added)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        **arguments: Unpack[ChatArguments],
    ) -> AsyncGenerator[RequestOutput]:
        """Generate the next message of one conversation, as `generate` does. See `LLM.chat` for the arguments."""
        conversations = conversations_of(messages, arguments)
        if len(conversations) != 1:
            raise InvalidArgumentError("a stream is of one conversation", field="messages")
        return self.generate(conversations[0], sampling_params)

    async def close(self) -> None:
        """End all requests, and free everything in the daemon."""
        await asyncio.to_thread(self._worker.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _OutputStream:
    """Hands the latest output from the engine's thread to a task."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ready = asyncio.Event()
        self._latest: RequestOutput | FailedPreconditionError | None = None

    def publish(self, output: RequestOutput | FailedPreconditionError) -> None:
        """Replace the latest output. The engine's thread calls it. Raises RuntimeError if the event loop is closed."""
        self._loop.call_soon_threadsafe(self._set, output)

    async def next(self) -> RequestOutput:
        await self._ready.wait()
        self._ready.clear()
        assert self._latest is not None, "an output sets the event"
        if isinstance(self._latest, FailedPreconditionError):
            raise self._latest
        return self._latest

    def _set(self, output: RequestOutput | FailedPreconditionError) -> None:
        self._latest = output
        self._ready.set()


class _EngineWorker:
    """Runs the loop while there are requests. Only its thread touches the loop; others leave commands.

    When the thread ends, by `close` or by an error of the engine, all that wait get the reason, as later calls do.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._commands: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closing = self._ended = False
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
            if self._closing or self._ended:
                raise self._refusal()
            self._commands.append(command)
            self._changed.notify()

    def _run(self) -> None:
        try:
            while self._wait():
                while self._commands:
                    self._commands.popleft()()
                if self._core.loop.live:
                    self._step()
        except BaseException as error:  # a bug: the last resort is that nobody waits for ever
            _logger.exception("the engine has ended")
            self._failure = error
        with self._changed:
            self._ended = True
        for publish in self._publish.values():
            with contextlib.suppress(RuntimeError):  # its event loop is closed
                publish(self._refusal())
        for command in self._commands:
            command()

    def _refusal(self) -> FailedPreconditionError:
        """Return why there are no new requests."""
        if self._failure is None:
            return FailedPreconditionError("the engine is closed")
        return FailedPreconditionError(f"the engine has failed: {self._failure!r}")

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
            for request in running:
                if not request.finished:
                    request.end("error", failure("a step of the engine", error))
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
            if self._closing or self._failure is not None:
                raise self._refusal()
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
        if not self._ended:
            self._core.loop.abort(request)
