"""The keyword arguments of LLM and AsyncLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from kvservice.engines.host import HostOptions
from kvservice.engines.speculation import SpeculationMethod


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
