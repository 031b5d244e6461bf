"""What a request asks for and what it gets: sampling parameters and results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

import numpy as np
from transformers import LogitsProcessor

from kvservice.errors import InvalidArgumentError

_MAX_WIDTH: Final = 256
_MAX_TOKENS: Final = 2**31 - 1
_MAX_LOGPROBS: Final = 1024
_MAX_STOPS: Final = 64
_MAX_STOP_CHARACTERS: Final = 4096
_MAX_PROCESSORS: Final = 64
_MIN_TEMPERATURE: Final = 1e-4
# A logit with this bias is still finite in float32.
_MAX_BIAS: Final = 1e38
# Parameters that only samples use. Beams must leave them at their defaults.
_OF_SAMPLES: Final = ("top_k", "top_p", "min_p", "seed", "stop", "logprobs", "best_of")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters that decide how a request's tokens are chosen and where its generation ends.

    `n`: outputs of the prompt. `best_of`: samples that are generated for them; the n with the highest cumulative log
    probability are returned. `temperature` 0 picks the likeliest token. `top_k` (0: all), `top_p` and `min_p` limit the
    tokens that can be sampled, in this order, as in transformers. `seed` makes the samples repeatable: sample i of a
    seed is the same in every batch and after every restart. None draws a seed.

    `repetition_penalty` divides positive and multiplies negative logits of tokens of the prompt and the output.
    `presence_penalty` and `frequency_penalty` are subtracted from logits of tokens of the output, once and for each
    occurrence. `logit_bias` is added to the logits of tokens. `logits_processors` are transformers' LogitsProcessors;
    they run after the penalties and before the temperature. Each sample gets its own copy.

    Generation ends at a token of the model's end of sequence (unless `ignore_eos`), at one of `stop_token_ids`, where
    the text contains one of the `stop` strings, and at `max_tokens` tokens (None: at the model's length limit), but not
    for the first three before `min_tokens` tokens. The text ends before what stopped it, unless
    `include_stop_str_in_output`. `skip_special_tokens` leaves special tokens out of the text.

    `logprobs`: the log probabilities of the token and of the so many likeliest tokens, before penalties and processors.

    `beam_width` above 1 selects beam search, as in transformers: `n` of the beams are returned, scored by
    log probability / length ** `length_penalty`; `early_stopping` ends it as soon as `beam_width` beams are complete.

    Of a model's generation_config only the tokens of its end of sequence are used. Other settings in it, such as
    suppress_tokens or repetition_penalty, have no effect: give them here, or as logits processors.

    Raises InvalidArgumentError naming the field.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    priority: int = 0
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, np.generic):
                object.__setattr__(self, one.name, value.item())
        object.__setattr__(self, "stop", _stops(self.stop))
        for name in ("stop_token_ids", "logits_processors"):
            object.__setattr__(self, name, _listed(name, getattr(self, name)))
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise InvalidArgumentError("must map token ids to numbers", field="logit_bias")
        self._check_counts()
        self._check_numbers()
        self._check_tokens()
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "early_stopping"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgumentError("must be true or false", field=name)
        if self.beam_width > 1:
            self._check_beams()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters with these values. Raises InvalidArgumentError also for names that do not exist."""
        known = {field.name for field in fields(cls)}
        for name in values:
            if name not in known:
                raise InvalidArgumentError("is not a sampling parameter of this engine", field=str(name))
        return cls(**values)

    @property
    def width(self) -> int:
        """Number of sequences that are generated for the prompt."""
        return self.beam_width if self.beam_width > 1 else self.best_of or self.n

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def changes_logits(self) -> bool:
        """Return whether the logits are changed before the temperature."""
        neutral = self.repetition_penalty == 1 and self.presence_penalty == 0 and self.frequency_penalty == 0
        return not neutral or bool(self.logit_bias or self.logits_processors or self.min_tokens)

    @property
    def needs_logprobs(self) -> bool:
        return self.logprobs is not None or (self.best_of or 0) > self.n

    def _check_counts(self) -> None:
        _whole("n", self.n, 1, _MAX_WIDTH)
        _whole("beam_width", self.beam_width, 1, _MAX_WIDTH)
        if self.best_of is not None:
            _whole("best_of", self.best_of, self.n, _MAX_WIDTH)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, _MAX_TOKENS)
        _whole("min_tokens", self.min_tokens, 0, _MAX_TOKENS if self.max_tokens is None else self.max_tokens)
        _whole("top_k", self.top_k, 0, _MAX_TOKENS)
        _whole("priority", self.priority, -(2**31), 2**31 - 1)
        if self.seed is not None:
            _whole("seed", self.seed, 0, 2**64 - 1)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, _MAX_LOGPROBS)

    def _check_numbers(self) -> None:
        for name, lowest, highest in (
            ("temperature", 0.0, 1e6),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 0.0, 1e6),
            ("presence_penalty", -1e6, 1e6),
            ("frequency_penalty", -1e6, 1e6),
            ("length_penalty", -30.0, 30.0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= highest:
                raise InvalidArgumentError(f"must be a number from {lowest:g} to {highest:g}", field=name)
        if 0 < self.temperature < _MIN_TEMPERATURE:
            raise InvalidArgumentError(f"must be 0 or at least {_MIN_TEMPERATURE:g}", field="temperature")
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0:
                raise InvalidArgumentError("must be above 0", field=name)

    def _check_tokens(self) -> None:
        if len(self.stop_token_ids) > _MAX_STOPS:
            raise InvalidArgumentError(f"has more than {_MAX_STOPS} tokens", field="stop_token_ids")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, _MAX_TOKENS)
        for token, bias in (self.logit_bias or {}).items():
            _whole("logit_bias", token, 0, _MAX_TOKENS)
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not bias <= _MAX_BIAS:
                raise InvalidArgumentError(f"must map token ids to numbers up to {_MAX_BIAS:g}", field="logit_bias")
        if len(self.logits_processors) > _MAX_PROCESSORS:
            raise InvalidArgumentError(f"has more than {_MAX_PROCESSORS} processors", field="logits_processors")
        for processor in self.logits_processors:
            if not isinstance(processor, LogitsProcessor):
                raise InvalidArgumentError("must be LogitsProcessors of transformers", field="logits_processors")

    def _check_beams(self) -> None:
        if self.n > self.beam_width:
            raise InvalidArgumentError(f"must be at most beam_width = {self.beam_width}", field="n")
        if self.temperature not in (0, 1):
            raise InvalidArgumentError("beams are not sampled: leave it at 1", field="temperature")
        defaults = {field.name: field.default for field in fields(self)}
        for name in _OF_SAMPLES:
            if getattr(self, name) != defaults[name]:
                raise InvalidArgumentError("is not supported with beam_width above 1", field=name)


