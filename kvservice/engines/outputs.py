"""Results of requests."""

from __future__ import annotations

from dataclasses import dataclass, field


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
