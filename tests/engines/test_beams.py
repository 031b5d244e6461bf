"""Beam search is the library's, on logits that need no model."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvservice.engines.beams import BeamSearch

VOCABULARY = 13
EOS = [1, 2]
MAX_TOKENS = 12


class TableModel(LlamaForCausalLM):
    """A model whose logits depend on the last two tokens, from a table."""

    def __init__(self, seed: int) -> None:
        super().__init__(
            LlamaConfig(vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                        num_attention_heads=1, bos_token_id=0, eos_token_id=EOS)
        )  # fmt: skip
        self.table = torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2

    def forward(self, input_ids, **_):
        return CausalLMOutputWithPast(logits=self.table[input_ids[:, -2], input_ids[:, -1]][:, None])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("width", "length_penalty", "early_stopping"),
    [(2, 1.0, False), (4, 1.0, False), (4, 0.0, False), (4, 2.0, True), (3, -1.0, False), (5, 1.0, True)],
)
def test_the_beams_are_the_librarys(seed, width, length_penalty, early_stopping) -> None:
    model = TableModel(seed).eval()
    prompt = [3, 4]
    config = GenerationConfig(
        num_beams=width, num_return_sequences=width, length_penalty=length_penalty, early_stopping=early_stopping,
        max_new_tokens=MAX_TOKENS, eos_token_id=EOS, pad_token_id=0, use_cache=False, do_sample=False,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    expected = model.generate(torch.tensor([prompt]), generation_config=config)
    search = BeamSearch(width, MAX_TOKENS, EOS, length_penalty, early_stopping)
    while not search.over:
        tokens = torch.tensor([[*prompt, *beam][-2:] for beam in search.generated])
        search.step(model.table[tokens[:, 0], tokens[:, 1]].log_softmax(-1))
    found = [list(beam.token_ids) for beam in search.complete]
    wanted = [row[len(prompt) :].tolist() for row in expected.sequences]
    assert found == [row[: len(beam)] for row, beam in zip(wanted, found, strict=True)]
    assert all(set(row[len(beam) :]) <= {EOS[0]} for row, beam in zip(wanted, found, strict=True)), "it is padded"
    assert [beam.score for beam in search.complete] == pytest.approx(expected.sequences_scores.tolist(), rel=1e-5)


def test_parents_say_which_beam_each_one_continues() -> None:
    search = BeamSearch(2, 5, [1], 1.0, False)
    first = torch.tensor([0.1, 0.05, 0.45, 0.4]).log().expand(2, -1)
    assert search.step(first) == ([2, 3], [0, 0])
    second = torch.tensor([[0.97, 0.01, 0.01, 0.01], [0.1, 0.1, 0.1, 0.7]]).log()
    assert search.step(second) == ([0, 3], [0, 1])
    third = torch.tensor([[0.01, 0.01, 0.49, 0.49], [0.25] * 4]).log()
    tokens, parents = search.step(third)
    assert sorted(tokens) == [2, 3]
    assert parents == [0, 0]
    assert sorted(search.generated) == [[2, 0, 2], [2, 0, 3]]
