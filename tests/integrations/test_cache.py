"""KVServiceCache: refused uses, and the rollback of failed passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_argument import cached
from each_row import each_row

from kvservice.client import Step
from kvservice.errors import FailedPreconditionError, InvalidArgumentError, OutOfBlocksError
from kvservice.integrations.transformers import KVServiceCache


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.arange(1, 25).reshape(2, 12)


def test_reset_frees_the_sequences(llama, ids) -> None:
    kv = llama.new_session()
    cache = KVServiceCache(kv)
    llama.model(ids, **cached(cache))
    assert (len(kv.describe()), cache.get_seq_length(), cache.batch_size) == (2, 12, 2)
    cache.reset()
    assert (kv.describe(), cache.get_seq_length(), cache.batch_size) == ([], 0, -1)
    llama.model(ids[:1], **cached(cache))
    assert cache.get_seq_length() == 12


def test_padding_on_the_right_is_no_token(llama, ids) -> None:
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    kv = llama.new_session()
    cache = KVServiceCache(kv)
    logits = llama.model(ids, attention_mask=mask, **cached(cache)).logits
    expected = llama.reference(ids, attention_mask=mask).logits
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], atol=1e-3, rtol=0)
    assert [info.length for info in kv.describe()] == [12, 7]


def test_a_pass_that_fails_leaves_the_cache_as_it_was(llama, ids, monkeypatch) -> None:
    kv = llama.new_session()
    cache = KVServiceCache(kv)
    llama.model(ids[:, :8], **cached(cache))
    attend = Step.attend

    def fail_in_last_layer(step, layer, *tensors, **options):
        if layer == 1:
            raise OutOfBlocksError("for the test", tier="device", required=1, free=0, total=1)
        return attend(step, layer, *tensors, **options)

    with monkeypatch.context() as broken:
        broken.setattr(Step, "attend", fail_in_last_layer)
        with pytest.raises(OutOfBlocksError):
            llama.model(ids[:, 8:], **cached(cache))
    assert cache.get_seq_length() == 8
    assert [info.length for info in kv.describe()] == [8, 8]
    logits = llama.model(ids[:, 8:], **cached(cache)).logits
    torch.testing.assert_close(logits, llama.reference(ids).logits[:, 8:], atol=1e-3, rtol=0)


def test_a_batch_that_does_not_fit_leaves_nothing_behind(llama) -> None:
    kv = llama.new_session()
    cache = KVServiceCache(kv)
    with pytest.raises(OutOfBlocksError):
        llama.model(torch.ones(12, 100, dtype=torch.long), **cached(cache))
    assert kv.describe() == []
    assert cache.batch_size == -1


def test_a_model_that_left_a_layer_out_is_noticed(llama, ids) -> None:
    layer = llama.model.model.layers[1]
    kv = llama.new_session()
    llama.model.model.layers[1] = llama.reference.model.layers[1]
    with pytest.raises(FailedPreconditionError, match="a layer computes its attention itself"):
        llama.model(ids, **cached(KVServiceCache(kv)))
    llama.model.model.layers[1] = layer
    assert kv.describe() == []


def test_crop_takes_columns_back(llama, ids) -> None:
    cache = KVServiceCache(llama.new_session())
    llama.model(ids, **cached(cache))
    cache.crop(-5)
    assert cache.get_seq_length() == 7
    again = llama.model(ids[:, 7:], **cached(cache)).logits
    torch.testing.assert_close(again, llama.reference(ids).logits[:, 7:], atol=1e-3, rtol=0)


def test_crop_counts_columns_with_and_without_tokens(llama, ids, positions) -> None:
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    inputs = {"attention_mask": mask, **positions(llama.model, mask)}
    with each_row() as row:
        for count in (2, 5, 8):
            with row(count):
                cache = KVServiceCache(llama.new_session())
                llama.model(ids, **inputs, **cached(cache))
                cache.crop(-count)
                kept = 12 - count
                lengths = [sequence.length for sequence in cache.sequences if sequence is not None]
                assert lengths == mask[:, :kept].sum(1).tolist()
                position_ids = inputs["position_ids"][:, kept:]
                more = {"attention_mask": mask, "position_ids": position_ids, **cached(cache)}
                logits = llama.model(ids[:, kept:], **more).logits
                is_new = (torch.arange(12) >= kept) & mask.bool()
                expected = llama.reference(ids, **inputs).logits[is_new]
                torch.testing.assert_close(logits[is_new[:, kept:]], expected, atol=1e-3, rtol=0)


def test_crop_refuses_other_numbers_of_columns(llama, ids) -> None:
    cache = KVServiceCache(llama.new_session())
    llama.model(ids, **cached(cache))
    for count in (3, -13):
        with pytest.raises(InvalidArgumentError, match="from -12 to 0"):
            cache.crop(count)
        assert cache.get_seq_length() == 12, count


def test_selected_rows_are_forks_and_the_others_are_freed(llama, ids) -> None:
    kv = llama.new_session()
    cache = KVServiceCache(kv)
    llama.model(ids, **cached(cache))
    cache.batch_repeat_interleave(2)
    assert [info.length for info in kv.describe()] == [12] * 4
    cache.batch_select_indices(torch.tensor([3, 1, 0]))
    assert len(kv.describe()) == 3
    token = torch.tensor([[5], [6], [7]])
    logits = llama.model(token, **cached(cache)).logits[:, 0]
    expected = llama.reference(torch.cat([ids[[1, 0, 0]], token], 1)).logits[:, -1]
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)


def test_refuses(llama, ids) -> None:
    kv = llama.new_session()
    rows: list[tuple[dict[str, Any], str]] = [
        ({"inputs_embeds": torch.zeros(1, 3, 128)}, "input_ids"),
        ({"input_ids": [[1, 2, 3]]}, "input_ids"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "input_ids"),
        ({"input_ids": ids, "attention_mask": torch.ones(2, 1, 12, 12)}, "attention_mask"),
        ({"input_ids": ids, "attention_mask": torch.ones(2, 5)}, "attention_mask"),
        ({"input_ids": ids, "attention_mask": torch.zeros(2, 12)}, "attention_mask"),
    ]
    with each_row() as row:
        for inputs, field in rows:
            with row(inputs):
                with pytest.raises(InvalidArgumentError) as refused:
                    llama.model(**inputs, **cached(KVServiceCache(kv)))
                assert refused.value.field == field
                assert kv.describe() == []


def test_refuses_another_number_of_rows(llama, ids) -> None:
    cache = KVServiceCache(llama.new_session())
    llama.model(ids, **cached(cache))
    with pytest.raises(InvalidArgumentError, match="has 1 rows, the cache 2"):
        llama.model(ids[:1], **cached(cache))


def test_refuses_to_run_without_a_step(llama, ids) -> None:
    with pytest.raises(FailedPreconditionError, match="no step is running"):
        llama.model.model(ids)


def test_refuses_dropout(make_pair, ids) -> None:
    pair = make_pair("gpt2")
    pair.model.transformer.h[0].train()
    with pytest.raises(FailedPreconditionError, match=r"transformer\.h\.0\.attn\.attn_dropout is in training mode"):
        pair.model(ids, **cached(KVServiceCache(pair.new_session())))
