"""Engines whose schedules are forced at random: budgets, chunks, stalls, preemptions, lost steps and aborts.

Each engine runs a model over the scheduler of a session, `forward` by `forward`. Several engines share a pool that is
too small for them.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from cache_argument import cached
from transformers import DynamicCache, PreTrainedModel

from kvservice.client import BatchReport, EngineBatch, KVClient, ScheduledRequest, Session, Step
from kvservice.integrations.transformers import forward, install, model_keys, uninstall

# A reference whose best two logits are closer may be decided by rounding. The logits have a standard deviation of about
# 4, and rounding moves them by 1e-4.
MARGIN = 2e-3
MAX_CALLS = 3000
NUM_REQUESTS = 24
# Every run must force each of these.
FORCED = {"aborts", "ahead", "chunks", "found finished", "recomputations", "retries", "stalls", "swaps"}
# 72 tokens. The longest requests have up to 60.
POOL: dict[str, Any] = {"block_size": 4, "num_blocks": 18, "swap_space_gib": 0.001, "watermark": 0.0}


@dataclass(frozen=True)
class ReferenceRequest:
    """A prompt and the tokens that the library gives for it alone, int ids."""

    prompt: list[int]
    expected: list[int]


def greedy_alone(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int] | None:
    """Return the greedy tokens after a prompt with the library's own cache; None if any choice is a near tie."""
    cache = DynamicCache(config=model.config)
    tokens, generated = list(prompt), list[int]()
    with torch.no_grad():
        for _ in range(count):
            ids = torch.tensor([tokens], device=model.device)
            best = model(ids, **cached(cache)).logits[0, -1].float().topk(2)
            if best.values[0] - best.values[1] < MARGIN:
                return None
            tokens = [int(best.indices[0])]
            generated += tokens
    return generated


