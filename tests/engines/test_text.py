"""The text of an output is what the tokenizer makes of all its tokens, whatever its kind, and its parts cost little."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import pytest
import torch
from each_row import each_row
from known_logits import Scripted, byte_tokenizer, small_config
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from kvservice.engines import LLM, SamplingParams
from kvservice.engines.samples import Detokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁the", "▁n", "s", "'", "▁'", "▁▁", "é", "日", "\ufffd", ".", "▁."]


def numbered(tokens: Sequence[str]) -> dict[str, int]:
    return {token: at for at, token in enumerate(tokens)}


def finished(tokenizer: Tokenizer, clean_up: bool = False) -> PreTrainedTokenizerFast:
    """Add special and other tokens."""
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.add_tokens(["<tool>", " two words "])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=clean_up
    )


def byte_level(clean_up: bool) -> PreTrainedTokenizerFast:
    """Characters have one to four tokens, and some tokens have parts of two characters."""
    letters = sorted(byte_tokenizer().get_vocab())
    pieces = ["ðŁ", "ĻĤ", "ĤðŁ", "âĺ", "ï¿", "½", "Ġn", "the"]
    tokenizer = Tokenizer(BPE(numbered([*letters, *(one for one in pieces if one not in letters)]), []))
    tokenizer.decoder = decoders.ByteLevel()
    return finished(tokenizer, clean_up)


def sentencepiece(strips: bool, clean_up: bool = False) -> PreTrainedTokenizerFast:
    """Llama's decoder, or Gemma's, which leaves the first space."""
    tokenizer = Tokenizer(BPE(numbered([*WORDS, *BYTES]), [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    return finished(tokenizer, clean_up)


def unigram(byte_fallback: bool) -> PreTrainedTokenizerFast:
    tokens = [*WORDS, *BYTES] if byte_fallback else WORDS
    tokenizer = Tokenizer(Unigram([(token, -1.0) for token in ["<unk>", *tokens]], 0, byte_fallback))
    metaspace = decoders.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), metaspace]) if byte_fallback else metaspace
    return finished(tokenizer, clean_up=not byte_fallback)


def wordpiece(clean_up: bool, decoder_cleans: bool) -> PreTrainedTokenizerFast:
    words = ["[UNK]", "it", "'", "s", "do", "n", "t", "##t", "##'", ".", "?", "m", "ve", "##e", "r", "##r", "re", "x"]
    tokenizer = Tokenizer(WordPiece(numbered(words), unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=decoder_cleans)
    return finished(tokenizer, clean_up)


def with_suffixes() -> PreTrainedTokenizerFast:
    tokens = ["a</w>", "b", "c</w>", "d"]
    tokenizer = Tokenizer(BPE(numbered(tokens), [], end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder()
    return finished(tokenizer)


def of_words() -> PreTrainedTokenizerFast:
    return finished(Tokenizer(WordLevel(numbered(["the", "it", "'", "s", "n't"]), unk_token="the")), clean_up=True)


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level BPE": lambda: byte_level(False),
    "byte-level BPE, cleaned up": lambda: byte_level(True),
    "SentencePiece, first space removed": lambda: sentencepiece(True),
    "SentencePiece": lambda: sentencepiece(False),
    "Unigram, cleaned up": lambda: unigram(False),
    "Unigram with bytes": lambda: unigram(True),
    "WordPiece": lambda: wordpiece(False, False),
    "WordPiece, cleaned up": lambda: wordpiece(True, True),
    "WordPiece, cleaned up by the library alone": lambda: wordpiece(True, False),
    "BPE with suffixes": with_suffixes,
    "words": of_words,
}


def expected_text(tokenizer: Any, prompt: list[int], output: list[int], skip: bool) -> str:
    """Return the part of the whole text that follows its common prefix with the prompt's text."""
    before, whole = (tokenizer.decode(ids, skip_special_tokens=skip) for ids in (prompt, prompt + output))
    shared = 0
    while whole[: shared + 1] == before[: shared + 1] and shared < len(whole):
        shared += 1
    return whole[shared:]


