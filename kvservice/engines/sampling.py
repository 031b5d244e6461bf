"""The next tokens of all rows of a batch: changes of logits, the library's logits processors, and the choice."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import LogitsProcessor

from kvservice.engines.params import TokenLogprob
from kvservice.engines.samples import Row, Sample, failure
from kvservice.errors import InternalError, InvalidArgumentError

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
# Processors that look at the scores only: one call serves all rows that share one.
_OF_SCORES_ONLY: Final = tuple(
    getattr(transformers, name)
    for name in (
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinPLogitsWarper",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    )
    if hasattr(transformers, name)
)


# Attributes with token ids, by the class of the library that has them.
_TOKENS_OF: Final = {
    "ForcedBOSTokenLogitsProcessor": "bos_token_id",
    "ForcedEOSTokenLogitsProcessor": "eos_token_id",
    "MinLengthLogitsProcessor": "eos_token_id",
    "MinNewTokensLengthLogitsProcessor": "eos_token_id",
    "NoBadWordsLogitsProcessor": "bad_word_ids",
    "SequenceBiasLogitsProcessor": "sequence_bias",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens",
    "SuppressTokensLogitsProcessor": "suppress_tokens",
}


@dataclass
class Choice:
    """The chosen tokens int[m], their log probabilities for rows that need them, and the errors of rows."""

    token_ids: list[int]
    logprobs: dict[int, dict[int, TokenLogprob]] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)


def choose(logits: torch.Tensor, rows: Sequence[Row]) -> Choice:
    """Choose a token for each row of logits `[m, vocabulary]`.

    The choice of a row depends on its logits, its sample's parameters, seed and tokens, and on nothing else. If a
    logits processor of a row raises, or if no token can be chosen, `errors` has the row's exception, and its token has
    no meaning.
    """
    raw = logits.float()
    errors: dict[int, Exception] = {}
    scores = change_logits(raw, rows, errors)
    peaks, likeliest = scores.max(-1)
    for row in (~peaks.isfinite()).nonzero()[:, 0].tolist():
        errors.setdefault(row, InternalError("no token can be chosen: its scores are not finite"))
    choice = Choice(likeliest.tolist(), errors=errors)
    _sample_rows(choice, scores, rows)
    wanted = [row for row, (sample, _) in enumerate(rows) if sample.params.needs_logprobs]
    if wanted:
        _add_logprobs(choice, raw, rows, wanted)
    return choice


def _sample_rows(choice: Choice, scores: torch.Tensor, rows: Sequence[Row]) -> None:
    """Replace the likeliest tokens of rows that are sampled."""
    sampled = [row for row, one in enumerate(rows) if not one.sample.params.greedy and row not in choice.errors]
    if sampled:
        chosen = _sample(scores[sampled], [rows[row] for row in sampled])
        for row, token in zip(sampled, chosen, strict=True):
            choice.token_ids[row] = token


def _sample(scores: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """Sample by inversion: the first token at which the cumulative probability exceeds a number from [0, 1).

    The highest score becomes 0 before the temperature, so that no finite score overflows upwards.
    """
    params = [sample.params for sample, _ in rows]
    scores = (scores - scores.max(-1, keepdim=True).values) / _column([one.temperature for one in params], scores)
    narrowed = [row for row, one in enumerate(params) if one.top_k or one.top_p < 1 or one.min_p > 0]
    if narrowed:
        scores[narrowed] = _narrow(scores[narrowed], [rows[row] for row in narrowed])
    cumulative = torch.softmax(scores, -1, dtype=torch.float64).cumsum(-1)
    total = cumulative[:, -1:]
    streams = np.array([sample.stream for sample, _ in rows], np.uint64)
    positions = np.array([sample.num_generated + len(following) for sample, following in rows], np.uint64)
    points = torch.from_numpy(uniform(streams, positions)).to(scores.device)[:, None] * total
    below_total = torch.nextafter(total, torch.zeros_like(total))
    chosen: list[int] = torch.searchsorted(cumulative, torch.minimum(points, below_total), right=True)[:, 0].tolist()
    return chosen


def _narrow(scores: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Exclude tokens by top_k, then top_p, then min_p, as transformers' warpers do."""
    params = [sample.params for sample, _ in rows]
    vocabulary = scores.shape[-1]
    ordered, order = scores.sort(-1)
    if any(one.top_k for one in params):
        ranks = [min(one.top_k or vocabulary, vocabulary) for one in params]
        lowest = ordered.gather(1, torch.tensor(ranks, device=scores.device).neg_()[:, None] + vocabulary)
        ordered = ordered.masked_fill(ordered < lowest, -torch.inf)
    if any(one.top_p < 1 for one in params):
        limits = _column([1 - one.top_p if one.top_p < 1 else -1.0 for one in params], scores)
        excluded = ordered.softmax(-1).cumsum(-1) <= limits
        excluded[:, -1] = False
        ordered = ordered.masked_fill(excluded, -torch.inf)
    if any(one.min_p > 0 for one in params):
        probabilities = ordered.softmax(-1)
        excluded = probabilities < _column([one.min_p for one in params], scores) * probabilities[:, -1:]
        ordered = ordered.masked_fill(excluded, -torch.inf)
    return torch.empty_like(scores).scatter_(1, order, ordered)


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def uniform(streams: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a number from [0, 1) for each position of a stream, float64[m].

    It is output `position` of the generator SplitMix64 (Steele et al. 2014) started at `stream`. Since it is computed
    from the position, a token that is computed again is chosen again.
    """
    with np.errstate(over="ignore"):
        return (_mix(streams + (positions + np.uint64(1)) * _GOLDEN) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def stream_of(seed: int, index: int) -> int:
    """Return the stream of sample `index` of a seed, both below 2**64."""
    with np.errstate(over="ignore"):
        return int(_mix(_mix(np.array([seed], np.uint64)) + np.uint64(index))[0])


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MIX[0]
    state = (state ^ (state >> np.uint64(27))) * _MIX[1]
    return state ^ (state >> np.uint64(31))


def _add_logprobs(choice: Choice, raw: torch.Tensor, rows: Sequence[Row], wanted: list[int]) -> None:
    logprobs = raw[wanted].log_softmax(-1)
    chosen = torch.tensor([choice.token_ids[row] for row in wanted], device=raw.device)
    of_chosen = logprobs.gather(1, chosen[:, None])
    ranks = (logprobs > of_chosen).sum(-1) + 1
    most = max(rows[row].sample.params.logprobs or 0 for row in wanted)
    likeliest = logprobs.topk(min(most, logprobs.shape[-1])) if most else None
    for at, row in enumerate(wanted):
        found: dict[int, TokenLogprob] = {}
        if likeliest is not None:
            count = rows[row].sample.params.logprobs or 0
            values, tokens = likeliest.values[at, :count].tolist(), likeliest.indices[at, :count].tolist()
            found = {
                token: TokenLogprob(value, rank)
                for rank, (token, value) in enumerate(zip(tokens, values, strict=True), 1)
            }
        found[choice.token_ids[row]] = TokenLogprob(float(of_chosen[at, 0]), int(ranks[at]))
        choice.logprobs[row] = found


def change_logits(logits: torch.Tensor, rows: Sequence[Row], errors: dict[int, Exception]) -> torch.Tensor:
    """Return the logits float32 `[m, vocabulary]` with the changes that the rows' parameters ask for.

    The order is: bias, penalties, least length, processors. Exceptions of processors go to `errors`, by row. The
    argument is not changed.
    """
    changed = [row for row, (sample, _) in enumerate(rows) if sample.params.changes_logits]
    if not changed:
        return logits
    logits = logits.clone()
    for row in changed:
        try:
            _change_row(logits[row], *rows[row])
        except Exception as error:  # the other rows are not changed by this one
            errors[row] = failure("the sampling parameters", error)
    _process(logits, [row for row in changed if rows[row].sample.processors], rows, errors)
    return logits


def _change_row(scores: torch.Tensor, sample: Sample, following: tuple[int, ...]) -> None:
    """Change the scores `[vocabulary]` of one row in place."""
    params = sample.params
    if params.logit_bias:
        scores[_index(list(params.logit_bias), scores)] += torch.tensor(
            list(params.logit_bias.values()), dtype=scores.dtype, device=scores.device
        )
    if params.repetition_penalty != 1:
        seen = _index(np.unique([*sample.token_ids, *following]), scores)
        values = scores[seen]
        scores[seen] = torch.where(values < 0, values * params.repetition_penalty, values / params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        generated = [*sample.generated_ids, *following]
        if generated:
            tokens, counts = np.unique(generated, return_counts=True)
            penalties = params.presence_penalty + params.frequency_penalty * counts
            scores[_index(tokens, scores)] -= torch.from_numpy(penalties).to(scores)
    if sample.num_generated + len(following) < params.min_tokens and sample.ending_ids:
        scores[_index(list(sample.ending_ids), scores)] = -torch.inf


def _index(tokens: object, like: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(np.asarray(tokens, np.int64), device=like.device)


def _process(logits: torch.Tensor, rows_with: list[int], rows: Sequence[Row], errors: dict[int, Exception]) -> None:
    """Run the processors of the rows, in place. Rows at the same processor of scores only are one call, and each row is
    one of its own if that fails."""
    num_left = dict.fromkeys(rows_with, 0)
    while True:
        pending = [row for row, at in num_left.items() if row not in errors and at < len(rows[row].sample.processors)]
        if not pending:
            return
        for processor, group in _groups(pending, num_left, rows):
            for row in group:
                num_left[row] += 1
            if len(group) > 1:
                try:
                    logits[group] = _call(processor, None, logits[group])
                    continue
                except Exception:  # found below, with its row
                    pass
            for row in group:
                try:
                    logits[[row]] = _call(processor, [*rows[row].sample.token_ids, *rows[row].following], logits[[row]])
                except BaseException as error:  # foreign code: its failure is the request's, not the batch's
                    errors[row] = failure(f"the logits processor {type(processor).__name__}", error)


def _groups(pending: list[int], at: dict[int, int], rows: Sequence[Row]) -> list[tuple[LogitsProcessor, list[int]]]:
    groups: dict[int, tuple[LogitsProcessor, list[int]]] = {}
    for row in pending:
        processor = rows[row].sample.processors[at[row]]
        key = id(processor) if is_shared(processor) else -1 - row
        groups.setdefault(key, (processor, []))[1].append(row)
    return list(groups.values())


def _call(processor: Callable[..., torch.Tensor], tokens: list[int] | None, scores: torch.Tensor) -> torch.Tensor:
    """Call a processor with scores `[rows, vocabulary]`. `tokens` are those of its only row, None of several rows."""
    shape = (len(scores), 0) if tokens is None else (1, len(tokens))
    ids = torch.tensor(tokens or [], dtype=torch.long, device=scores.device).reshape(shape)
    processed = processor(ids, scores)
    if not isinstance(processed, torch.Tensor) or processed.shape != scores.shape:
        raise InternalError(f"{type(processor).__name__} did not return scores of shape {tuple(scores.shape)}")
    return processed


def is_shared(processor: LogitsProcessor) -> bool:
    """Return whether samples can share a processor, because it has no state and does not look at the tokens."""
    return type(processor) in _OF_SCORES_ONLY


def tokens_of_processors(processors: Sequence[LogitsProcessor]) -> list[int]:
    """Return the token ids that the library's own processors name, such as forced or suppressed tokens. Others, and
    classes that are derived from the library's, raise in their request if they meet a token that does not exist."""
    named: list[int] = []
    for processor in processors:
        if type(processor).__module__ == LogitsProcessor.__module__:
            named += _flat(getattr(processor, _TOKENS_OF.get(type(processor).__name__, ""), ()))
    return named


def _flat(values: Any) -> Iterator[int]:
    """Yield the token ids of an id, a tensor, a sequence of these, or the keys of a mapping."""
    if isinstance(values, torch.Tensor):
        values = values.tolist()
    if isinstance(values, int | np.integer):
        yield int(values)
    else:
        for value in values:
            yield from _flat(value)


def may_speculate(sample: Sample) -> bool:
    """Return whether one step can verify several tokens, which processors with a state of their own prevent."""
    return all(map(is_shared, sample.processors))


def own_processors(processors: Sequence[LogitsProcessor]) -> tuple[LogitsProcessor, ...]:
    """Return the processors of one sample. Processors that may have state are copied.

    Raises InvalidArgumentError if one cannot be copied.
    """
    try:
        return tuple(one if is_shared(one) else copy.deepcopy(one) for one in processors)
    except Exception as error:  # foreign code
        raise InvalidArgumentError(f"cannot be copied: {error!r}", field="logits_processors") from error
