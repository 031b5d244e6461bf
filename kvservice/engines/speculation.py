"""Speculative decoding: proposals of tokens that one step verifies together.

A proposal is accepted if it is the token that would have been chosen at its place. Sampled tokens depend only on the
logits and on the position (see `sampling.uniform`), so the tokens are those of decoding without speculation, greedy and
sampled: what the proposals change is the number of steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from transformers import PreTrainedModel

from kvservice.engines.draft import Drafter
from kvservice.engines.host import EngineHost, HostOptions
from kvservice.engines.loop import Speculator
from kvservice.engines.samples import Sample
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.transformers.arguments import library_model

_MAX_PROPOSALS: Final = 64


class SpeculationMethod(Protocol):
    """A way to propose at most `num_tokens` tokens."""

    @property
    def num_tokens(self) -> int: ...

    def speculator(self, model: PreTrainedModel) -> Any:
        """Return a context manager of the Speculator for an engine of this model."""


@dataclass(frozen=True)
class PromptLookup:
    """Proposes what followed the last tokens where they occurred before (prompt lookup decoding, Saxena 2023).

    It looks for the last `max_ngram` tokens of a sequence in the sequence, then for one fewer, down to `min_ngram`, and
    proposes the `num_tokens` tokens after the latest occurrence.
    """

    num_tokens: int = 4
    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        _check_num_tokens(self.num_tokens)
        if not 1 <= self.min_ngram <= self.max_ngram <= _MAX_PROPOSALS:
            raise InvalidArgumentError(f"must be from 1 to max_ngram, at most {_MAX_PROPOSALS}", field="min_ngram")

    @contextmanager
    def speculator(self, model: PreTrainedModel) -> Iterator[Speculator]:  # noqa: ARG002  other methods need it
        yield _LookupSpeculator(self)


@dataclass(frozen=True)
class DraftModel:
    """Proposes tokens of a second, smaller model with the same vocabulary.

    Its K/V are in a daemon of its own, since a pool has one shape: a private one with the options `daemon`, or the one
    at `address`. A sequence for which it has no blocks gets no proposals.
    """

    model: torch.nn.Module
    num_tokens: int = 4
    address: str | None = None
    daemon: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_num_tokens(self.num_tokens)

    @contextmanager
    def speculator(self, model: PreTrainedModel) -> Iterator[Speculator]:
        draft = library_model(self.model)
        if draft.config.vocab_size != model.config.vocab_size:
            raise InvalidArgumentError(
                f"has a vocabulary of {draft.config.vocab_size}, the model one of {model.config.vocab_size}",
                field="speculation",
            )
        with ExitStack() as stack:
            options = HostOptions(self.address, self.daemon, session_name="draft", scheduled=False)
            host = EngineHost(draft, options)
            stack.callback(host.close)
            yield Drafter(host, self.num_tokens)


class _LookupSpeculator:
    def __init__(self, method: PromptLookup) -> None:
        self._method = method

    def propose(self, samples: Sequence[Sample]) -> list[list[int]]:
        return [lookup(sample.token_ids, self._method) for sample in samples]

    def forget(self, samples: Iterable[Sample]) -> None:
        """Nothing is kept."""

    def reset(self) -> None:
        """Nothing is kept."""


def lookup(token_ids: Sequence[int], method: PromptLookup) -> list[int]:
    """Return the proposals of prompt lookup for a sequence."""
    tokens = np.asarray(token_ids)
    for size in range(min(method.max_ngram, len(tokens) - 1), method.min_ngram - 1, -1):
        windows = sliding_window_view(tokens[:-1], size)
        (found,) = np.nonzero((windows == tokens[-size:]).all(1))
        if len(found):
            start = int(found[-1]) + size
            proposals: list[int] = tokens[start : start + method.num_tokens].tolist()
            return proposals
    return []


def _check_num_tokens(num_tokens: int) -> None:
    if not 1 <= num_tokens <= _MAX_PROPOSALS:
        raise InvalidArgumentError(f"must be from 1 to {_MAX_PROPOSALS}", field="num_tokens")
