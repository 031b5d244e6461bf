"""Ragged steps of the runner against the library's own forward pass."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from causal_lms import Case, installed_cases, make_config, make_model

from kvservice.client import KVClient, Session
from kvservice.engines.runner import ModelRunner
from kvservice.errors import FailedPreconditionError, InvalidArgumentError
from kvservice.integrations.transformers import model_keys, pool_options
from kvservice.launch import Daemon

pytestmark = pytest.mark.filterwarnings("ignore")  # Tiny random models cause many warnings of the library.

CASES = {case.name: case for case in installed_cases()}
# Families that fit one pool: sliding windows, soft caps, parallel attention and MLP, experts.
FAMILIES = ["llama", "mistral", "gemma2", "cohere", "mixtral", "glm"]
# Logits have a standard deviation of about 1.
TOLERANCE = 5e-4


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    shape = pool_options(make_config(CASES["llama"]))
    sizes: dict[str, Any] = {"block_size": 4, "num_blocks": 256, "swap_space_gib": 0.01, "watermark": 0.0}
    with Daemon(**shape, **sizes, share_pool="write") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def connect(daemon: Daemon) -> Iterator[Any]:
    with ExitStack() as stack:
        yield lambda transport: stack.enter_context(
            stack.enter_context(KVClient(daemon.address, transport=transport)).session()
        )


@pytest.fixture(scope="module")
def kv(connect: Any) -> Session:
    return connect("lane")


@pytest.fixture
def llama() -> Any:
    return make_model(make_config(CASES["llama"]))


class Driver:
    """Runs random steps over growing sequences: chunks of prompts beside single tokens, in any order."""

    def __init__(self, model: Any, kv: Session, runner: ModelRunner, seed: int) -> None:
        self.rng = random.Random(seed)
        self.model, self.kv, self.runner = model, kv, runner
        kv.reset_prefix_cache()
        self.tokens = [self._draw(count) for count in (1, 4, 9, 17, 30)]
        self.sequences = kv.allocate_batch(self.tokens, extra_keys=[model_keys(model)] * len(self.tokens))
        self.computed = [0] * len(self.tokens)

    def _draw(self, count: int) -> list[int]:
        return [self.rng.randrange(2, 97) for _ in range(count)]

    def step(self) -> tuple[list[tuple[int, int]], torch.Tensor]:
        """Run a step. Returns (sequence, position) of each row that was asked for, and the logits."""
        chosen = self.rng.sample(range(len(self.tokens)), self.rng.randint(1, len(self.tokens)))
        for i in chosen:
            if self.computed[i] == len(self.tokens[i]):
                self.tokens[i] += (new := self._draw(self.rng.choice([1, 1, 1, 3])))
                self.kv.append([self.sequences[i]], new, num_tokens=[len(new)])
        counts = [min(len(self.tokens[i]) - self.computed[i], self.rng.choice([1, 3, 5, 40])) for i in chosen]
        step = self.kv.open_step([self.sequences[i] for i in chosen], counts)
        places = [(i, self.computed[i] + j) for i, count in zip(chosen, counts, strict=True) for j in range(count)]
        rows = sorted(self.rng.sample(range(len(places)), self.rng.randint(0, len(places))))
        token_ids = torch.tensor([self.tokens[i][position] for i, position in places])
        logits = self.runner.run(step, token_ids, torch.tensor(rows, dtype=torch.long))
        for i, count in zip(chosen, counts, strict=True):
            self.computed[i] += count
        return [places[row] for row in rows], logits

    def close(self) -> None:
        self.kv.free(self.sequences)


def assert_random_steps_equal(case: Case, kv: Session, seed: int, num_steps: int = 12, **options: Any) -> None:
    """Fail unless the logits of random steps are those of the library's own forward pass over each whole sequence."""
    model = make_model(make_config(case))
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    driver = Driver(model, kv, ModelRunner(model, kv, **options), seed)
    found: list[tuple[tuple[int, int], torch.Tensor]] = []
    for _ in range(num_steps):
        places, logits = driver.step()
        assert logits.shape == (len(places), 97)
        found += zip(places, logits, strict=True)
    with torch.no_grad():
        expected = [reference(torch.tensor([ids])).logits[0] for ids in driver.tokens]
    driver.close()
    assert len(found) > num_steps
    actual = torch.stack([logits for _, logits in found])
    wanted = torch.stack([expected[i][position] for (i, position), _ in found])
    assert float((actual - wanted).abs().max() / wanted.std()) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_random_steps_give_the_librarys_logits(family: str, kv: Session) -> None:
    for seed in range(2):
        assert_random_steps_equal(CASES[family], kv, seed)


@pytest.mark.parametrize("transport", ["mapped", "region", "inline"])
def test_every_transport_gives_the_librarys_logits(transport: str, connect: Any) -> None:
    assert_random_steps_equal(CASES["gemma2"], connect(transport), seed=3)


def test_the_pool_has_to_fit_the_model(kv: Session, llama: Any) -> None:
    config = make_config(CASES["llama"])
    config.num_hidden_layers = 2
    for model in (make_model(config), llama.to(torch.bfloat16)):
        with pytest.raises(InvalidArgumentError, match="needs a pool of") as refused:
            ModelRunner(model, kv)
        assert refused.value.field == "model"
    assert model.config._attn_implementation != "kvservice", "a refused model is not installed"


@pytest.mark.parametrize("rows", [[3], [-1], [[0]], [0.5]])
def test_refuses_rows_that_are_no_tokens_of_the_step(rows: Any, kv: Session, llama: Any) -> None:
    runner = ModelRunner(llama, kv)
    sequence = kv.allocate([5, 6, 7], extra_keys=model_keys(llama))
    with pytest.raises(InvalidArgumentError) as refused:
        runner.run(kv.open_step([sequence]), torch.tensor([5, 6, 7]), torch.tensor(rows))
    assert refused.value.field == "rows"
    assert kv.describe([sequence])[0].num_computed_tokens == 0
    kv.free([sequence])


def test_refuses_sequences_of_another_model(kv: Session, llama: Any) -> None:
    runner = ModelRunner(llama, kv)
    sequence = kv.allocate([5, 6, 7])
    with pytest.raises(FailedPreconditionError, match="model_keys"):
        runner.run(kv.open_step([sequence]), torch.tensor([5, 6, 7]), torch.tensor([2]))
    kv.free([sequence])
