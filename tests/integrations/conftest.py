"""Small random models of each family, in pairs: one with its K/V in a daemon, one unmodified."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fake_store import FakeStore
from model_families import build
from transformers import PreTrainedModel
from vllm_connector import NUM_BLOCKS, Engine, OpenEngine, connector_config
from vllm_stub import stub_vllm

from kvservice.client import KVClient, Session
from kvservice.integrations.transformers import install, pool_options, uninstall
from kvservice.launch import Daemon


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

        def make(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> Pair:
            model: Any = build(family, **options)
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


@pytest.fixture(scope="module")
def vllm_connector() -> Iterator[Any]:
    """The connector's class, over a stub of vLLM."""
    with stub_vllm() as connector:
        yield connector


@pytest.fixture
def engine(vllm_connector: Any) -> Iterator[OpenEngine]:
    """Return an engine whose workers have these stores, and as many blocks. `config`: changes of its configuration."""
    with ExitStack() as stack:

        def make(*stores: FakeStore, num_blocks: int = NUM_BLOCKS, replicas: int = 1, **config: Any) -> Engine:
            made = Engine(
                vllm_connector, *stores, config=connector_config(**config), num_blocks=num_blocks, replicas=replicas
            )
            stack.callback(made.close)
            return made

        yield make
