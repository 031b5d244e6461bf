"""The host of an engine: a model, a daemon, a session with its scheduler, and the runner of the model."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvservice.client import (
    BatchReport,
    EngineBatch,
    KVClient,
    KVScheduler,
    RequestInfo,
    ScheduledRequest,
    Session,
    Step,
)
from kvservice.engines.runner import ModelRunner
from kvservice.errors import (
    ConnectionLostError,
    DrainingError,
    InvalidArgumentError,
    KVServiceError,
    UnknownSessionError,
)
from kvservice.integrations.transformers import install, pool_options, uninstall
from kvservice.integrations.transformers.models import is_installed
from kvservice.launch import Daemon

# Errors of calls to a daemon that is gone, or has forgotten the session.
DAEMON_LOST: Final = (ConnectionLostError, DrainingError, UnknownSessionError)
_RETRY_S: Final = 0.1


@dataclass(frozen=True)
class HostOptions:
    """Options of an engine's daemon, session and scheduler.

    `address`: None starts a private daemon with the fields `daemon` of ServeConfig. `scheduler`: arguments of
    `Session.open_scheduler`, which is opened if `scheduled`. `compiled`: see ModelRunner.
    `restart_wait_s`: how long the engine waits for a daemon that went away, in seconds.
    """

    address: str | None = None
    daemon: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)
    session_name: str = "engine"
    detachable: bool = False
    scheduled: bool = True
    compiled: bool = False
    restart_wait_s: float = 60.0

    def __post_init__(self) -> None:
        if self.address is not None and self.daemon:
            raise InvalidArgumentError("are of a daemon that is started, but an address is given", field="daemon")


def load(directory: str | Path, dtype: str = "auto") -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a model, and its tokenizer if the directory has one. Nothing is downloaded.

    Raises InvalidArgumentError if there is no model.
    """
    if not (Path(directory) / "config.json").is_file():
        raise InvalidArgumentError(
            f"{directory} is not a directory with a model: config.json is missing", field="model"
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{directory}: {error}", field="model") from None
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    has_tokenizer = any((Path(directory) / name).is_file() for name in names)
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True) if has_tokenizer else None
    model.train(False)
    return model, tokenizer


# The number of hosts that use a model which they installed. The last one that closes uninstalls it.
_num_hosts: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()
_num_hosts_lock: Final = threading.RLock()  # a collection may end a host at any time


@contextlib.contextmanager
def _installed(model: PreTrainedModel) -> Iterator[None]:
    with _num_hosts_lock:
        # The user's own installation outlives all hosts.
        ours = model in _num_hosts or not is_installed(model)
        install(model)
        if ours:
            _num_hosts[model] = _num_hosts.get(model, 0) + 1
    try:
        yield
    finally:
        with _num_hosts_lock:
            if ours:
                # A model that is collected at the same time is not found any more.
                _num_hosts[model] = _num_hosts.get(model, 1) - 1
            if ours and not _num_hosts[model]:
                del _num_hosts[model]
                uninstall(model)


class WatchedScheduler:
    """The scheduler of a session, see KVScheduler. It does not survive a restart of the daemon: its calls raise
    ConnectionLostError then."""

    def __init__(self, scheduler: KVScheduler, watch: Callable[[], AbstractContextManager[None]]) -> None:
        self._scheduler, self._watch = scheduler, watch

    def add(self, requests: Iterable[ScheduledRequest]) -> None:
        with self._watch():
            self._scheduler.add(requests)

    def abort(self, request_ids: Iterable[int]) -> list[int]:
        with self._watch():
            return self._scheduler.abort(request_ids)

    def schedule(
        self, reports: Iterable[BatchReport] = (), *, ahead: bool = False, retry: bool = False
    ) -> EngineBatch[Step]:
        with self._watch():
            return self._scheduler.schedule(reports, ahead=ahead, retry=retry)

    def describe(self, *, token_ids: bool = False) -> list[RequestInfo]:
        with self._watch():
            return self._scheduler.describe(token_ids=token_ids)


