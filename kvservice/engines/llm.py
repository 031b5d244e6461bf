"""`LLM`: generates for batches of prompts, with a view of the work in the terminal."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, Protocol, Unpack

import torch
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from kvservice.client import EngineBatch, Step
from kvservice.engines.core import EngineCore, EngineOptions, LLMArguments
from kvservice.engines.params import RequestOutput, SamplingParams
from kvservice.engines.prompts import ChatArguments, PromptLike, conversations_of, params_of_each, prompts_of
from kvservice.engines.requests import EngineRequest


class LLM:
    """A causal language model that generates for many prompts at once, with its K/V in a daemon.

    `model`: a model of transformers, or a directory with one and its tokenizer; nothing is downloaded. LLMArguments
    describes the keyword arguments. With a journal, a restarted engine goes on: see `resumed`.

    It is a context manager. Calls of several threads run one after the other. Raises InvalidArgumentError naming the
    argument, and the errors of KVClient and Daemon.
    """

    def __init__(
        self,
        model: torch.nn.Module | str | Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **arguments: Unpack[LLMArguments],
    ) -> None:
        self.core = EngineCore(model, tokenizer, EngineOptions(**arguments))
        self._lock = threading.Lock()

    @property
    def resumed(self) -> list[int]:
        """Ids of the requests of the journal that are not fetched yet, with `finish_resumed`."""
        return list(self.core.resumed)

    def generate(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_special_tokens: bool = True,
        progress: bool | ProgressView = False,
    ) -> list[RequestOutput]:
        """Generate for all prompts, each a text, token ids, or what a tokenizer or its `apply_chat_template` returns.
        Returns their outputs in the same order.

        `sampling_params`: one for all prompts, or one for each. `add_special_tokens`: whether texts get the tokens that
        the tokenizer adds, such as the one that begins a sequence; false for texts that have them already. `progress`:
        whether to show a bar, or a view that gets each step. Raises InvalidArgumentError for a wrong prompt or
        parameter, and OutOfBlocksError with `never` for a request that the pool can never hold; then nothing has been
        generated. An error of one request later, such as of its logits processor, is its output's `error`, and the
        others go on.

        An exception or Ctrl-C ends the requests. With a journal it leaves them to the next engine with that file, and
        this one can only be closed.
        """
        self.core.check_usable()
        batch = prompts_of(prompts, add_special_tokens)
        params = params_of_each(sampling_params, len(batch))
        with self._lock:
            requests = self.core.new_requests(batch, params)
            if not requests:
                return []
            self.core.loop.add(requests)
            return self._finish(requests, progress)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | ProgressView = False,
        **arguments: Unpack[ChatArguments],
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation, or of each in a list. Returns their outputs in the same order.

        A message is a dictionary with "role" and "content", as in vLLM and in OpenAI's protocol. The tokenizer's chat
        template makes the prompts: ChatArguments describes the arguments for it. The rest is as with `generate`.
        """
        self.core.check_usable()
        conversations = conversations_of(messages, arguments)
        return self.generate(conversations, sampling_params, progress=progress)

    def finish_resumed(self, *, progress: bool | ProgressView = False) -> list[RequestOutput]:
        """Finish the requests that were in progress when the engine of the journal ended. Returns the outputs of all
        its requests that were not returned, in the order in which they were added."""
        self.core.check_usable()
        with self._lock:
            self.core.check_usable()
            requests, self.core.resumed = list(self.core.resumed.values()), {}
            return self._finish(requests, progress)

    def close(self) -> None:
        """Free everything in the daemon, or, with a journal of unfinished requests, leave it to a successor. A fork of
        this process does neither."""
        if self.core.is_owned:
            with self._lock:
                self.core.close()

    def __del__(self) -> None:
        # The objects of an engine refer to each other. Without a collection they would live on, and a private daemon
        # with them, although nobody can use it any more.
        if self.__dict__ and not sys.is_finalizing() and not self.core.is_closed:
            self.__dict__.clear()
            gc.collect()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finish(self, requests: list[EngineRequest], progress: bool | ProgressView) -> list[RequestOutput]:
        loop = self.core.loop
        with _view(progress, len(requests)) as view:
            try:
                while loop.live:
                    loop.step()
                    if view is not None:
                        view.update(requests, loop.batch)
            except BaseException:
                loop.interrupt(requests)
                raise
        self.core.returned(requests)
        return [request.output() for request in requests]


