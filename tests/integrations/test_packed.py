"""forward(): ragged steps, for engines with a loop of their own."""

from __future__ import annotations

import pytest
import torch

from kvservice.errors import FailedPreconditionError, InvalidArgumentError
from kvservice.integrations.transformers import forward, uninstall

PROMPTS = [[5, 9, 23, 61, 7, 44, 8], [3, 2], [90, 80, 70, 60, 50]]
TOKEN_IDS = [token_id for prompt in PROMPTS for token_id in prompt]


def expected_logits(reference, token_ids: list[int]) -> torch.Tensor:
    return reference(torch.tensor([token_ids])).logits[0]


def test_sequences_of_any_length_in_one_step(pair) -> None:
    kv = pair.new_session()
    step = kv.open_step(kv.allocate_batch(PROMPTS))
    logits = forward(pair.model, step, TOKEN_IDS)
    expected = torch.cat([expected_logits(pair.reference, prompt) for prompt in PROMPTS])
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)


def test_prefill_in_chunks_beside_decode(pair) -> None:
    """A running sequence gets a token while another one's prompt is computed piece by piece."""
    kv = pair.new_session()
    running, prompt = kv.allocate_batch([PROMPTS[1], PROMPTS[0]])
    forward(pair.model, kv.open_step([running]), PROMPTS[1])
    forward(pair.model, kv.open_step([prompt], [3]), PROMPTS[0][:3])
    kv.append([running], [17])
    logits = forward(pair.model, kv.open_step([prompt, running], [4, 1]), [*PROMPTS[0][3:], 17])
    expected = torch.cat(
        [expected_logits(pair.reference, PROMPTS[0])[3:], expected_logits(pair.reference, [*PROMPTS[1], 17])[-1:]]
    )
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)


def test_last_only_gives_one_row_for_each_sequence(pair) -> None:
    kv = pair.new_session()
    step = kv.open_step(kv.allocate_batch(PROMPTS))
    logits = forward(pair.model, step, torch.tensor(TOKEN_IDS), last_only=True)
    expected = torch.stack([expected_logits(pair.reference, prompt)[-1] for prompt in PROMPTS])
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)


def test_refuses_another_number_of_tokens(llama) -> None:
    kv = llama.new_session()
    step = kv.open_step([kv.allocate([1, 2, 3])])
    with pytest.raises(InvalidArgumentError) as refused:
        forward(llama.model, step, [1, 2])
    assert refused.value.field == "token_ids"


def test_refuses_a_model_that_attends_itself(llama) -> None:
    kv = llama.new_session()
    step = kv.open_step([kv.allocate([1, 2, 3])])
    with pytest.raises(FailedPreconditionError, match="install"):
        forward(uninstall(llama.model), step, [1, 2, 3])
