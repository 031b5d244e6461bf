"""Beam search of one request, step by step as in transformers' generate."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch

from kvservice.errors import InternalError

_IMPOSSIBLE = -1.0e9


@dataclass(frozen=True)
class Beam:
    """A complete beam: its generated tokens, their log probability, and the score by which beams are ordered."""

    token_ids: tuple[int, ...]
    logprob: float
    score: float


class BeamSearch:
    """Keeps `width` running beams and the best `width` complete ones.

    A beam is complete at a token of `ending_ids`, or with `max_tokens` tokens. Only candidates among the best `width`
    of a step can be complete; those after them take the places of complete ones among the running beams.
    """

    def __init__(
        self, width: int, max_tokens: int, ending_ids: Collection[int], length_penalty: float, early_stopping: bool
    ) -> None:
        self.width, self.max_tokens = width, max_tokens
        self.length_penalty, self.early_stopping = length_penalty, early_stopping
        self.generated: list[list[int]] = [[] for _ in range(width)]
        self.complete: list[Beam] = []
        self.over = False
        self._ending = torch.tensor(sorted(ending_ids), dtype=torch.long)
        # At first all beams are the prompt, so that only one of them may have candidates.
        self._scores = torch.full((width,), _IMPOSSIBLE)
        self._scores[0] = 0.0

    def step(self, logprobs: torch.Tensor) -> tuple[list[int], list[int]]:
        """Continue the running beams, given the log probabilities of their next tokens, float32 `[width, vocabulary]`.

        Returns (the tokens, the parents): running beam i continues the former beam parents[i] with tokens[i]. If `over`
        is then true, the search is over, and they have no meaning. A beam that is impossible, with a log probability of
        -inf, is never complete.

        Raises InternalError if no beam can go on, because the scores are not finite.
        """
        vocabulary, length = logprobs.shape[-1], len(self.generated[0]) + 1
        candidates = max(2, 1 + len(self._ending)) * self.width
        totals = (logprobs.cpu() + self._scores[:, None]).flatten()
        if totals.isnan().any() or not totals.max().isfinite():
            raise InternalError("no beam can go on: its scores are not finite")
        totals, flat = totals.topk(min(candidates, len(totals)))
        parents, tokens = flat // vocabulary, flat % vocabulary
        ends = torch.isin(tokens, self._ending) | (length >= self.max_tokens)
        self._complete(totals, parents, tokens, ends, length)
        self._scores, chosen = (totals + ends * _IMPOSSIBLE).topk(self.width)
        parent_ids, token_ids = parents[chosen].tolist(), tokens[chosen].tolist()
        self.generated = [[*self.generated[parent], token] for parent, token in zip(parent_ids, token_ids, strict=True)]
        self.over = bool(ends.all()) or not self._can_improve(length)
        if self.over and not self.complete:
            raise InternalError("no beam is complete: the scores of all are not finite")
        return token_ids, parent_ids

    def _complete(
        self, totals: torch.Tensor, parents: torch.Tensor, tokens: torch.Tensor, ends: torch.Tensor, length: int
    ) -> None:
        """Keep the best of the complete beams and the candidates that are complete now."""
        for at in ends[: self.width].nonzero()[:, 0].tolist():
            token_ids = (*self.generated[int(parents[at])], int(tokens[at]))
            logprob = float(totals[at])
            if logprob > -math.inf:
                self.complete.append(Beam(token_ids, logprob, logprob / length**self.length_penalty))
        self.complete = sorted(self.complete, key=lambda beam: -beam.score)[: self.width]

    def _can_improve(self, length: int) -> bool:
        """Return whether a running beam may still become better than the worst of enough complete ones."""
        if len(self.complete) < self.width:
            return True
        best_possible = float(self._scores[0]) / length**self.length_penalty
        return not self.early_stopping and best_possible > self.complete[-1].score
