"""One generated sequence: its tokens, its text, and when it ends."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple

from transformers import LogitsProcessor, PreTrainedTokenizerBase

from kvservice.engines.params import CompletionOutput, SamplingParams, TokenLogprob
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


# ---- text of a growing sequence of tokens, and stop strings in it


# Tokens of a window: those that are kept at least, after how many more it is shortened, and when text must go.
_KEPT: Final = 8
_SHORTEN_EVERY: Final = 16
_MAX_WINDOW: Final = 64
# Characters of text that was given already by which a shortened window is recognised.
_OVERLAP: Final = 4
_INCOMPLETE: Final = "\ufffd"
# The end of a text that `clean_up_tokenization_spaces` may yet change: " n" in "do n" before "'t", and a quote that was
# between spaces, because a point takes away the space before it.
_UNCLEAN: Final = re.compile(r"(?: (?:n? ?'?|'[vr])|')\Z")
_LONGEST_UNCLEAN: Final = len(" n '")
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer:
    """Decodes tokens one after the other. The parts joined are what the tokenizer's `decode` makes of all tokens.

    The text of an output is what `decode(prompt + output)` has after the longest prefix that it shares with
    `decode(prompt)`. So it continues the prompt's text, with a space before its first word; a character that the prompt
    begins and the output completes is the output's.

    Each token decodes a window of the last tokens, at most about 70 of them. Text of the window is given when no later
    token can change it. What may change is the last character if it is incomplete, what `clean_up_tokenization_spaces`
    may join with the next word, and a run of SentencePiece's byte tokens: `decode` makes replacement characters of the
    whole run if it is not valid UTF-8. A run that is valid after 64 tokens is given as it is. Of a prompt, the last 31
    tokens are looked at, 62 if those begin in a run of byte tokens, and more if they have no text.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        # A tokenizer of the user's own may have no more than `encode` and `decode`.
        self._name_of = getattr(tokenizer, "convert_ids_to_tokens", None)
        self._cleans_up = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._window = self._context(prompt_ids)
        self._text = self._decode(self._window)
        # Text of the prompt in the window, until the output's text differs from it or follows it.
        self._prompt_text = self._text
        # Number of characters of the window's text that were given already, or that are the prompt's.
        self._num_given = len(self._text)
        # Bytes of the run of byte tokens at the end, up to the first that makes it invalid, and where its text begins.
        self._run, run_tokens = self._last_run()
        self._run_start = len(self._decode(self._window[:-run_tokens])) if run_tokens else 0
        if len(self._window) >= _MAX_WINDOW:
            self._shorten()

    def add(self, token_id: int) -> str:
        """Return the text that is final with this token; it may be empty."""
        before, byte = self._text, self._byte(token_id)
        self._window.append(token_id)
        self._text = self._decode(self._window)
        if byte is not None:
            if not self._run:
                self._run_start = len(before)
            if not _is_invalid(self._run):
                self._run.append(byte)
        elif self._text != before:  # a token that is left out does not end a run
            self._run.clear()
        text = self._take(self._final_end())
        length = len(self._window)
        if length >= _MAX_WINDOW:
            text += self._release()
        elif length > _SHORTEN_EVERY and length % _SHORTEN_EVERY == 0:
            self._shorten()
        return text

    @property
    def pending(self) -> str:
        """The text after that given so far if no more tokens follow, without an incomplete character."""
        return "" if self._text.endswith(_INCOMPLETE) else self._text[self._start(len(self._text)) :]

    def flush(self) -> str:
        """Return the rest of the text, with replacement characters for incomplete ones."""
        return self._take(len(self._text))

    def _take(self, end: int) -> str:
        start = self._start(end)
        if start < end:
            self._prompt_text = ""
        self._num_given = max(start, end)
        return self._text[start:end]

    def _start(self, end: int) -> int:
        """Return where new text begins, given that the window's text is final up to `end`."""
        if self._prompt_text:
            return _num_shared(self._prompt_text, self._text[:end])
        return self._num_given

    def _final_end(self) -> int:
        """Return the end of the text that no later token changes."""
        end = len(self._text)
        if self._run and not _is_invalid(self._run):
            end = self._run_start
        elif self._text.endswith(_INCOMPLETE):
            end -= 1
        if self._cleans_up:
            unclean = _UNCLEAN.search(self._text, max(0, end - _LONGEST_UNCLEAN), end)
            end = unclean.start() if unclean is not None else end
        return end if self._prompt_text else max(end, self._num_given)

    def _release(self) -> str:
        """Return the text of a window that is too long, a run of bytes at the end of a character if possible."""
        if self._text.endswith(_INCOMPLETE) and len(self._window) < _MAX_WINDOW + _KEPT:
            return ""
        text = self.flush()
        self._run.clear()
        if not self._shorten():
            self._move_to(self._window[-_KEPT:])
        return text

    def _shorten(self) -> bool:
        """Drop tokens of the window, if it ends in the same text without them. Returns whether there are such."""
        end = self._text[max(0, self._num_given - _OVERLAP) :]
        for window in self._shorter_windows():
            text = self._decode(window)
            if text.endswith(end):
                self._move_to(window, text)
                return True
        return False

    def _move_to(self, window: list[int], text: str | None = None) -> None:
        text = self._decode(window) if text is None else text
        given, shift = self._num_given, len(text) - len(self._text)
        self._num_given = max(0, given + shift)
        if self._prompt_text:
            self._prompt_text = text[: self._num_given] + self._prompt_text[given:]
        self._window, self._text, self._run_start = window, text, self._run_start + shift

    def _shorter_windows(self) -> Iterator[list[int]]:
        """Yield windows that may do. One of the first four begins with a whole character, if bytes are tokens. The last
        ones keep what has no text, and the byte that makes a long run invalid."""
        if self._num_given:
            for size in (*range(_KEPT, _KEPT + 4), 2 * _KEPT, 3 * _KEPT):
                yield self._window[-size:]
        for head in (_KEPT, 2 * _KEPT):
            yield self._window[:head] + self._window[-_KEPT:]

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return the end of the prompt: tokens with text that begin outside of a run of bytes, if there are such."""
        size = 2 * _SHORTEN_EVERY - 1
        while size < len(prompt_ids):
            in_run = self._byte(prompt_ids[-size]) is not None and 2 * size < _MAX_WINDOW
            if not in_run and self._decode(prompt_ids[-size:]):
                break
            size += size
        return list(prompt_ids[-size:])

    def _last_run(self) -> tuple[bytearray, int]:
        """Return the bytes of the run at the window's end, and its number of tokens, with those that are left out."""
        run, num_tokens = bytearray(), 0
        for count, token_id in enumerate(reversed(self._window), 1):
            byte = self._byte(token_id)
            if byte is not None:
                run.append(byte)
                num_tokens = count
            elif self._decode([token_id]):
                break
        run.reverse()
        return run, num_tokens

    def _byte(self, token_id: int) -> int | None:
        """Return the byte that a token of SentencePiece stands for, if it is one."""
        name = self._name_of(token_id) if self._name_of is not None else None
        found = _BYTE_TOKEN.fullmatch(name) if isinstance(name, str) else None
        return int(found[1], 16) if found is not None else None

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=self._skip_special_tokens))


def _num_shared(one: str, other: str) -> int:
    """Return the length of the longest prefix that two texts share."""
    differing = (at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return next(differing, min(len(one), len(other)))


def _is_invalid(run: bytearray) -> bool:
    """Return whether bytes are no UTF-8, whatever follows them."""
    try:
        run.decode()
    except UnicodeDecodeError as error:
        return error.reason != "unexpected end of data"
    return False


def find_stop(text: str, num_new: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """Return (position, stop string) of the first stop string that ends within the last `num_new` characters."""
    found = None
    for stop in stops:
        at = text.find(stop, max(0, len(text) - num_new - len(stop) + 1))
        if at >= 0 and (found is None or at < found[0]):
            found = at, stop
    return found
