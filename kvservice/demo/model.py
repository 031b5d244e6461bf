"""The demo's model and tokenizer, its token picker, and generation by transformers alone as the reference."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvservice.integrations.transformers.arguments import CACHE

VOCABULARY = 512


def make_prompt(seed: int, num_tokens: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCABULARY), k=num_tokens))


def build_model(dtype: str = "float32") -> LlamaForCausalLM:
    """Build a Llama of 4 layers with grouped-query attention and fixed random weights, on the CPU.

    The weights, most of all the output projections of attention, are larger than an initialization for training. As a
    result attention is concentrated on few tokens, logits are far apart, and an error in attention changes a token.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
        dtype=dtype,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.data *= 2
    torch.nn.Module.to(model, getattr(torch, dtype))
    model.train(False)
    return model


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer for the model: the first 256 tokens are bytes, the others words."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = letters + [f"\u0120word{number}" for number in range(VOCABULARY - len(letters))]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: PreTrainedTokenizerFast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]
    return fast


class Picker:
    """Picks the next token: the likeliest one, or, with a seed, a sample of the distribution.

    It samples by adding Gumbel noise to the logits and taking the largest (Gumbel-max), so that the margin to the
    runner-up is a number, as for the likeliest token.
    """

    def __init__(self, seed: int | None) -> None:
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the scores of logits `[vocabulary]`, float32 `[vocabulary]` in host memory. The largest is picked."""
        scores = logits.detach().float().cpu()
        if self._generator is None:
            return scores
        return scores - torch.empty_like(scores).exponential_(generator=self._generator).log()

    def pick(self, logits: torch.Tensor) -> int:
        return int(self.scores(logits).argmax())


def generate_alone(model: LlamaForCausalLM, prompt: Sequence[int], picker: Picker, num_tokens: int) -> list[int]:
    """Generate `num_tokens` tokens for one prompt with transformers' own cache, without batching."""
    cache = DynamicCache(config=model.config)
    generated: list[int] = []
    token_ids = list(prompt)
    while len(generated) < num_tokens:
        ids = torch.tensor([token_ids], device=model.device)
        logits = model(input_ids=ids, **{CACHE: cache}, logits_to_keep=1).logits[0, -1]
        generated.append(picker.pick(logits))
        token_ids = generated[-1:]
    return generated


def logits_of(model: LlamaForCausalLM, prompt: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
    """Return the logits that transformers computes for each token after a prompt: `[len(token_ids), vocabulary]`."""
    ids = torch.tensor([[*prompt, *token_ids[:-1]]])
    logits: torch.Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=len(token_ids)).logits[0]
    return logits


def largest_error(
    model: LlamaForCausalLM, sequences: Iterable[tuple[Sequence[int], Sequence[int], torch.Tensor]]
) -> tuple[float, float]:
    """Return the largest error against float64 logits of (the given logits, transformers' own logits).

    sequences: prompt, generated tokens, and the logits `[tokens, vocabulary]` from which they were picked.
    """
    exact = copy.deepcopy(model).double()
    given_errors, own_errors = [0.0], [0.0]
    for prompt, token_ids, given in sequences:
        expected = logits_of(exact, prompt, token_ids)
        given_errors.append(float((given - expected).abs().max()))
        own_errors.append(float((logits_of(model, prompt, token_ids) - expected).abs().max()))
    return max(given_errors), max(own_errors)


@contextmanager
def torch_settings() -> Iterator[None]:
    """Disable gradients, and use one thread. The model is so small that several threads mostly wait on a busy
    machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(num_threads)