class EngineHost:
    """Owns the connection to the daemon, and restores it. `session`, `scheduler` and `runner` are the current ones, and
    `usable` says that they are there."""

    def __init__(self, model: PreTrainedModel, options: HostOptions, token: bytes | None = None) -> None:
        """`token` is that of a session to resume; `resumed` says whether the daemon still had it."""
        self.model, self.options = model, options
        self._stack = ExitStack()
        self._daemon: Daemon | None = None
        try:
            self._stack.enter_context(_installed(model))
            address = self._address()
            self.client = self._stack.enter_context(KVClient(address, **self._client_options()))
            self.resumed = token is not None and self._resume(token)
            if not self.resumed:
                self._use(self._open())
        except BaseException:
            self._stack.close()
            raise

    @contextlib.contextmanager
    def noticing_restarts(self) -> Iterator[None]:
        """Raise ConnectionLostError in place of the errors by which another process of the daemon says that it does not
        have a step or the scheduler."""
        try:
            yield
        except KVServiceError as error:
            if isinstance(error, DAEMON_LOST) or self.session.num_restarts == self._num_restarts:
                raise
            raise ConnectionLostError(f"the daemon was restarted: {error}") from error

    def reopen(self) -> None:
        """Go on after the scheduler, the session or the daemon is gone: with a new scheduler in the session if it
        survived a restart of the daemon, else in a new session. Waits for the daemon, and starts a private one again.
        Raises what opening raises after `restart_wait_s`."""
        self.usable = False
        deadline = time.monotonic() + self.options.restart_wait_s
        while True:
            try:
                if self._daemon is not None and self._daemon.process.poll() is not None:
                    self._leave_session()
                    self._daemon.__enter__()
                if self._survives():
                    self._open_scheduler()
                else:
                    self._leave_session()
                    self._use(self._open())
                self.usable = True
                return
            except DAEMON_LOST:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)

    def _survives(self) -> bool:
        """Return whether a new process of the daemon has the session. One that has no scheduler is not resumed, because
        its sequences are not needed any more. Raises the errors of DAEMON_LOST while the daemon is away."""
        if self._left or not self.options.scheduled:
            return False
        try:
            self.session.lost_sequences()
        except UnknownSessionError:
            return False
        return self.session.num_restarts != self._num_restarts

    def close(self, *, detach: bool = False) -> None:
        """Close the session, or detach from it, then the connection and the private daemon."""
        with self._stack:
            if detach:
                with contextlib.suppress(*DAEMON_LOST):  # then the successor begins the requests again
                    self.session.detach()
            else:
                self._leave_session()

    def _leave_session(self) -> None:
        """Close the session. If the daemon is gone, there is none."""
        self._left = True
        with contextlib.suppress(*DAEMON_LOST):
            self.session.close()

    def _address(self) -> str:
        if self.options.address is not None:
            return self.options.address
        options = {**pool_options(self.model.config, self.model.dtype), **self.options.daemon}
        self._daemon = self._stack.enter_context(Daemon(**options))
        return self._daemon.address

    def _client_options(self) -> dict[str, Any]:
        """A private daemon comes back only when `reopen` starts it, so that calls do not wait for it."""
        return ({} if self._daemon is None else {"reconnect_wait_s": 0.0}) | self.options.client

    def _open(self) -> Session:
        return self.client.session(self.options.session_name, detachable=self.options.detachable)

    def _resume(self, token: bytes) -> bool:
        try:
            self._use(self.client.resume(token))
        except UnknownSessionError:
            return False
        return True

    def _use(self, session: Session) -> None:
        self.session, self._left = session, False
        self._open_scheduler()
        self.runner = ModelRunner(self.model, session, compiled=self.options.compiled)
        self.usable = True

    def _open_scheduler(self) -> None:
        """Open the scheduler of the session, unless the engine has none."""
        num_restarts = self.session.num_restarts
        if self.options.scheduled:
            scheduler = self.session.open_scheduler(**self.options.scheduler)
            self.scheduler = WatchedScheduler(scheduler, self.noticing_restarts)
        self._num_restarts = num_restarts
