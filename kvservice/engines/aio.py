"""`AsyncLLM`: streams the outputs of requests that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from transformers import PreTrainedTokenizerBase

from kvservice.engines.core import EngineCore
from kvservice.engines.options import EngineArguments, EngineOptions
from kvservice.engines.outputs import RequestOutput
from kvservice.engines.params import SamplingParams
from kvservice.engines.prompts import ChatArguments, PromptLike, Verbatim, conversations_of, params_of_each
from kvservice.engines.worker import EngineWorker
from kvservice.errors import InvalidArgumentError


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
        self._worker = EngineWorker(self.core)

    async def generate(
        self, prompt: PromptLike, sampling_params: SamplingParams | None = None, *, add_special_tokens: bool = True
    ) -> AsyncGenerator[RequestOutput]:
        """Generate for one prompt, as LLM does. Yields its output whenever it has grown, the last time when it is
        finished. Outputs that are not taken in time are left out, since each one contains those before.

        Closing the generator aborts the request. Raises InvalidArgumentError for a wrong prompt or parameter, the
        daemon's errors when it refuses the request, and the error of the request itself.
        """
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
        self._latest: RequestOutput | None = None

    def publish(self, output: RequestOutput) -> None:
        """Replace the latest output. The engine's thread calls it. Raises RuntimeError if the event loop is closed."""
        self._loop.call_soon_threadsafe(self._set, output)

    async def next(self) -> RequestOutput:
        await self._ready.wait()
        self._ready.clear()
        assert self._latest is not None, "an output sets the event"
        return self._latest

    def _set(self, output: RequestOutput) -> None:
        self._latest = output
        self._ready.set()
