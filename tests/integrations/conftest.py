"""Small random models of each family, in pairs: one with its K/V in a daemon, one unmodified."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from kvservice.client import KVClient, Session
from kvservice.integrations.transformers import install, pool_options, uninstall
from kvservice.launch import Daemon

# Weights are far larger than a trained model's, so that logits are spread out (standard deviation about 4) and the
# attention is not close to uniform, and an error in attention changes a token.
COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "initializer_range": 0.5,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
ROTARY = COMMON | {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT = COMMON | {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128}
WINDOW = 5

# The configuration of each family. KV heads and head size fit one pool, so that one daemon serves most families.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", ROTARY | {"num_key_value_heads": 2}),
    "llama_mqa": ("Llama", ROTARY | {"num_key_value_heads": 1}),
    "qwen2": (
        "Qwen2",
        ROTARY
        | {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "mistral": ("Mistral", ROTARY | {"num_key_value_heads": 2, "sliding_window": WINDOW}),
    "gpt2": ("GPT2", GPT | {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True}),
    "gpt_bigcode": ("GPTBigCode", GPT),
    "gemma2": (
        "Gemma2",
        ROTARY
        | {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "query_pre_attn_scalar": 8,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
        },
    ),
    "bloom": ("Bloom", COMMON | {"hidden_size": 64, "n_layer": 2, "n_head": 2}),
}
HEAD_MODELS = {"GPT2": "GPT2LMHeadModel"}


def build(family: str) -> PreTrainedModel:
    name, options = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**options)
    torch.manual_seed(2)
    model = getattr(transformers, HEAD_MODELS.get(name, f"{name}ForCausalLM"))(config)
    # Families initialize biases and norms to constants, which would exclude them from the comparison.
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=float(parameter.mean()), std=0.1)
    return model.eval()


@dataclass
class Pair:
    model: PreTrainedModel
    """Installed: attends in the daemon."""
    reference: PreTrainedModel
    """The same weights, with the library's own cache and eager attention."""
    new_session: Callable[[], Session]


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Use one thread. The models are so small that several threads mostly wait for each other on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def clients() -> Iterator[Callable[[dict[str, Any]], KVClient]]:
    """Return a client of a daemon with the requested pool. There is one daemon per shape."""
    with ExitStack() as stack:
        connected: dict[tuple[Any, ...], KVClient] = {}

        def connect(options: dict[str, Any]) -> KVClient:
            shape = tuple(options.values())
            if shape not in connected:
                sizes: dict[str, Any] = {"block_size": 4, "num_blocks": 256, "swap_space_gib": 0.01, "watermark": 0.0}
                daemon = stack.enter_context(Daemon(**options, **sizes))
                connected[shape] = stack.enter_context(KVClient(daemon.address))
            return connected[shape]

        yield connect


@pytest.fixture
def make_pair(clients: Callable[[dict[str, Any]], KVClient]) -> Iterator[Callable[..., Pair]]:
    with ExitStack() as stack, torch.no_grad():

        def make(family: str, dtype: torch.dtype = torch.float32) -> Pair:
            model: Any = build(family)
            model = model.to(dtype)
            reference = copy.deepcopy(model)
            reference.set_attn_implementation("eager")
            client = clients(pool_options(model.config, dtype))

            def new_session() -> Session:
                session = stack.enter_context(client.session())
                assert session.transport == "lane"  # the default on one host
                session.reset_prefix_cache()
                return session

            stack.callback(uninstall, install(model))
            return Pair(model, reference, new_session)

        yield make


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest, make_pair: Callable[..., Pair]) -> Pair:
    return make_pair(request.param)


@pytest.fixture
def llama(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair("llama")


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Three prompts of 18, 13 and 6 tokens, padded on the left, longer than windows, not multiples of a block."""
    torch.manual_seed(3)
    lengths = torch.tensor([18, 13, 6])
    mask = (torch.arange(18) >= 18 - lengths[:, None]).long()
    return {"input_ids": torch.randint(1, 97, (3, 18)) * mask, "attention_mask": mask}


@pytest.fixture
def positions() -> Callable[[PreTrainedModel, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the position ids of a padded batch for direct calls of the model. ALiBi models accept none."""

    def make(model: PreTrainedModel, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return {} if model.config.model_type == "bloom" else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}

    return make
