"""Random ragged steps of a model runner, compared with the library's own forward pass."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from causal_lms import Case, make_config, make_model

from kvservice.client import Session
from kvservice.engines import ModelRunner
from kvservice.integrations.transformers import model_keys

# Logits have a standard deviation of about 1.
TOLERANCE = 5e-4


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
