"""A request of the engine: its prompt, its samples or beams, its output, and what the daemon's scheduler gets of it."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvservice.client import PoolInfo, ScheduledRequest
from kvservice.engines.host import DAEMON_LOST, WatchedScheduler
from kvservice.engines.params import CompletionOutput, RequestOutput, SamplingParams
from kvservice.engines.samples import Sample, failure
from kvservice.engines.sampling import own_processors, stream_of
from kvservice.errors import InternalError, KVServiceError
from kvservice.integrations.transformers.keys import ExtraKeys, identify, private_keys, shared_keys


@dataclass(frozen=True)
class Prompt:
    """A checked request. `max_tokens` is the most tokens of each output; `seed` is that of the parameters or drawn."""

    request_id: int
    text: str | None
    token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    seed: int


@dataclass(eq=False)
class EngineRequest:
    """State of a request. Sample i is sequence `request_id` + i in the daemon.

    `beams` is the state of its beam search, whose running beams are the samples. `grouped` says that the scheduler
    knows all samples as one request; after the daemon lost its state, each sample is a request of its own. `found` are
    the outputs of a beam search that is over.
    """

    prompt: Prompt
    samples: list[Sample]
    beams: BeamSearch | None
    grouped: bool = True
    recorded: bool = False
    error: Exception | None = None
    num_proposed: int = 0
    num_accepted: int = 0
    found: list[CompletionOutput] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        eos_ids: Collection[int],
        tokenizer: PreTrainedTokenizerBase | None,
        unusable_ids: frozenset[int] = frozenset(),
    ) -> EngineRequest:
        """Raises InvalidArgumentError if its logits processors cannot be copied."""
        params = prompt.params
        samples = [
            Sample(
                prompt.request_id + index,
                index,
                list(prompt.token_ids),
                params,
                prompt.max_tokens,
                eos_ids,
                stream_of(prompt.seed, index),
                tokenizer,
                own_processors(params.logits_processors),
                unusable_ids,
            )
            for index in range(params.width)
        ]
        request = cls(prompt, samples, None)
        request.restart_beams()
        return request

    @property
    def request_id(self) -> int:
        return self.prompt.request_id

    @property
    def finished(self) -> bool:
        if self.error is not None:
            return True
        return all(sample.finished for sample in self.samples)

    def restart_beams(self) -> None:
        """Begin the beam search from the prompt, if this is one."""
        params = self.prompt.params
        if params.beam_width == 1:
            return
        for sample in self.samples:
            del sample.token_ids[sample.prompt_length :]
        self.beams = BeamSearch(
            params.beam_width,
            self.prompt.max_tokens,
            self.samples[0].ending_ids,
            params.length_penalty,
            params.early_stopping,
        )

    def end(self, reason: str, error: Exception | None = None) -> None:
        """End the samples that still run. It raises nothing: a tokenizer that fails on the last text of a sample is the
        request's error, unless it has one."""
        self.error = self.error or error
        for sample in self.samples:
            try:
                sample.abort(reason, flush=self.beams is None)
            except BaseException as flushing:
                self.error = self.error or failure("the tokenizer", flushing)

    def end_beams(self) -> None:
        """End a beam search that is over, and make the outputs of its best beams. Raises errors of the tokenizer."""
        assert self.beams is not None, "only a request with beams ends them"
        best = self.beams.complete[: self.prompt.params.n]
        self.found = [self._beam_output(at, beam.token_ids, beam.logprob) for at, beam in enumerate(best)]
        self.end("stop")

    def output(self) -> RequestOutput:
        return RequestOutput(
            self.request_id,
            self.prompt.text,
            self.prompt.token_ids,
            tuple(self._outputs()),
            self.finished,
            self.error,
            self.num_proposed,
            self.num_accepted,
        )

    def _outputs(self) -> list[CompletionOutput]:
        if self.beams is not None:  # there are no tokens while the search goes on
            reason = self.samples[0].finish_reason
            return self.found or [
                CompletionOutput(at, "", (), finish_reason=reason) for at in range(self.prompt.params.n)
            ]
        outputs = [sample.output() for sample in self.samples]
        if len(outputs) > self.prompt.params.n:
            outputs.sort(key=_likelihood, reverse=True)
        return outputs[: self.prompt.params.n]

    def _beam_output(self, index: int, token_ids: tuple[int, ...], logprob: float) -> CompletionOutput:
        sample = self.samples[0].restarted(index)
        for token_id in token_ids:
            sample.add(token_id)
        output = sample.output()
        return CompletionOutput(index, output.text, token_ids, logprob, None, output.finish_reason, output.stop_reason)


