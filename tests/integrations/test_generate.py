"""The library's generation loops with K/V in the daemon: prefix cache, beams, candidates, chunks, conversations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cache_argument import cached
from transformers import PreTrainedModel

from kvservice.client import Step
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.transformers import KVServiceCache


@contextmanager
def computed_shapes(model: PreTrainedModel) -> Iterator[list[tuple[int, ...]]]:
    """Record the rows and columns that each call of the model computes."""
    shapes: list[tuple[int, ...]] = []
    weight, embedding = model.get_input_embeddings().weight, torch.nn.functional.embedding

    def recording(input_ids: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        if arguments[0] is weight:
            shapes.append(tuple(input_ids.shape))
        return embedding(input_ids, *arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        # Neither a hook nor a method of the model, because these make the K/V private.
        patched.setattr(torch.nn.functional, "embedding", recording)
        yield shapes


@pytest.fixture
def written(monkeypatch) -> list[int]:
    """Record the number of tokens that layer 0 writes in each step."""
    counts: list[int] = []
    attend = Step.attend

    def counting(step, layer, *tensors, **options):
        if layer == 0:
            counts.append(step.num_tokens)
        return attend(step, layer, *tensors, **options)

    monkeypatch.setattr(Step, "attend", counting)
    return counts


def generate(model, kv, **arguments):
    return model.generate(**arguments, do_sample=False, **cached(KVServiceCache(kv)))


def test_cached_prefixes_are_neither_computed_nor_written_again(llama, batch, written) -> None:
    arguments = {**batch, "max_new_tokens": 4}
    expected = llama.reference.generate(**arguments, do_sample=False)
    kv = llama.new_session()
    assert torch.equal(generate(llama.model, kv, **arguments), expected)
    # Prompts of 18, 13, 6 tokens have 16, 12, 4 tokens in full blocks. The last 3 of 4 new tokens take a step each.
    assert written == [18 + 13 + 6, 3, 3, 3]
    written.clear()
    with computed_shapes(llama.model) as shapes:
        assert torch.equal(generate(llama.model, kv, **arguments), expected)
    assert shapes == [(1, 2 + 1 + 2), (3, 1), (3, 1), (3, 1)]
    assert written == [2 + 1 + 2, 3, 3, 3]


def test_prompts_are_computed_without_padding(llama, batch, written) -> None:
    kv = llama.new_session()
    first = {name: tensor[:1] for name, tensor in batch.items()}
    generate(llama.model, kv, **first, max_new_tokens=1)
    written.clear()
    with computed_shapes(llama.model) as shapes:
        tokens = generate(llama.model, kv, **batch, max_new_tokens=4)
    assert shapes == [(1, 2 + 13 + 6), (3, 1), (3, 1), (3, 1)]
    assert written == [2 + 13 + 6, 3, 3, 3]
    assert torch.equal(tokens, llama.reference.generate(**batch, max_new_tokens=4, do_sample=False))


def test_columns_that_one_row_needs_are_computed_for_all_rows(llama, batch, positions) -> None:
    """Calls of the model that `generate` would not make keep their shape, without columns that no row needs."""
    first = {name: tensor[:1] for name, tensor in batch.items()}
    for unlike_generate in ({"return_dict": None}, {"logits_to_keep": 2}):
        kv = llama.new_session()
        generate(llama.model, kv, **first, max_new_tokens=1)
        inputs = {**batch, **positions(llama.model, batch["attention_mask"]), "logits_to_keep": 1, "return_dict": True}
        inputs |= unlike_generate
        with computed_shapes(llama.model) as shapes:
            logits = llama.model(**inputs, **cached(KVServiceCache(kv))).logits
        # The second row starts in column 5, and none of it is cached.
        assert shapes == [(3, 13)], unlike_generate
        torch.testing.assert_close(logits, llama.reference(**inputs).logits, atol=1e-3, rtol=0)


def test_rows_that_end_with_padding_are_refused_if_their_last_logits_are_wanted(llama, batch, positions) -> None:
    mask = batch["attention_mask"].flip(1)
    inputs = {"input_ids": batch["input_ids"].flip(1), "attention_mask": mask}
    kv = llama.new_session()
    for share in (True, False):
        for max_new_tokens in (1, 3):
            with KVServiceCache(kv, share=share) as cache, pytest.raises(InvalidArgumentError, match="row 1 ends with"):
                llama.model.generate(**inputs, max_new_tokens=max_new_tokens, **cached(cache))
    inputs |= positions(llama.model, mask)
    expected = llama.reference(**inputs).logits[mask.bool()]
    for _ in range(2):
        logits = llama.model(**inputs, **cached(KVServiceCache(kv))).logits[mask.bool()]
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)


def test_all_logits_are_computed_if_asked_for(llama, batch, positions) -> None:
    kv = llama.new_session()
    mask = batch["attention_mask"]
    inputs = {**batch, **positions(llama.model, mask)}
    expected = llama.reference(**inputs).logits[mask.bool()]
    for _ in range(2):
        logits = llama.model(**inputs, **cached(KVServiceCache(kv))).logits[mask.bool()]
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)


def test_hidden_states_are_complete_on_a_cached_prompt(llama, batch) -> None:
    kv = llama.new_session()
    inputs: dict[str, Any] = {"input_ids": batch["input_ids"][:1], "logits_to_keep": 1, "output_hidden_states": True}
    expected = llama.reference(**inputs).hidden_states[-1]
    for _ in range(2):
        actual = llama.model(**inputs, **cached(KVServiceCache(kv))).hidden_states[-1]
        torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


def test_hidden_states_are_complete_where_the_configuration_asks_for_them(llama, batch, monkeypatch) -> None:
    kv = llama.new_session()
    monkeypatch.setattr(llama.model.config, "output_hidden_states", True)
    for _ in range(2):
        output = llama.model(batch["input_ids"][:1], logits_to_keep=1, **cached(KVServiceCache(kv)))
        assert [states.shape[1] for states in output.hidden_states] == [18] * 3


def test_beam_search_forks(llama, batch) -> None:
    kv = llama.new_session()
    arguments = {**batch, "max_new_tokens": 12, "num_beams": 3, "num_return_sequences": 2}
    expected = llama.reference.generate(**arguments, do_sample=False)
    assert torch.equal(generate(llama.model, kv, **arguments), expected)
    rows = kv.describe()
    assert len(rows) == 9, "beams that lost are freed"


def test_parallel_samples(llama, batch) -> None:
    arguments: dict[str, Any] = {**batch, "max_new_tokens": 8, "do_sample": True, "top_k": 0, "num_return_sequences": 2}
    torch.manual_seed(4)
    expected = llama.reference.generate(**arguments)
    torch.manual_seed(4)
    actual = llama.model.generate(**arguments, **cached(KVServiceCache(llama.new_session())))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("with_assistant", [True, False], ids=["assistant", "prompt_lookup"])
def test_assisted_generation_takes_rejected_tokens_back(llama, make_pair, monkeypatch, with_assistant: bool) -> None:
    removed: list[int] = []
    crop = KVServiceCache.crop

    def counted(self: KVServiceCache, count: int) -> None:
        removed.append(-count)
        crop(self, count)

    monkeypatch.setattr(KVServiceCache, "crop", counted)
    # A prompt with repetitions, so that prompt lookup finds candidates.
    ids = torch.tensor([[5, 9, 23, 61, 7, 5, 9, 23, 44, 8, 5, 9]])
    assistant = (
        {"assistant_model": make_pair("llama_mqa").reference} if with_assistant else {"prompt_lookup_num_tokens": 3}
    )
    kv = llama.new_session()
    cache = KVServiceCache(kv)
    expected = llama.reference.generate(ids, max_new_tokens=20, do_sample=False)
    actual = llama.model.generate(ids, max_new_tokens=20, do_sample=False, **cached(cache), **assistant)
    assert torch.equal(actual, expected)
    assert sum(removed) > 0
    (row,) = kv.describe(token_ids=True)
    assert list(row.token_ids) == expected[0, : row.length].tolist()


def test_chunked_prefill(llama, batch, written) -> None:
    """Chunks of 4 columns. The shortest row has only padding in the first three chunks."""
    arguments = {**batch, "max_new_tokens": 4}
    expected = llama.reference.generate(**arguments, do_sample=False)
    assert torch.equal(generate(llama.model, llama.new_session(), **arguments, prefill_chunk_size=4), expected)
    assert written == [4, 4 + 3, 4 + 4, 4 + 4 + 4, 2 + 2 + 2, 3, 3, 3]


def test_a_conversation_goes_on_in_the_same_cache(llama, batch) -> None:
    cache = KVServiceCache(llama.new_session())
    first = llama.model.generate(**batch, max_new_tokens=5, do_sample=False, **cached(cache))
    ids = torch.cat([first, torch.randint(1, 97, (3, 4))], 1)
    mask = torch.cat([batch["attention_mask"], torch.ones(3, 9, dtype=torch.long)], 1)
    arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    with computed_shapes(llama.model) as shapes:
        actual = llama.model.generate(**arguments, **cached(cache))
    assert shapes[0] == (3, 5), "one token of the first answer was not computed yet, and four are new"
    assert torch.equal(actual, llama.reference.generate(**arguments))


def test_the_daemon_knows_the_tokens_without_padding(llama, batch) -> None:
    kv = llama.new_session()
    cache = KVServiceCache(kv)
    tokens = llama.model.generate(**batch, max_new_tokens=5, do_sample=False, **cached(cache))
    for row, length in enumerate((18, 13, 6)):
        info = kv.describe([cache.sequences[row]], token_ids=True)[0]
        assert list(info.token_ids) == tokens[row, 18 - length : -1].tolist()
        assert info.num_computed_tokens == info.length
