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

from kvservice import client
from kvservice.engines.host import DAEMON_LOST, EngineHost, HostOptions
from kvservice.engines.loop import Speculator
from kvservice.engines.prompts import ModelLimits
from kvservice.engines.samples import Row, Sample
from kvservice.engines.sampling import choose
from kvservice.errors import InvalidArgumentError, KVServiceError, ResourceExhaustedError
from kvservice.integrations.transformers import model_keys
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


# ---- proposals of a draft model, whose K/V are in a session of their own


@dataclass
class _DraftSequence:
    """A sequence of the draft model, which has the K/V of `token_ids`."""

    sequence: client.Sequence
    token_ids: list[int] = field(default_factory=list)


class Drafter:
    """Proposes `num_tokens` tokens that the draft model would choose with the sample's own random numbers."""

    def __init__(self, host: EngineHost, num_tokens: int) -> None:
        self._host, self._num_tokens = host, num_tokens
        self._limits = ModelLimits.of(host.model, host.session.info.max_sequence_tokens)
        # The longest sequence for which the draft model has positions.
        self._longest = self._limits.max_length - num_tokens
        self._sequences: dict[int, _DraftSequence] = {}
        self._lost = False

    def propose(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Return the proposals of each sample; none if the draft model's daemon has no room or is away, and none for a
        sample that is too long for the draft model. They end at a token that the draft model cannot compute."""
        proposals: list[list[int]] = [[] for _ in samples]
        unusable = self._limits.unusable_ids
        fitting = [
            at
            for at, sample in enumerate(samples)
            if len(sample.token_ids) <= self._longest and unusable.isdisjoint(sample.token_ids)
        ]
        try:
            with self._host.noticing_restarts():
                for _ in range(0 if self._lost else self._num_tokens):
                    fitting = [at for at in fitting if unusable.isdisjoint(proposals[at])]
                    if not fitting:
                        break
                    drafted = [proposals[at] for at in fitting]
                    chosen = self._next_tokens([samples[at] for at in fitting], drafted)
                    for tokens, token in zip(drafted, chosen, strict=True):
                        tokens.append(token)
        except ResourceExhaustedError:
            self._free(list(self._sequences))
        except DAEMON_LOST:
            self._lost = True
        if self._lost:
            self._sequences.clear()
            self._host.reopen()
            self._lost = False
        return proposals

    def forget(self, samples: Iterable[Sample]) -> None:
        self._free([sample.sequence_id for sample in samples if sample.sequence_id in self._sequences])

    def reset(self) -> None:
        self._free(list(self._sequences))

    def _next_tokens(self, samples: Sequence[Sample], proposals: Sequence[list[int]]) -> list[int]:
        """Compute the tokens of samples and of their proposals whose K/V the draft model lacks. Returns the token after
        each."""
        wanted = [[*sample.token_ids, *tokens] for sample, tokens in zip(samples, proposals, strict=True)]
        drafts = [self._prepare(sample, tokens) for sample, tokens in zip(samples, wanted, strict=True)]
        lengths = [len(draft.token_ids) for draft in drafts]
        missing = [tokens[length:] for tokens, length in zip(wanted, lengths, strict=True)]
        step = self._host.session.append(
            [draft.sequence for draft in drafts],
            [token for tokens in missing for token in tokens],
            num_tokens=[len(tokens) for tokens in missing],
        )
        ids = [
            token
            for tokens, query, context in zip(wanted, step.query_lens, step.context_lens, strict=True)
            for token in tokens[context - query : context]
        ]
        logits = self._host.runner.run(step, torch.tensor(ids), torch.from_numpy(np.cumsum(step.query_lens) - 1))
        for draft, tokens in zip(drafts, wanted, strict=True):
            draft.token_ids = tokens
        rows = [Row(sample, tuple(tokens)) for sample, tokens in zip(samples, proposals, strict=True)]
        return choose(logits, rows).token_ids

    def _prepare(self, sample: Sample, tokens: list[int]) -> _DraftSequence:
        """Return the sample's sequence with a proper prefix of these tokens, whose K/V are in it or to be computed."""
        draft = self._sequences.get(sample.sequence_id)
        if draft is None:
            sequence = self._host.session.allocate(tokens[:-1], extra_keys=model_keys(self._host.model))
            draft = self._sequences[sample.sequence_id] = _DraftSequence(sequence, tokens[:-1])
            return draft
        common = 0
        for ours, theirs in zip(draft.token_ids, tokens[:-1], strict=False):
            if ours != theirs:
                break
            common += 1
        if common < len(draft.token_ids):
            self._host.session.truncate(draft.sequence, common)
            del draft.token_ids[common:]
        return draft

    def _free(self, ids: Sequence[int]) -> None:
        """Free sequences. If the daemon is away or refuses, the next proposals begin in a new session."""
        sequences = [self._sequences.pop(one).sequence for one in ids]
        try:
            if sequences:
                with self._host.noticing_restarts():
                    self._host.session.free(sequences)
        except KVServiceError:
            self._lost = True
