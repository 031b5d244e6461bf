"""One generated sequence: its tokens, its text, and when it ends."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from transformers import LogitsProcessor, PreTrainedTokenizerBase

from kvservice.engines.detokenizer import Detokenizer, find_stop
from kvservice.engines.outputs import CompletionOutput, TokenLogprob
from kvservice.engines.params import SamplingParams
from kvservice.errors import InternalError, InvalidArgumentError, KVServiceError


def failure(origin: str, error: BaseException) -> Exception:
    """Return the error of a request for an exception of something that it brought, with a note that names this origin.
    Ctrl-C is nobody's failure, and is raised again."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    if not isinstance(error, Exception):
        return InternalError(f"{origin} raised {error!r}")
    note = f"raised by {origin}"
    if not isinstance(error, KVServiceError) and note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    return error


def error_text(error: Exception) -> str:
    """Return what is to be said of an error of a request: what happened, and what raised it."""
    if isinstance(error, KVServiceError):
        return str(error)
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # an exception whose text is an error, too
        text = type(error).__name__
    return "; ".join([text, *getattr(error, "__notes__", ())])


class Sample:
    """A generated sequence of a request.

    `token_ids` are the prompt and the generated tokens. `ending_ids` are the tokens that end it. `stream` is the state
    of its random numbers, which with the position determines each of them. `unusable_ids` are tokens after which the
    model computes no other.
    """

    def __init__(
        self,
        sequence_id: int,
        index: int,
        prompt_ids: list[int],
        params: SamplingParams,
        max_tokens: int,
        eos_ids: Collection[int],
        stream: int,
        tokenizer: PreTrainedTokenizerBase | None,
        processors: tuple[LogitsProcessor, ...] = (),
        unusable_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.sequence_id, self.index, self.params, self.stream = sequence_id, index, params, stream
        self.unusable_ids = unusable_ids
        self.processors = processors
        self.token_ids = list(prompt_ids)
        self.prompt_length, self.max_tokens = len(prompt_ids), max_tokens
        self.eos_ids = frozenset() if params.ignore_eos else frozenset(eos_ids)
        self.ending_ids = self.eos_ids | frozenset(params.stop_token_ids)
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.logprobs: list[dict[int, TokenLogprob]] = []
        self.cumulative_logprob = 0.0
        # Draft tokens that follow, which the next step verifies.
        self.proposals: list[int] = []
        # Index of the sample whose K/V a beam continues.
        self.parent = index
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer and Detokenizer(tokenizer, prompt_ids, params.skip_special_tokens)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def generated_ids(self) -> list[int]:
        return self.token_ids[self.prompt_length :]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def tokens_of(self, start: int, stop: int) -> list[int]:
        """Return the tokens at positions start <= p < stop. The proposals follow the tokens, and zeros follow them: the
        tokens that are reported for a sample that was aborted. What follows a finished sample means nothing, so that
        it has any token there that the model takes."""
        if stop <= len(self.token_ids):
            tokens = self.token_ids[start:stop]
        else:
            tokens = [*self.token_ids, *self.proposals][start:stop]
            tokens += [0] * (stop - start - len(tokens))
        if self.finished and self.unusable_ids:
            usable = min({0, 1} - self.unusable_ids)
            tokens = [usable if token in self.unusable_ids else token for token in tokens]
        return tokens

    @property
    def last_token(self) -> int:
        """The token to report: the one generated last, or 0 if the sample was aborted."""
        return 0 if self.finished or not self.num_generated else self.token_ids[-1]

    def add(self, token_id: int, logprobs: dict[int, TokenLogprob] | None = None) -> None:
        """Append a generated token, and end if it or its text says so.

        Raises InvalidArgumentError for a token that ends nothing and after which the model computes no other, and any
        error of the tokenizer.
        """
        num_generated = self.num_generated + 1
        ends = num_generated >= self.max_tokens or (
            num_generated >= self.params.min_tokens and token_id in self.ending_ids
        )
        if token_id in self.unusable_ids and not ends:
            raise InvalidArgumentError(f"{token_id} is padding, which has no position in this model", field="token_ids")
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.cumulative_logprob += logprobs[token_id].logprob
            if self.params.logprobs is not None:
                self.logprobs.append({token: self._with_text(token, one) for token, one in logprobs.items()})
        may_stop = self.num_generated >= self.params.min_tokens
        if may_stop and token_id in self.ending_ids:
            if self.params.include_stop_str_in_output:
                self._add_text(token_id, may_stop=False)
            self._end("stop", None if token_id in self.eos_ids else token_id)
            return
        self._add_text(token_id, may_stop)
        if not self.finished and self.num_generated >= self.max_tokens:
            self._end("length")

    def abort(self, reason: str = "abort", *, flush: bool = True) -> None:
        """End the sample. Raises errors of the tokenizer; it has ended then, too. Without `flush` it is not asked."""
        if not self.finished:
            self._end(reason, flush=flush)

    def restarted(self, index: int) -> Sample:
        """Return a sample of the same prompt and parameters without generated tokens."""
        prompt_ids = self.token_ids[: self.prompt_length]
        sequence_id = self.sequence_id - self.index + index
        return Sample(
            sequence_id, index, prompt_ids, self.params, self.max_tokens, self.eos_ids, self.stream, self._tokenizer
        )

    def output(self) -> CompletionOutput:
        """Return the state of the sample. While it runs, text that may become part of a stop string is left out."""
        text = self.text
        if not self.finished and self.params.stop and not self.params.include_stop_str_in_output:
            text = text[: max(0, len(text) - max(map(len, self.params.stop)) + 1)]
        return CompletionOutput(
            self.index,
            text,
            tuple(self.generated_ids),
            self.cumulative_logprob if self.params.needs_logprobs else None,
            tuple(self.logprobs) if self.params.logprobs is not None else None,
            self.finish_reason,
            self.stop_reason,
        )

    def _add_text(self, token_id: int, may_stop: bool) -> None:
        """Add the token's text, and end at the first stop string in it, or in what a later token could still change."""
        if self._detokenizer is None:
            return
        text, stops = self._detokenizer.add(token_id), self.params.stop
        self.text += text
        if not (stops and may_stop):
            return
        pending = self._detokenizer.pending
        num_new = len(text) + len(pending)
        start = max(0, len(self.text) - len(text) - max(map(len, stops)) + 1)
        found = find_stop(self.text[start:] + pending, num_new, stops)
        if found is not None:
            at, stop = found
            end = start + at + (len(stop) if self.params.include_stop_str_in_output else 0)
            self.text = (self.text + pending)[:end]
            self._end("stop", stop, flush=False)

    def _end(self, reason: str, stop_reason: int | str | None = None, flush: bool = True) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        if flush and self._detokenizer is not None:
            self.text += self._detokenizer.flush()

    def _with_text(self, token_id: int, logprob: TokenLogprob) -> TokenLogprob:
        if self._tokenizer is None:
            return logprob
        return TokenLogprob(logprob.logprob, logprob.rank, str(self._tokenizer.decode([token_id])))


class Row(NamedTuple):
    """A row of logits for the token after a sample's tokens and `following`, its proposals before that token."""

    sample: Sample
    following: tuple[int, ...] = ()