def _likelihood(output: CompletionOutput) -> float:
    """Return the key by which the best of several samples are found. No number is the least likely."""
    logprob = output.cumulative_logprob
    return -math.inf if logprob is None or math.isnan(logprob) else logprob


def scheduled(model: PreTrainedModel, requests: Sequence[EngineRequest]) -> list[ScheduledRequest]:
    """Return new requests as the scheduler takes them."""
    return [_whole(request, keys) for request, keys in zip(requests, _keys(model, len(requests)), strict=True)]


def remaining(model: PreTrainedModel, requests: Sequence[EngineRequest]) -> list[ScheduledRequest]:
    """Return what is left of requests after their state in the daemon is lost.

    Samples that have tokens become requests of their own, with these tokens as part of their prompts. Beams begin
    again, since a beam search is the same each time.
    """
    left: list[ScheduledRequest] = []
    for request, keys in zip(requests, _keys(model, len(requests)), strict=True):
        request.restart_beams()
        for sample in request.samples:
            sample.proposals = []
        request.grouped = not any(sample.num_generated for sample in request.samples)
        if request.grouped:
            left.append(_whole(request, keys))
            continue
        left += [
            ScheduledRequest(
                sample.sequence_id,
                sample.token_ids,
                sample.max_tokens - sample.num_generated,
                priority=sample.params.priority,
                extra_keys=keys,
            )
            for sample in request.samples
            if not sample.finished
        ]
    return left


def submit(scheduler: WatchedScheduler, requests: Sequence[ScheduledRequest], info: PoolInfo) -> None:
    """Queue all requests, or none, in as many calls as their limits need. No step of the scheduler is made meanwhile.

    Raises the daemon's errors.
    """
    added: list[int] = []
    for part in _parts(requests, info):
        try:
            scheduler.add(part)
        except DAEMON_LOST:
            raise
        except KVServiceError as error:
            error.field = _shifted(error.field, len(added))
            abort(scheduler, added, info)
            raise
        added += [request.request_id for request in part]


def _shifted(field: str, num_before: int) -> str:
    """Return the name of a field of a part, with the index of its request among all requests."""
    return re.sub(r"\[(\d+)\]", lambda at: f"[{int(at[1]) + num_before}]", field, count=1)


def abort(scheduler: WatchedScheduler, request_ids: Sequence[int], info: PoolInfo) -> list[int]:
    """Abort requests, in as many calls as their limits need. Returns those that have ended already."""
    most = info.max_request_sequences
    ended: list[int] = []
    for first in range(0, len(request_ids), most):
        ended += scheduler.abort(request_ids[first : first + most])
    return ended


def _parts(requests: Sequence[ScheduledRequest], info: PoolInfo) -> Iterator[list[ScheduledRequest]]:
    """Yield the requests in parts that fit into one call each."""
    part: list[ScheduledRequest] = []
    num_tokens = 0
    for request in requests:
        length = len(request.token_ids)  # type: ignore[arg-type]  # it is a list or a tuple
        if part and (len(part) == info.max_request_sequences or num_tokens + length > info.max_request_tokens):
            yield part
            part, num_tokens = [], 0
        part.append(request)
        num_tokens += length
    if part:
        yield part


def aborted_ids(request: EngineRequest) -> list[int]:
    """Return the ids by which the scheduler knows what is aborted of a request."""
    if request.grouped:
        return [request.request_id]
    return [sample.sequence_id for sample in request.samples if sample.finish_reason in ("abort", "error")]


def _whole(request: EngineRequest, keys: ExtraKeys) -> ScheduledRequest:
    prompt = request.prompt
    return ScheduledRequest(
        request.request_id,
        prompt.token_ids,
        prompt.max_tokens,
        priority=prompt.params.priority,
        extra_keys=keys,
        width=prompt.params.width,
        beams=request.beams is not None,
    )


def _keys(model: PreTrainedModel, count: int) -> list[ExtraKeys]:
    """Return the extra keys of `count` prompts. Those of a model whose K/V are not shared are all different."""
    identity = identify(model)
    if identity.private_because:
        return [private_keys() for _ in range(count)]
    return [shared_keys(identity)] * count


# ---- beam search of one request, step by step as in transformers' generate


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
