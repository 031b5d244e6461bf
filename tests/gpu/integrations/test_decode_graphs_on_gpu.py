"""Decode passes as CUDA graphs: `generate` gives the tokens that it gives without graphs. See
tests/integrations/test_decode_graphs.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from cache_argument import cached
from model_families import build

from kvservice.client import KVClient
from kvservice.integrations.transformers import DecodeGraphs, KVServiceCache, install, pool_options, uninstall
from kvservice.launch import Daemon

# Their pools have the same shape. They have rotary positions, sliding windows, soft caps, and biases by distance.
FAMILIES = ("llama", "qwen2", "gemma2", "bloom")
# Some versions of the library make tensors from numbers on the host in each pass of these, which torch refuses to
# capture.
NOT_CAPTURED = {"bloom"}


@torch.no_grad()
def build_on_gpu(family: str) -> Any:
    model: Any = build(family)
    return model.cuda()


@pytest.fixture(scope="module")
def client() -> Iterator[KVClient]:
    options: dict[str, Any] = pool_options(build("llama").config, torch.float32)
    sizes: dict[str, Any] = {"block_size": 4, "num_blocks": 512, "swap_space_gib": 0.01, "watermark": 0.0}
    with (
        Daemon(**options, **sizes, device="cuda", share_pool="write") as daemon,
        KVClient(daemon.address) as connected,
    ):
        yield connected


def prompts() -> dict[str, Any]:
    """Three prompts of 18, 13 and 6 tokens, padded on the left."""
    torch.manual_seed(3)
    lengths = torch.tensor([18, 13, 6])
    mask = (torch.arange(18) >= 18 - lengths[:, None]).long()
    return {"input_ids": (torch.randint(1, 97, (3, 18)) * mask).cuda(), "attention_mask": mask.cuda()}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_of_generate(client: KVClient, family: str, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = install(build_on_gpu(family))
    replay, replayed = torch.cuda.CUDAGraph.replay, set[Any]()

    def replay_noted(graph: Any) -> None:
        replayed.add(graph)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay_noted)
    with ExitStack() as stack, client.session() as kv, mode():
        stack.callback(uninstall, model)
        kv.reset_prefix_cache()
        arguments = {**prompts(), "max_new_tokens": 40, "do_sample": False}
        with KVServiceCache(kv) as cache:
            expected = model.generate(**arguments, **cached(cache))
        graphs = DecodeGraphs(model, kv, max_tokens=128, num_steps=3)
        for _ in range(2):
            kv.reset_prefix_cache()
            with KVServiceCache(kv, graphs=graphs) as cache:
                tokens = model.generate(**arguments, **cached(cache))
                assert torch.equal(tokens, expected)
                for row, sequence in enumerate(cache.sequences):
                    assert sequence is not None
                    (found,) = kv.describe([sequence], token_ids=True)
                    begin = tokens.shape[1] - 1 - found.length
                    assert list(found.token_ids) == tokens[row, begin:-1].tolist()
        assert len(replayed) == 1 or family in NOT_CAPTURED
        # Batches of one row have a graph of their own.
        first = {name: tensor[:1] for name, tensor in prompts().items()}
        with KVServiceCache(kv, graphs=graphs) as cache:
            tokens = model.generate(**first, max_new_tokens=40, do_sample=False, **cached(cache))
        assert torch.equal(tokens, expected[:1])
        assert len(replayed) == 2 or family in NOT_CAPTURED


def test_logits_are_the_callers(client: KVClient) -> None:
    """A later replay leaves them."""
    model: Any = install(build_on_gpu("llama"))
    with ExitStack() as stack, client.session() as kv, torch.no_grad():
        stack.callback(uninstall, model)
        kv.reset_prefix_cache()
        ids = torch.arange(1, 25).reshape(2, 12).cuda()
        found: list[list[Any]] = [[], []]
        options: list[dict[str, Any]] = [{}, {"graphs": DecodeGraphs(model, kv, max_tokens=64, num_steps=2)}]
        for outputs, more in zip(found, options, strict=True):
            with KVServiceCache(kv, **more) as cache:
                model(ids[:, :4], **cached(cache))
                for column in range(4, 12):
                    inputs = {
                        "input_ids": ids[:, column : column + 1],
                        "position_ids": torch.tensor([[column]], device="cuda"),
                    }
                    outputs.append(model(**inputs, return_dict=True, **cached(cache)).logits)
        torch.testing.assert_close(torch.cat(found[1], 1), torch.cat(found[0], 1), rtol=0, atol=1e-3)
