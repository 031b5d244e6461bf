"""The core that LLM and AsyncLLM share: a model on a host, its loop, and new requests."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypedDict

import torch
from transformers import PreTrainedTokenizerBase

from kvservice.engines.host import EngineHost, HostOptions, load
from kvservice.engines.journal import Journal
from kvservice.engines.loop import EngineLoop
from kvservice.engines.params import SamplingParams
from kvservice.engines.prompts import ModelLimits, PromptLike, check_prompt
from kvservice.engines.requests import EngineRequest, Prompt
from kvservice.engines.speculation import SpeculationMethod
from kvservice.errors import FailedPreconditionError, InvalidArgumentError
from kvservice.integrations.transformers.arguments import library_model
from kvservice.integrations.transformers.keys import identify

_logger: Final = logging.getLogger(__name__)


class EngineArguments(TypedDict, total=False):
    """Keyword arguments of both engines.

    Without `address`, a private daemon runs until `close`; `daemon` are its options (fields of ServeConfig), such as
    num_blocks. `client` are arguments of KVClient, and `scheduler` those of `Session.open_scheduler`. `dtype` is that
    of a model that is loaded, "auto" by default. `speculation` proposes tokens that are verified together: PromptLookup
    or DraftModel. `ahead` (true by default) makes the next batch while the model runs, `compiled` compiles the model's
    layers at the first step. The engine waits `restart_wait_s` seconds (60 by default) for a daemon that is away.
    """

    dtype: str
    address: str | None
    daemon: dict[str, Any]
    client: dict[str, Any]
    scheduler: dict[str, Any]
    speculation: SpeculationMethod | None
    ahead: bool
    compiled: bool
    restart_wait_s: float


class LLMArguments(EngineArguments, total=False):
    """Keyword arguments of LLM: `journal` is a file with which a restarted engine goes on."""

    journal: str | Path | None


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The arguments with their defaults."""

    dtype: str = "auto"
    address: str | None = None
    daemon: dict[str, Any] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    speculation: SpeculationMethod | None = None
    ahead: bool = True
    compiled: bool = False
    restart_wait_s: float = 60.0
    journal: str | Path | None = None

    def host_options(self) -> HostOptions:
        scheduler = dict(self.scheduler)
        if self.speculation is not None:
            scheduler.setdefault("lookahead", self.speculation.num_tokens)
        return HostOptions(
            self.address,
            self.daemon,
            scheduler,
            self.client,
            detachable=self.journal is not None,
            compiled=self.compiled,
            restart_wait_s=self.restart_wait_s,
        )


class EngineCore:
    """A model and its loop. `resumed` are the requests of the journal, by id, which an earlier engine has added."""

    def __init__(
        self, model: torch.nn.Module | str | Path, tokenizer: PreTrainedTokenizerBase | None, options: EngineOptions
    ) -> None:
        if options.journal is not None and options.address is None:
            raise InvalidArgumentError("a private daemon ends with its engine: give an address", field="journal")
        if options.journal is not None and options.speculation is not None:
            raise InvalidArgumentError("is not supported with a journal", field="speculation")
        if options.speculation is not None and not hasattr(options.speculation, "speculator"):
            raise InvalidArgumentError("must be PromptLookup or DraftModel", field="speculation")
        if isinstance(model, str | Path):
            model, own_tokenizer = load(model, options.dtype)
            tokenizer = tokenizer or own_tokenizer
        model = library_model(model)
        self.model, self.tokenizer = model, tokenizer
        self.resumed: dict[int, EngineRequest] = {}
        self._journal = Journal(Path(options.journal)) if options.journal is not None else None
        self._next_id = 0
        self._closed, self._pid = False, os.getpid()
        with ExitStack() as stack:
            past = self._journal.read() if self._journal is not None else None
            host_options = options.host_options()
            self.host = EngineHost(model, host_options, None if past is None else past.token)
            stack.callback(self._close_host)
            if past is not None and self._journal is not None:
                self._journal.use_model(identify(model).key, past)
            lookahead = int(host_options.scheduler.get("lookahead", 0))
            longest = self.host.session.info.max_sequence_tokens - lookahead
            self.limits = ModelLimits.of(model, longest)
            if self.limits.no_eos_ids:
                _logger.warning(
                    "the end of sequence %s of the model's files is ignored: the model chooses tokens from 0 to %d",
                    sorted(self.limits.no_eos_ids),
                    self.limits.num_scores - 1,
                )
            speculator = None
            if options.speculation is not None:
                speculator = stack.enter_context(options.speculation.speculator(model))
            self.loop = EngineLoop(self.host, speculator, self._journal, ahead=options.ahead)
            stack.callback(self.loop.close)
            if self._journal is not None:
                self._journal.opened(self.host.session.token)
            if past is not None and self._journal is not None:
                self.resumed = self._journal.resume(past, self.host, self.loop, self._request)
                self._next_id = past.next_id
            self._stack = stack.pop_all()

    def new_requests(self, prompts: Sequence[PromptLike], params: Sequence[SamplingParams]) -> list[EngineRequest]:
        """Check prompts and parameters, and return their requests, which are not queued yet.

        Raises InvalidArgumentError naming the prompt or the parameter, and FailedPreconditionError after `close` and
        after an interruption with a journal.
        """
        self.check_usable()
        checked = []
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            if self._journal is not None:
                self._journal.check(one)
            checked.append(check_prompt(prompt, one, self.limits, self.tokenizer, f"prompts[{index}]"))
        return [self._request(replace(prompt, request_id=self._new_id(prompt))) for prompt in checked]

    def check_usable(self) -> None:
        """Raise FailedPreconditionError if the engine takes no more requests, or none in this process. In a fork, locks
        may be held by threads that are not there, so this needs none."""
        if not self.is_owned:
            raise FailedPreconditionError(
                f"the engine belongs to process {self._pid}, from which this one was forked: make an engine here"
            )
        if self._closed:
            raise FailedPreconditionError("the engine is closed")
        if self.loop.left:
            raise FailedPreconditionError(
                "the engine was interrupted: close it, and go on with its journal in another one"
            )

    def returned(self, requests: Sequence[EngineRequest]) -> None:
        """Note that the user has got the outputs of requests."""
        if self._journal is not None:
            self._journal.returned(requests, self.host.session.token)

    @property
    def is_owned(self) -> bool:
        """False in a fork of the process that has opened the engine, which must not close it."""
        return os.getpid() == self._pid

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        self._stack.close()

    def _new_id(self, prompt: Prompt) -> int:
        """Return the id of a request, which is also the id of its first sequence."""
        first, self._next_id = self._next_id, self._next_id + prompt.params.width
        return first

    def _request(self, prompt: Prompt) -> EngineRequest:
        return EngineRequest.of(prompt, self.limits.eos_ids, self.tokenizer, self.limits.unusable_ids)

    def _close_host(self) -> None:
        self.host.close(detach=self._journal is not None and bool(self._journal.unfetched))