def _view(progress: bool | ProgressView, num_requests: int) -> AbstractContextManager[ProgressView | None]:
    if progress is True:
        return progress_bar(num_requests)
    return nullcontext(None if progress is False else progress)


# ---- the view in a terminal while an engine works: a progress bar, or the queues and the requests


_MAX_ROWS: Final = 12
_REFRESH_S: Final = 0.1
_BAR_WIDTH: Final = 32


class ProgressView(Protocol):
    """Gets the state after each step. `batch` is the last one, None before the first."""

    def update(self, requests: Sequence[EngineRequest], batch: EngineBatch[Step] | None) -> None: ...


class ProgressBar:
    """A bar that counts finished requests and generated tokens."""

    def __init__(self, progress: Progress, num_requests: int) -> None:
        self._progress = progress
        self._task = progress.add_task("requests", total=num_requests, tokens=0)

    def update(self, requests: Sequence[EngineRequest], batch: EngineBatch[Step] | None) -> None:  # noqa: ARG002
        tokens = sum(sample.num_generated for request in requests for sample in request.samples)
        finished = sum(request.finished for request in requests)
        self._progress.update(self._task, completed=finished, tokens=tokens)


@contextmanager
def progress_bar(num_requests: int) -> Iterator[ProgressView]:
    """Yield a progress bar on standard error."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=False) as progress:
        yield ProgressBar(progress, num_requests)


class LiveQueues:
    """Shows the queues, the rate of tokens, the share of accepted proposals, and the requests in progress."""

    def __init__(self, show: Callable[[RenderableType], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._show, self._clock = show, clock
        self._started_s = self._shown_s = clock()

    def update(self, requests: Sequence[EngineRequest], batch: EngineBatch[Step] | None) -> None:
        now_s = self._clock()
        over = all(request.finished for request in requests)
        if over or now_s - self._shown_s >= _REFRESH_S:
            self._shown_s = now_s
            self._show(Group(queues(requests, batch, now_s - self._started_s), _bars(requests)))


def queues(requests: Sequence[EngineRequest], batch: EngineBatch[Step] | None, elapsed_s: float) -> Text:
    """Return one line: the queues, what was generated in `elapsed_s` seconds, and the acceptance rate."""
    tokens = sum(sample.num_generated for request in requests for sample in request.samples)
    finished = sum(request.finished for request in requests)
    line = Text(f"{finished}/{len(requests)} finished", style="bold")
    if batch is not None:
        line.append(f"   waiting {batch.waiting}  running {batch.running}  swapped {batch.swapped}", style="cyan")
        if batch.num_stalled:
            line.append(f"  stalled {batch.num_stalled}", style="yellow")
    line.append(f"   {tokens} tokens, {tokens / max(elapsed_s, 1e-9):.0f}/s")
    proposed = sum(request.num_proposed for request in requests)
    if proposed:
        accepted = sum(request.num_accepted for request in requests)
        line.append(f"   accepted {accepted} of {proposed} proposals ({accepted / proposed:.0%})", style="green")
    return line


def _bars(requests: Sequence[EngineRequest]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    running = [request for request in requests if not request.finished]
    for request in running[:_MAX_ROWS]:
        done, total = request.samples[0].num_generated, request.prompt.max_tokens
        table.add_row(
            f"request {request.request_id}",
            Bar(total, done, width=_BAR_WIDTH, complete_style="green"),
            f"{request.samples[0].prompt_length} + {done}/{total}",
        )
    if len(running) > _MAX_ROWS:
        table.add_row(f"and {len(running) - _MAX_ROWS} more")
    return table


@contextmanager
def live_queues(console: Console) -> Iterator[ProgressView]:
    """Yield a view on a terminal."""
    with Live(console=console, auto_refresh=False) as live:
        yield LiveQueues(lambda shown: live.update(shown, refresh=True))