def _listed(field: str, values: object) -> tuple[Any, ...]:
    """Return the values of a parameter that is a sequence; None is an empty one."""
    if values is None:
        return ()
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise InvalidArgumentError("must be a sequence", field=field)
    return tuple(value.item() if isinstance(value, np.generic) else value for value in values)


def _stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else _listed("stop", stop)
    if len(strings) > _MAX_STOPS:
        raise InvalidArgumentError(f"has more than {_MAX_STOPS} strings", field="stop")
    for one in strings:
        if not isinstance(one, str) or not 1 <= len(one) <= _MAX_STOP_CHARACTERS:
            raise InvalidArgumentError(f"must be strings of 1 to {_MAX_STOP_CHARACTERS} characters", field="stop")
    return strings


def _whole(field: str, value: object, lowest: int, highest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise InvalidArgumentError(f"must be a whole number from {lowest} to {highest}", field=field)


# ---- results of requests


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of a token, its rank (1: the likeliest), and its text if there is a tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated continuation of a prompt.

    `text` continues the prompt's text: with the space before its first word, and with a character that the prompt
    begins. It is empty without a tokenizer. `logprobs` has for each token a dictionary by token id: the token
    itself, and the likeliest ones. `cumulative_logprob` is the sum over the tokens, None unless log probabilities were
    computed. `finish_reason` is None until it is complete, then "stop", "length", "abort" or "error"; `stop_reason` is
    the stop string or stop token id that ended it, None for the end of sequence.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: tuple[dict[int, TokenLogprob], ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """State of a request. `prompt` is None if it was given as token ids.

    `error` is the exception that ended it, if one did, for example of one of its logits processors or of the tokenizer;
    its `__notes__` name what raised it.
    `num_proposed_tokens` and `num_accepted_tokens` are of speculative decoding.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    error: Exception | None = None
    num_proposed_tokens: int = field(default=0, compare=False)
    num_accepted_tokens: int = field(default=0, compare=False)
