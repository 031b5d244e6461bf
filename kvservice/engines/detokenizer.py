"""Text of a growing sequence of tokens, and stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from transformers import PreTrainedTokenizerBase

# Tokens of the prompt that are decoded together with the first tokens of the output.
_NUM_CONTEXT_TOKENS: Final = 6
_MAX_WINDOW_TOKENS: Final = 64
_INCOMPLETE: Final = "\ufffd"


class Detokenizer:
    """Decodes tokens one after the other (the scheme of Hugging Face's text-generation-inference).

    A token's text can depend on the tokens before it, and a character can have several tokens. So a window of tokens is
    decoded with and without the newest ones, and the difference is new text once it ends in a whole character.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._window = list(prompt_ids[-_NUM_CONTEXT_TOKENS:])
        self._num_decoded = len(self._window)

    def add(self, token_id: int) -> str:
        """Return the text that the token completes; it may be empty."""
        self._window.append(token_id)
        return self._take(complete=False)

    def flush(self) -> str:
        """Return the rest of the text, with replacement characters for incomplete ones."""
        return self._take(complete=True)

    def _take(self, complete: bool) -> str:
        text = self._decode(self._window)
        if text.endswith(_INCOMPLETE) and not complete:
            return ""
        before = self._decode(self._window[: self._num_decoded])
        # The tokens of this text are the context of the next ones. Tokens without text, such as skipped ones, are not.
        if len(text) > len(before) or len(self._window) > _MAX_WINDOW_TOKENS:
            del self._window[: self._num_decoded]
        self._num_decoded = len(self._window)
        return text[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens))


def find_stop(text: str, num_new: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """Return (position, stop string) of the first stop string that ends within the last `num_new` characters."""
    found = None
    for stop in stops:
        at = text.find(stop, max(0, len(text) - num_new - len(stop) + 1))
        if at >= 0 and (found is None or at < found[0]):
            found = at, stop
    return found
