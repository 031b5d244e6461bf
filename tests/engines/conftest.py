"""Daemons with a pool for tiny random models of each family, and an engine over one that has a tokenizer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_lms import CASES, Case, make_config
from known_logits import small_config
from tiny_llama import VOCABULARY, save_tiny_llama
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvservice.client import KVClient, Session
from kvservice.engines import LLM
from kvservice.integrations.transformers import pool_options
from kvservice.launch import Daemon

NUM_BLOCKS = 64


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Use one thread. The models are so small that several threads mostly wait for each other on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def session_for() -> Iterator[Any]:
    """Return a session of a daemon with the pool of a case's model. There is one daemon per shape."""
    with ExitStack() as stack:
        daemons: dict[tuple[Any, ...], Daemon] = {}

        def session(case: Case, transport: str = "lane") -> Session:
            shape = pool_options(make_config(case))
            key = tuple(shape.values())
            if key not in daemons:
                sizes: dict[str, Any] = {"block_size": 4, "num_blocks": 256, "swap_space_gib": 0.01, "watermark": 0.0}
                daemons[key] = stack.enter_context(Daemon(**shape, **sizes, share_pool="write"))
            client = stack.enter_context(KVClient(daemons[key].address, transport=transport))
            return stack.enter_context(client.session())

        yield session


@pytest.fixture
def kv(session_for: Any) -> Session:
    """A session for models of Llama's shape."""
    return session_for(CASES["llama"])


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_llama(path)
    return path


@pytest.fixture(scope="session")
def reference(directory: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory)
    return model.eval()


@pytest.fixture(scope="session")
def engine_daemon(reference: PreTrainedModel) -> Iterator[Daemon]:
    options = pool_options(reference.config, reference.dtype)
    with Daemon(**options, num_blocks=NUM_BLOCKS, block_size=16, swap_space_gib=0.01) as running:
        yield running


@pytest.fixture(scope="session")
def small_daemon() -> Iterator[Daemon]:
    """A daemon for the models of `known_logits`."""
    with Daemon(**pool_options(small_config(64), torch.float32), num_blocks=1024, block_size=16) as running:
        yield running


@pytest.fixture(scope="session")
def llm(directory: Path, engine_daemon: Daemon) -> Iterator[LLM]:
    with LLM(directory, address=engine_daemon.address) as engine:
        yield engine


@pytest.fixture(scope="session")
def alone(reference: PreTrainedModel) -> Callable[..., list[int]]:
    """The tokens that the library generates for one prompt, by itself."""

    generator: Any = reference

    def generate(prompt: list[int], max_tokens: int, **options: object) -> list[int]:
        with torch.no_grad():
            ids: torch.Tensor = generator.generate(
                torch.tensor([prompt]), max_new_tokens=max_tokens, pad_token_id=0, do_sample=False, **options
            )
        generated: list[int] = ids[0, len(prompt) :].tolist()
        return generated

    return generate


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Prompts of 2 to 60 tokens, of which two share a prefix of two blocks."""
    chosen = random.Random(5)
    made = [[chosen.randrange(3, VOCABULARY) for _ in range(length)] for length in (2, 9, 16, 17, 33, 60)]
    return [*made, [*made[4][:32], 7, 8], [*made[0]]]
