"""forward(): ragged steps, for engines with their own loop."""

from __future__ import annotations

import pytest
import torch
from each_row import each_row
from model_families import FAMILIES

from kvservice.client import Sequence
from kvservice.errors import FailedPreconditionError, InvalidArgumentError
from kvservice.integrations.transformers import forward, model_keys, uninstall

PROMPTS = [[5, 9, 23, 61, 7, 44, 8], [3, 2], [90, 80, 70, 60, 50]]
TOKEN_IDS = [token_id for prompt in PROMPTS for token_id in prompt]


def allocate(kv, model, prompts: list[list[int]] = PROMPTS) -> list[Sequence]:
    return kv.allocate_batch(prompts, extra_keys=[model_keys(model) for _ in prompts])


def expected_logits(reference, token_ids: list[int]) -> torch.Tensor:
    return reference(torch.tensor([token_ids])).logits[0]


def assert_sequences_of_any_length(pair) -> None:
    kv = pair.new_session()
    step = kv.open_step(allocate(kv, pair.model))
    logits = forward(pair.model, step, TOKEN_IDS)
    expected = torch.cat([expected_logits(pair.reference, prompt) for prompt in PROMPTS])
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)


def assert_prefill_in_chunks_beside_decode(pair) -> None:
    """A running sequence gets a token while the prompt of another one is computed in chunks."""
    kv = pair.new_session()
    running, prompt = allocate(kv, pair.model, [PROMPTS[1], PROMPTS[0]])
    forward(pair.model, kv.open_step([running]), PROMPTS[1])
    forward(pair.model, kv.open_step([prompt], [3]), PROMPTS[0][:3])
    kv.append([running], [17])
    logits = forward(pair.model, kv.open_step([prompt, running], [4, 1]), [*PROMPTS[0][3:], 17])
    expected = torch.cat(
        [expected_logits(pair.reference, PROMPTS[0])[3:], expected_logits(pair.reference, [*PROMPTS[1], 17])[-1:]]
    )
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)


def assert_last_only_gives_one_row_for_each_sequence(pair) -> None:
    kv = pair.new_session()
    step = kv.open_step(allocate(kv, pair.model))
    logits = forward(pair.model, step, torch.tensor(TOKEN_IDS), last_only=True)
    expected = torch.stack([expected_logits(pair.reference, prompt)[-1] for prompt in PROMPTS])
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)


def test_steps_of_each_family(make_pair) -> None:
    """The logits are those of the library's own forward pass."""
    checks = [
        assert_sequences_of_any_length,
        assert_prefill_in_chunks_beside_decode,
        assert_last_only_gives_one_row_for_each_sequence,
    ]
    with each_row() as row:
        for family in FAMILIES:
            pair = make_pair(family)
            for check in checks:
                with row((family, check.__name__)):
                    check(pair)


def test_refuses_another_number_of_tokens(llama) -> None:
    kv = llama.new_session()
    step = kv.open_step(allocate(kv, llama.model, [[1, 2, 3]]))
    with pytest.raises(InvalidArgumentError) as refused:
        forward(llama.model, step, [1, 2])
    assert refused.value.field == "token_ids"


def test_refuses_a_model_that_attends_itself(llama) -> None:
    kv = llama.new_session()
    step = kv.open_step(allocate(kv, llama.model, [[1, 2, 3]]))
    with pytest.raises(FailedPreconditionError, match="install"):
        forward(uninstall(llama.model), step, [1, 2, 3])


def test_refuses_sequences_that_were_not_allocated_for_the_model(llama, make_pair) -> None:
    kv = llama.new_session()
    other = make_pair("mistral").model
    for keys in ([], [(0, b"mine")], model_keys(other)):
        step = kv.open_step([kv.allocate([1, 2, 3], extra_keys=keys)])
        with pytest.raises(FailedPreconditionError, match=r"extra_keys=model_keys\(model\)"):
            forward(llama.model, step, [1, 2, 3])
    (mine,) = allocate(kv, llama.model, [[1, 2, 3]])
    forward(llama.model, kv.open_step([mine]), [1, 2, 3])
    child = kv.fork(mine)
    llama.model.lm_head.weight.neg_()
    with pytest.raises(FailedPreconditionError, match="as it is now"):
        forward(llama.model, kv.append([child], [4]), [4])


def test_a_resumed_sequence_is_named_with_its_keys(llama) -> None:
    kv = llama.new_session()
    forward(llama.model, kv.open_step(allocate(kv, llama.model, [[1, 2, 3]])), [1, 2, 3])
    (info,) = kv.describe()
    again = Sequence(info.sequence_id, info.length, extra_keys=tuple(model_keys(llama.model)))
    logits = forward(llama.model, kv.append([again], [4]), [4])
    torch.testing.assert_close(logits[0], expected_logits(llama.reference, [1, 2, 3, 4])[-1], atol=1e-3, rtol=0)
