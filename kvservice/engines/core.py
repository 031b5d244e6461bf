"""The core that LLM and AsyncLLM share: a model on a host, its loop, and new requests."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypedDict

import torch
from transformers import PreTrainedTokenizerBase

from kvservice import plain_json
from kvservice.client import RequestInfo
from kvservice.engines.host import EngineHost, HostOptions, load
from kvservice.engines.loop import EngineLoop
from kvservice.engines.params import SamplingParams
from kvservice.engines.prompts import ModelLimits, PromptLike, check_prompt
from kvservice.engines.requests import EngineRequest, Prompt, abort, aborted_ids
from kvservice.engines.samples import Sample, error_text, failure
from kvservice.engines.speculation import SpeculationMethod
from kvservice.errors import FailedPreconditionError, InternalError, InvalidArgumentError
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


# ---- the file with which a restarted engine goes on: its session, its requests, and the outputs that are complete
#
# The daemon keeps the tokens and their K/V in the session, which is detachable; the file has the rest. A sample's end
# is written before it is reported to the daemon, so its output is always in one of the two.


# Parameters whose state the file cannot hold, with their defaults.
_NOT_SUPPORTED: Final = {"logits_processors": (), "logprobs": None, "best_of": None, "beam_width": 1}


@dataclass
class Past:
    """The file of an earlier engine: its session, the key of its model (empty if the model has none), requests by
    id, and ends of samples by sequence id.

    `next_id` is above the ids of all its requests, also of those that are returned.
    """

    token: bytes | None = field(default=None, repr=False)
    model: str = ""
    prompts: dict[int, Prompt] = field(default_factory=dict)
    ends: dict[int, dict[str, Any]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    next_id: int = 0


class Journal:
    """Writes the file. Only its owner can read it, because the session's token is in it."""

    def __init__(self, path: Path) -> None:
        self._path, self._model = path, ""
        self._ended: set[int] = set()
        self._open: set[int] = set()

    @property
    def unfetched(self) -> bool:
        """Return whether the file has requests whose outputs their user has not got."""
        return bool(self._open)

    def read(self) -> Past:
        """Return what the file holds. A last line that an earlier engine did not finish is removed.

        Raises InvalidArgumentError if it is not a journal, and FailedPreconditionError if it cannot be read.
        """
        past = Past()
        if not self._path.exists():
            return past
        if not self._path.is_file():
            raise InvalidArgumentError(f"{self._path} is not a regular file", field="journal")
        with self._accessing():
            lines = self._path.read_bytes().split(b"\n")
            if lines[-1]:
                os.truncate(self._path, self._path.stat().st_size - len(lines[-1]))
        for line in lines[:-1]:
            try:
                _apply(past, json.loads(line))
            except (ValueError, KeyError, TypeError):
                raise InvalidArgumentError(f"{self._path} is not a journal of an engine", field="journal") from None
        self._open, self._ended = set(past.prompts), set(past.ends)
        return past

    def check(self, params: SamplingParams) -> None:
        """Raise InvalidArgumentError naming a parameter whose state would be lost."""
        for name, default in _NOT_SUPPORTED.items():
            if getattr(params, name) != default:
                raise InvalidArgumentError("is not supported with a journal", field=name)

    def use_model(self, key: bytes, past: Past) -> None:
        """Note the model's key; empty for a model without one.

        Raises InvalidArgumentError if the file has requests of another model.
        """
        self._model = key.hex()
        if past.prompts and past.model and past.model != self._model:
            raise InvalidArgumentError(f"{self._path} has requests of another model", field="journal")

    def opened(self, token: bytes) -> None:
        self._write(self._session(token), replace=not self._open)

    def added(self, requests: Sequence[EngineRequest]) -> None:
        self._write(*({"added": _prompt_to_json(request.prompt)} for request in requests))
        self._open |= {request.request_id for request in requests}

    def refused(self, requests: Sequence[EngineRequest]) -> None:
        ids = [request.request_id for request in requests]
        self._open -= set(ids)
        self._write({"returned": ids})

    def ended(self, requests: Sequence[EngineRequest]) -> None:
        """Write the samples that have ended since, and errors."""
        lines: list[dict[str, Any]] = []
        for request in requests:
            if request.error is not None:
                lines.append({"failed": request.request_id, "error": error_text(request.error)})
            for sample in request.samples:
                if sample.finished and sample.sequence_id not in self._ended:
                    self._ended.add(sample.sequence_id)
                    lines.append({"ended": sample.sequence_id} | _end_to_json(sample))
        self._write(*lines)

    def returned(self, requests: Sequence[EngineRequest], token: bytes) -> None:
        """Forget requests whose outputs their user has got. The file starts anew when none are left."""
        self._open -= {request.request_id for request in requests}
        if self._open:
            self._write({"returned": [request.request_id for request in requests]})
        else:
            self._ended.clear()
            self._write(self._session(token), replace=True)

    def resume(
        self, past: Past, host: EngineHost, loop: EngineLoop, make: Callable[[Prompt], EngineRequest]
    ) -> dict[int, EngineRequest]:
        """Give the loop the requests that are not over. Requests that the daemon has go on where they were, and the
        others begin again. Returns all requests by id, finished ones included."""
        requests = {request_id: make(prompt) for request_id, prompt in past.prompts.items()}
        known: dict[int, RequestInfo] = {}
        if host.resumed:
            known = {info.request_id: info for info in host.scheduler.describe(token_ids=True)}
        for request in requests.values():
            _restore(request, past, known)
        in_daemon = [one for one in requests.values() if any(sample.sequence_id in known for sample in one.samples)]
        if in_daemon:
            loop.adopt(in_daemon, known)
        ids = [one for request in in_daemon for one in aborted_ids(request) if request.finished and one in known]
        if ids:
            loop.forget(abort(host.scheduler, ids, host.session.info))
        loop.resubmit([one for one in requests.values() if one not in in_daemon and not one.finished])
        return requests

    def _session(self, token: bytes) -> dict[str, Any]:
        return {"session": token.hex(), "model": self._model}

    def _write(self, *lines: dict[str, Any], replace: bool = False) -> None:
        """Append whole lines, or start the file anew with them. Raises FailedPreconditionError if that fails."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        text = "".join(plain_json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
        path = self._path.with_name(self._path.name + ".new") if replace else self._path
        with self._accessing():
            descriptor = os.open(path, flags | (os.O_TRUNC if replace else 0), 0o600)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                size = os.fstat(descriptor).st_size
                try:
                    _write_all(file, text)
                except OSError:
                    file.truncate(size)  # other lines may follow when there is room again
                    raise
            if replace:
                path.replace(self._path)

    @contextlib.contextmanager
    def _accessing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise FailedPreconditionError(f"{self._path}: {error.strerror}", field="journal") from None


def _write_all(file: io.FileIO, text: bytes) -> None:
    rest = memoryview(text)
    while rest:
        rest = rest[file.write(rest) :]


def _apply(past: Past, line: dict[str, Any]) -> None:
    if "session" in line:
        past.token, past.model = bytes.fromhex(line["session"]), str(line["model"])
    elif "added" in line:
        prompt = _prompt_from_json(line["added"])
        past.prompts[prompt.request_id] = prompt
        past.next_id = max(past.next_id, prompt.request_id + prompt.params.width)
    elif "ended" in line:
        past.ends[int(line["ended"])] = line
    elif "failed" in line:
        past.errors[int(line["failed"])] = str(line["error"])
    else:
        for request_id in line["returned"]:
            prompt = past.prompts.pop(request_id)
            past.errors.pop(request_id, None)
            for sequence_id in range(request_id, request_id + prompt.params.width):
                past.ends.pop(sequence_id, None)


def _restore(request: EngineRequest, past: Past, known: dict[int, RequestInfo]) -> None:
    """Give a new request the tokens that it had."""
    whole = known.get(request.request_id)
    alone = any(sample.sequence_id in known for sample in request.samples)
    request.grouped = len(whole.sequences) == len(request.samples) if whole is not None else not alone
    in_daemon = {one.sequence_id: one.token_ids for info in known.values() for one in info.sequences}
    for sample in request.samples:
        end = past.ends.get(sample.sequence_id)
        tokens = in_daemon.get(sample.sequence_id, ())[sample.prompt_length :] if end is None else end["tokens"]
        try:
            for token in tokens:
                sample.add(token)
        except Exception as error:  # foreign code
            request.end("error", failure("the tokenizer", error))
            break
        if end is not None:
            sample.finish_reason, sample.stop_reason = end["finish_reason"], end["stop_reason"]
    if request.request_id in past.errors:
        request.error = InternalError(past.errors[request.request_id])
    request.recorded = request.finished


def _end_to_json(sample: Sample) -> dict[str, Any]:
    return {
        "tokens": sample.generated_ids,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }


def _prompt_to_json(prompt: Prompt) -> dict[str, Any]:
    params = asdict(prompt.params)
    del params["logits_processors"]
    return asdict(prompt) | {"params": params}


def _prompt_from_json(values: dict[str, Any]) -> Prompt:
    """A bias of -inf, the only one that is not finite, is null in JSON."""
    params = dict(values["params"])
    if params["logit_bias"]:
        biases = params["logit_bias"].items()
        params["logit_bias"] = {int(token): -math.inf if bias is None else bias for token, bias in biases}
    return Prompt(**values | {"token_ids": tuple(values["token_ids"]), "params": SamplingParams.of(params)})