def parts(tokenizer: Any, prompt: list[int], output: list[int], skip: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    return [*(detokenizer.add(token) for token in output), detokenizer.flush()]


def random_ids(chosen: random.Random, vocabulary: int, length: int) -> list[int]:
    """All tokens are as likely, or a few ones are chosen from, which then are often repeated."""
    few = [chosen.randrange(vocabulary) for _ in range(chosen.choice((1, 2, 3, 5, 20, 200)))]
    return [chosen.choice(few) for _ in range(length)]


def test_the_parts_of_random_tokens_are_the_whole() -> None:
    with each_row() as row:
        for kind, make in KINDS.items():
            tokenizer, chosen = make(), random.Random(7)
            with row(kind):
                for case in range(60):
                    skip = case % 2 == 0
                    prompt = random_ids(chosen, len(tokenizer), chosen.choice((0, 1, 2, 5, 30)))
                    output = random_ids(chosen, len(tokenizer), chosen.choice((1, 3, 10, 60, 120)))
                    found = "".join(parts(tokenizer, prompt, output, skip))
                    assert found == expected_text(tokenizer, prompt, output, skip), (case, prompt, output)


class Counting:
    """A tokenizer that counts the calls of decode, and the tokens in them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.calls = self.tokens = self.longest = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, token_ids: list[int], **options: Any) -> str:
        self.calls, self.tokens = self.calls + 1, self.tokens + len(token_ids)
        self.longest = max(self.longest, len(token_ids))
        text: str = self._tokenizer.decode(token_ids, **options)
        return text


def test_each_token_costs_as_much_as_any_other() -> None:
    """Each is decoded in a window that stays small, and its text does not wait for more than that."""
    llama, bytes_alone, pieces, length = sentencepiece(True), byte_level(False), wordpiece(True, True), 600
    rows: list[tuple[str, Any, list[str], list[str]]] = [
        ("letters", bytes_alone, [], ["the"]),
        ("bytes that are no character", bytes_alone, [], ["ð"]),
        ("a byte of a character, again and again", llama, [], ["<0xF0>"]),
        ("bytes after a wrong one", llama, ["<0xFF>"], ["<0x41>"]),
        ("whole characters of bytes", llama, [], ["<0xE2>", "<0x98>", "<0x83>"]),
        ("words that may be joined", pieces, [], ["do", "n", "'", "t"]),
        ("quotes", pieces, [], ["'"]),
        ("special tokens", bytes_alone, [], ["<s>"]),
    ]
    with each_row() as row:
        for name, tokenizer, first, repeated in rows:
            output = tokenizer.convert_tokens_to_ids([*first, *repeated * length])[:length]
            for prompt in ([], [tokenizer.bos_token_id] * 100, output[:1]):
                with row((name, len(prompt))):
                    counting = Counting(tokenizer)
                    found = parts(counting, prompt, output, True)
                    assert "".join(found) == expected_text(tokenizer, prompt, output, True)
                    assert counting.calls <= 2 * length
                    assert counting.longest <= 132, "the prompt without text, and the first window after it"
                    assert counting.tokens <= 80 * length
                    streaks = [len(list(streak)) for text, streak in groupby(found) if not text]
                    assert repeated == ["<s>"] or max(streaks, default=0) <= 72


@pytest.fixture(scope="module")
def says(small_daemon: Any) -> Callable[..., Any]:
    """Generate these tokens after a prompt. Returns the output, and the texts that were seen before it ended."""

    def generate(tokenizer: Any, prompt: list[int], output: list[int], **params: Any) -> tuple[Any, list[str]]:
        torch.manual_seed(0)
        model = LlamaForCausalLM(small_config(len(tokenizer), eos_token_id=None)).eval()
        given = SamplingParams(
            **{"max_tokens": len(output)} | params, logits_processors=[Scripted(len(prompt), output)]
        )
        seen = [""]

        class View:
            def update(self, requests: Any, _: object) -> None:
                seen.append(requests[0].output().outputs[0].text)

        with LLM(model, tokenizer, address=small_daemon.address) as llm:
            (done,) = llm.generate([prompt], given, progress=View())
        assert done.error is None
        return done.outputs[0], seen

    return generate


def test_a_character_that_the_prompt_begins_is_the_outputs(says) -> None:
    tokenizer: Any = byte_level(False)
    prompt, output = tokenizer.convert_tokens_to_ids(["the", "ðŁ"]), tokenizer.convert_tokens_to_ids(["ĻĤ", "the"])
    found, _ = says(tokenizer, prompt, output)
    assert tokenizer.decode(prompt) + "|" + found.text == "the\ufffd|🙂the"
    llama: Any = sentencepiece(True)
    prompt, output = llama.convert_tokens_to_ids(["▁the", "<0xE2>"]), llama.convert_tokens_to_ids(["<0x98>", "<0x83>"])
    assert says(llama, prompt, [*output, *llama.convert_tokens_to_ids(["▁the"])])[0].text == "☃ the"
    never = llama.convert_tokens_to_ids(["▁the", "s"])
    assert says(llama, prompt, never)[0].text == " thes", "what the prompt left open stays with it"


def test_what_clean_up_joins_loses_nothing(says) -> None:
    pieces, spaces = wordpiece(True, False), unigram(False)
    with each_row() as row:
        for tokenizer, prompt, words, text in (
            (pieces, ["x"], ["it", "'", "s", "x"], " it's x"),
            (pieces, ["x"], ["do", "n", "'", "t", "?"], " don't?"),
            (pieces, ["it", "'"], ["s", "x"], "'s x"),
            (pieces, ["it", "'"], ["x"], "'x"),
            (pieces, ["x"], ["it", "'"], " it '"),
            (spaces, ["s"], ["▁'", "▁", "."], " '."),
        ):
            with row((prompt, words)):
                ids = tokenizer.convert_tokens_to_ids
                found, seen = says(tokenizer, ids(prompt), ids(words))
                assert found.text == text
                assert all(text.startswith(one) for one in seen)


def test_stop_strings_are_found_at_once_wherever_the_parts_meet(says) -> None:
    """Also in text that a later token could change: a line break that is a byte, a quote before an s."""
    llama, pieces = sentencepiece(True), wordpiece(True, False)
    for tokenizer, words, stop, text, used in (
        (llama, ["▁the", "<0x0A>", "<0x0A>", "▁the"], "\n\n", " the", 3),
        (llama, ["▁the", "<0x0A>", "▁the"], "e\n", " th", 2),
        (llama, ["▁the", "<0xE2>", "<0x98>", "<0x83>", "▁n"], "☃", " the", 4),
        (llama, ["s", "<0x41>", "s", "▁n"], "AsX", "sAs n", 4),
        (pieces, ["it", "'", "x"], "it '", " ", 2),
        (pieces, ["it", "'", "s", "x"], "t's", " i", 3),
    ):
        ids = tokenizer.convert_tokens_to_ids
        found, seen = says(tokenizer, ids([words[0]]), ids(words), stop=stop)
        assert (found.text, len(found.token_ids)) == (text, used), (words, stop)
        assert all(text.startswith(one) for one in seen), (words, stop)