def reference_requests(model: PreTrainedModel, seed: int, count: int) -> list[ReferenceRequest]:
    """Return requests of 1 to 30 tokens for 1 to 24 more. Half of the prompts begin with the same 9 tokens."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(1, model.config.vocab_size, 9).tolist()
    requests: list[ReferenceRequest] = []
    while len(requests) < count:
        own = rng.integers(1, model.config.vocab_size, rng.integers(1, 22)).tolist()
        prompt = shared + own if rng.random() < 0.5 else own
        expected = greedy_alone(model, prompt, int(rng.integers(1, 25)))
        if expected is not None:
            requests.append(ReferenceRequest(prompt, expected))
    return requests


class _LostStepError(Exception):
    """The model stops here."""


class _LostStep:
    """A step whose second layer fails."""

    def __init__(self, step: Any) -> None:
        self.step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)

    def attend(self, layer: int, *tensors: Any, **options: Any) -> Any:
        if layer:
            raise _LostStepError
        return self.step.attend(layer, *tensors, **options)


@dataclass
class ForcedEngine:
    """An engine with its own session, whose choices are drawn from `rng`. `happened` counts what was forced.

    Half of the requests end earlier than the scheduler knows: the engine finds them finished. `ahead`: batches may be
    made before the report of the one before.
    """

    kv: Session
    model: PreTrainedModel
    requests: Sequence[ReferenceRequest]
    rng: np.random.Generator
    settings: dict[str, Any] = field(default_factory=dict)
    ahead: bool = False
    happened: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.scheduler = self.kv.open_scheduler(**self.settings)
        self.added = 0
        self.tokens: dict[int, list[int]] = {}
        self.aborted: set[int] = set()
        self.over: set[int] = set()
        self.in_flight: list[EngineBatch[Step]] = []
        self.reports: list[BatchReport] = []
        self.ended: set[int] = set()

    @property
    def done(self) -> bool:
        return len(self.over) == len(self.requests)

    def outputs(self) -> dict[int, list[int]]:
        """Return the generated tokens of the requests that were not aborted, by their number."""
        return {
            number: self.tokens[number][len(request.prompt) :]
            for number, request in enumerate(self.requests)
            if number not in self.aborted
        }

    def act(self) -> None:
        """Do one thing: add requests, abort one, make a batch, run the oldest in flight, or lose those in flight."""
        draw = self.rng.random()
        if draw < 0.01:
            self._abort()
        elif draw < 0.06 and self.in_flight:
            self._lose()
        elif draw < 0.2 and self.added < len(self.requests):
            self._add(int(self.rng.integers(1, 6)))
        elif not self.in_flight or (self.ahead and len(self.in_flight) < 2 and draw < 0.6):
            self._schedule()
        else:
            self._run(self.in_flight.pop(0))

    def _add(self, count: int) -> None:
        keys = model_keys(self.model)
        made = []
        for number in range(self.added, min(self.added + count, len(self.requests))):
            request = self.requests[number]
            length = len(request.expected) + (5 if number % 2 else 0)
            made.append(ScheduledRequest(number, request.prompt, length, extra_keys=keys))
            self.tokens[number] = list(request.prompt)
        self.scheduler.add(made)
        self.added += len(made)

    def _abort(self) -> None:
        live = sorted(set(range(self.added)) - self.over - self.aborted)
        # A request that the engine has found finished may not be aborted as well.
        live = [one for one in live if self._missing(one) > 0]
        if live:
            number = int(self.rng.choice(live))
            self.aborted.add(number)
            self.over.update(self.scheduler.abort([number]))
            self.happened["aborts"] += 1

    def _schedule(self, retry: bool = False) -> None:
        reports, self.reports = self.reports, []
        batch = self.scheduler.schedule(
            reports,
            ahead=bool(self.in_flight) and not retry,
            retry=retry,
            max_step_tokens=int(self.rng.choice([4, 7, 12, 40])),
            max_running=int(self.rng.integers(2, 12)),
        )
        if retry:
            self.in_flight.clear()
        self.over.update(batch.finished)
        self.happened["ahead"] += bool(self.in_flight) and batch.step is not None
        self.happened["stalls"] += batch.num_stalled
        for one in batch.preempted:
            self.happened["swaps" if one.swapped else "recomputations"] += 1
        if batch.step is not None:
            self.in_flight.append(batch)

    def _lose(self) -> None:
        """Lose the batches in flight, before, while or after the oldest is computed, and open it again."""
        computed = self.rng.choice(["nothing", "the first layer", "all"])
        if computed == "the first layer":
            self._compute_first_layer(self.in_flight[0])
        elif computed == "all":
            self._logits(self.in_flight[0])
        self._schedule(retry=True)
        self.happened["retries"] += 1

    def _run(self, batch: EngineBatch[Step]) -> None:
        logits = self._logits(batch)
        sampled = [one for one in batch.sampled.tolist() if one not in self.ended]
        rows = [
            row for one, row in zip(batch.sampled.tolist(), batch.sampled_rows.tolist(), strict=True) if one in sampled
        ]
        assert batch.step is not None
        ends = np.cumsum(batch.step.query_lens)
        chosen = logits[torch.from_numpy(ends[rows] - 1).to(logits.device)].argmax(-1).tolist()
        for sequence, token in zip(sampled, chosen, strict=True):
            self.tokens[sequence].append(token)
        finished = [one for one in sampled if self._missing(one) == 0 and one % 2]
        self.happened["found finished"] += len(finished)
        self.reports.append(BatchReport(batch.number, chosen, finished=finished))
        # Rows of these sequences in a batch that was made before this report get no tokens.
        self.ended = set(finished)
        self._count_chunks(batch, batch.step)

    def _count_chunks(self, batch: EngineBatch[Step], step: Step) -> None:
        ends, sampled = step.context_lens.tolist(), set(batch.sampled.tolist())
        for sequence, end in zip(batch.sequence_ids.tolist(), ends, strict=True):
            self.happened["chunks"] += sequence not in sampled and end < len(self.tokens[sequence])

    def _logits(self, batch: EngineBatch[Step]) -> torch.Tensor:
        step = batch.step
        assert step is not None, "batches in flight have steps"
        starts = (step.context_lens - step.query_lens).tolist()
        rows = zip(batch.sequence_ids.tolist(), starts, step.context_lens.tolist(), strict=True)
        token_ids = list(itertools.chain.from_iterable(self._known(one, start, end) for one, start, end in rows))
        with torch.no_grad():
            return forward(self.model, step, token_ids)

    def _compute_first_layer(self, batch: EngineBatch[Step]) -> None:
        step: Any = _LostStep(batch.step)
        with pytest.raises(_LostStepError):
            self._logits(replace(batch, step=step))

    def _known(self, sequence: int, start: int, end: int) -> list[int]:
        """Return tokens of a sequence. A token that is not known can only be in a row that is computed in vain."""
        tokens = self.tokens[sequence][start:end]
        assert len(tokens) == end - start or sequence in self.ended, "a step has only tokens that were reported"
        return tokens + [0] * (end - start - len(tokens))

    def _missing(self, number: int) -> int:
        request = self.requests[number]
        return len(request.prompt) + len(request.expected) - len(self.tokens[number])


def run_until_done(engines: Sequence[ForcedEngine], rng: np.random.Generator) -> None:
    """Let engines act in a random order until all their requests are over."""
    for _ in range(MAX_CALLS):
        waiting = [engine for engine in engines if not engine.done]
        if not waiting:
            return
        waiting[int(rng.integers(len(waiting)))].act()
    raise AssertionError("requests starve")


def _settings(preemption: str, rng: np.random.Generator) -> dict[str, Any]:
    return {
        "preemption": preemption,
        "policy": str(rng.choice(["chunked", "prefill_first"])),
        "max_stalled_fraction": 0.5,
        "reserve_steps": int(rng.integers(0, 2)),
        "weight": float(rng.choice([1.0, 3.0])),
    }


def force(client: KVClient, model: PreTrainedModel, seed: int) -> Counter[str]:
    """Run two engines in the client's pool: one preempts by recomputation, the other swaps, and one of them asks ahead.

    Returns what was forced. Raises AssertionError if the tokens of a request differ from those that the library gives
    for it alone.
    """
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    requests, rng = reference_requests(reference, seed, NUM_REQUESTS), np.random.default_rng(seed)
    with ExitStack() as stack:
        stack.callback(uninstall, install(model))
        engines = []
        for number, preemption in enumerate(("recompute", "swap")):
            session = stack.enter_context(client.session(f"engine {number}"))
            session.reset_prefix_cache()
            settings, own = _settings(preemption, rng), np.random.default_rng((seed, number))
            engines.append(ForcedEngine(session, model, requests[number::2], own, settings, ahead=number == seed % 2))
        run_until_done(engines, rng)
    for engine in engines:
        for number, tokens in engine.outputs().items():
            assert tokens == engine.requests[number].expected, (number, engine.happened)
    return engines[0].happened + engines[1].happened
