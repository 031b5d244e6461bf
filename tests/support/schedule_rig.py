"""An engine over the scheduler, with a model whose next token depends on all tokens before it."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvservice.blocks import BlockManager, BlocksConfig
from kvservice.scheduler import (
    EngineScheduler,
    Report,
    Request,
    ScheduledBatch,
    Scheduler,
    SchedulerConfig,
    check_integrity,
)

VOCABULARY = 1000


def next_token(tokens: list[int], sample: int = 0) -> int:
    """Return the token that the model gives this sample of a request after these tokens."""
    return zlib.crc32(np.array([*tokens, sample], np.int32).tobytes()) % VOCABULARY


def alone(prompt: list[int], count: int, sample: int = 0) -> list[int]:
    """Return the tokens that a sample of a request gets when nothing else runs."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, sample))
    return tokens[len(prompt) :]


def continued(beam: int, tokens: list[int], beams: list[int]) -> int:
    """Return which of the `beams` that got a token in a step this one continues, whose tokens before it are given."""
    return beams[zlib.crc32(np.array([*tokens, beam], np.int32).tobytes()) % len(beams)]


def beams_alone(prompt: list[int], counts: list[int]) -> list[list[int]]:
    """Return the tokens of beams that get so many tokens each, when nothing else runs."""
    outputs: list[list[int]] = [[] for _ in counts]
    for step in range(max(counts)):
        before = list(outputs)
        running = [beam for beam, count in enumerate(counts) if count > step]
        for beam in running:
            parent = continued(beam, [*prompt, *before[beam]], running) if step else beam
            outputs[beam] = [*before[parent], next_token([*prompt, *before[parent]], beam)]
    return outputs


@dataclass
class EngineRig:
    """One engine. `samples` says of each sequence which sample of its request it is, `outputs` are its tokens, and
    `stops` the number of tokens after which it ends, by itself or at its limit in `limits`. `widths` are the numbers of
    samples of each request, and `beams` the requests whose samples are beams.

    `flight` are the batches that are not reported; their layers are written when they are made, or with `late` when
    they are reported. With `random` it proposes tokens: `known` are the proposals of each sequence, and `accepted`
    counts those that were right. `first_steps` are the numbers of the first steps of the requests, and
    `computed_tokens` all tokens of all steps.
    """

    manager: BlockManager
    engine: EngineScheduler
    namespace: Any
    scheduler: Scheduler
    prompts: dict[int, list[int]] = field(default_factory=dict)
    widths: dict[int, int] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)
    beams: set[int] = field(default_factory=set)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    stops: dict[int, int] = field(default_factory=dict)
    limits: dict[int, int] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)
    aborted: set[int] = field(default_factory=set)
    first_steps: dict[int, int] = field(default_factory=dict)
    batches: list[ScheduledBatch] = field(default_factory=list)
    computed_tokens: int = 0
    flight: list[ScheduledBatch] = field(default_factory=list)
    late: bool = False
    random: random.Random | None = None
    known: dict[int, list[int]] = field(default_factory=dict)
    accepted: int = 0

    def add(self, request_id: int, prompt: Any, max_tokens: int = 4, stop: int | None = None, **options: Any) -> None:
        now_s = options.pop("now_s", 0.0)
        prompt = list(range(prompt)) if isinstance(prompt, int) else [int(token) for token in prompt]
        self.engine.add(Request(request_id, prompt, max_tokens, **options), now_s)
        self.widths[request_id] = options.get("width", 1)
        if options.get("beams"):
            self.beams.add(request_id)
        lengths = options.get("stop_lengths") or [len(prompt) + max_tokens] * self.widths[request_id]
        for sample, length in enumerate(lengths):
            name = request_id + sample
            self.samples[name], self.prompts[name], self.outputs[name] = sample, prompt, []
            self.limits[name] = min(max_tokens, length - len(prompt))
            self.stops[name] = min((stop or max_tokens) + sample, self.limits[name])

    def begin(self, write: bool = True, **budgets: Any) -> ScheduledBatch:
        """Schedule, ahead if a batch is in flight, check the batch, and write its layers."""
        if self.flight:
            budgets["ahead"] = True
        batch = self._begun(self.engine.schedule(**budgets), **budgets)
        if write and not self.late:
            self.write(batch)
        return batch

    def retry(self) -> ScheduledBatch:
        """Lose the steps in progress, and open the oldest again."""
        batch = self.engine.retry()
        assert batch is not None
        self.flight.clear()
        return self._begun(batch)

    def write(self, batch: ScheduledBatch) -> None:
        """Write the layers of a batch, unless they are written."""
        if batch.step is not None and 0 in (self.manager.written_layers(self.namespace, batch.step.step_id) or b""):
            self.manager.mark_all_layers(self.namespace, batch.step.step_id)

    def _begun(self, batch: ScheduledBatch, **budgets: Any) -> ScheduledBatch:
        self.batches.append(batch)
        self.check(batch, budgets.get("max_step_tokens") or self.engine.config.max_step_tokens)
        if batch.step is not None:
            self.computed_tokens += batch.num_tokens
            for request_id in batch.step.sequence_ids.tolist():
                self.first_steps.setdefault(request_id, len(self.batches))
            self.flight.append(batch)
        return batch

    def end(self, batch: ScheduledBatch, now_s: float = 0.0) -> None:
        """Sample a token for each of the batch's sequences, and report them. Sequences that ended with the report
        before get none; the limit of their tokens was not known to end them."""
        if batch.step is None:
            return
        assert self.flight.pop(0) is batch
        self.write(batch)
        over = {name for name in batch.sampled.tolist() if len(self.outputs[name]) == self.stops[name]}
        assert all(self.stops[name] < self.limits[name] for name in over)
        sampled = [name for name in batch.sampled.tolist() if name not in over]
        proposals, before = self.proposals_of(batch), dict(self.outputs)
        tokens, parents, num_tokens = list[int](), list[int](), list[int]()
        for name in sampled:
            parents.append(self.parent(name, sampled))
            accepted = self.verified(name, before[parents[-1]], proposals.get(name, []))
            self.outputs[name] = [*before[parents[-1]], *accepted]
            num_tokens.append(len(accepted))
            tokens += accepted
            self.accepted += len(accepted) - 1
        stopped = [name for name in sampled if len(self.outputs[name]) == self.stops[name]]
        proposed = {name: self.propose(name) for name in sampled}
        report = Report(
            batch.number,
            tokens,
            num_tokens if self.random else None,
            parents,
            stopped,
            proposals=[token for name in sampled for token in proposed[name]] if self.random else None,
            num_proposed=[len(proposed[name]) for name in sampled] if self.random else None,
        )
        self.known.update(proposed)
        self.finished += self.engine.update(report, now_s)

    def propose(self, name: int) -> list[int]:
        """Return proposals for the tokens of a sequence after those that it has, some of them right."""
        if self.random is None or self.random.random() < 0.3:
            return []
        right = alone([*self.prompts[name], *self.outputs[name]], self.engine.config.lookahead, self.samples[name])
        guess = [token if self.random.random() < 0.8 else self.random.randrange(VOCABULARY) for token in right]
        return guess[: self.random.randint(0, len(guess))]

    def proposals_of(self, batch: ScheduledBatch) -> dict[int, list[int]]:
        """Return the proposals in the rows of a batch."""
        assert batch.step is not None
        ids, lens = batch.step.sequence_ids, batch.step.query_lens
        rows = zip(ids[: batch.num_decodes].tolist(), lens.tolist(), strict=False)
        return {name: self.known[name][: count - 1] for name, count in rows if count > 1}

    def verified(self, name: int, before: list[int], proposals: list[int]) -> list[int]:
        """Return the tokens that the model gives a sequence, as far as the proposals are right, up to its stop."""
        output = list(before)
        assert len(output) < self.stops[name]
        for proposal in [*proposals, None]:
            output.append(next_token([*self.prompts[name], *output], self.samples[name]))
            if output[-1] != proposal or len(output) == self.stops[name]:
                break
        return output[len(before) :]

    def parent(self, name: int, sampled: list[int]) -> int:
        """Return which of the sequences that get a token one continues."""
        sample, tokens = self.samples[name], [*self.prompts[name], *self.outputs[name]]
        request_id = name - sample
        if request_id not in self.beams or len(tokens) == len(self.prompts[name]):
            return name
        beams = [one - request_id for one in sampled if one - self.samples[one] == request_id]
        return request_id + continued(sample, tokens, beams)

    def abort(self, request_id: int) -> None:
        self.engine.abort(request_id)
        self.aborted.add(request_id)

    def step(self, **budgets: Any) -> ScheduledBatch:
        batch = self.begin(**budgets)
        self.end(batch, budgets.get("now_s", 0.0))
        check_integrity(self.engine)
        return batch

    def step_ahead(self, **budgets: Any) -> ScheduledBatch:
        """Make a batch while the one before is in flight, then report that one."""
        batch = self.begin(**budgets)
        if len(self.flight) > 1 or (batch.step is None and self.flight):
            self.end(self.flight[0], budgets.get("now_s", 0.0))
        check_integrity(self.engine)
        self.manager.check_integrity()
        return batch

    def settle(self, now_s: float = 0.0) -> None:
        """Report the batches in flight."""
        while self.flight:
            self.end(self.flight[0], now_s)

    def run_ahead(self, max_steps: int = 10_000) -> None:
        """Run until all requests are finished, one step ahead."""
        for _ in range(max_steps):
            if not len(self.engine) and not self.flight:
                return
            self.step_ahead()
        raise AssertionError(f"requests starve: {sorted(self.engine.queues.states)}")

    def run(self, max_steps: int = 10_000) -> None:
        """Run until all requests are finished."""
        for _ in range(max_steps):
            if not len(self.engine):
                return
            self.step()
        raise AssertionError(f"requests starve: {sorted(self.engine.queues.states)}")

    def check(self, batch: ScheduledBatch, max_step_tokens: int) -> None:
        """Check budgets, and that each sequence has the tokens of its request."""
        self.check_descriptions()
        assert batch.num_tokens <= max_step_tokens
        if batch.step is None:
            assert not len(batch.sampled)
            return
        ids = batch.step.sequence_ids
        assert len(ids) <= self.engine.config.max_running
        assert len(set(ids.tolist())) == len(ids)
        rows = ids[batch.sampled_rows].tolist()
        for row, name in zip(rows, batch.sampled.tolist(), strict=True):
            assert row == name or (row == name - self.samples[name] and not self.outputs[name])
        proposals = self.proposals_of(batch)
        assert proposals.keys().isdisjoint(ids[batch.num_decodes :].tolist())
        for sequence_id in ids.tolist():
            (one,) = self.manager.describe(self.namespace, [sequence_id], include_tokens=True)
            assert one.token_ids is not None
            name = one.sequence_id
            known = [*self.prompts[name], *self.outputs[name], *proposals.get(name, [])]
            if self.engine.queues.states[name].resumes:
                known.pop()  # it is appended when all beams go on
            assert one.token_ids.tolist() == known

    def check_descriptions(self) -> None:
        """All requests are described with the tokens that they have got."""
        for request in self.engine.describe():
            for one in request.samples:
                output = self.outputs[one.sequence_id]
                assert one.token_ids.tolist() == [*self.prompts[one.sequence_id], *output]
                assert one.num_generated == len(output)
                ended = len(output) == self.stops[one.sequence_id]
                assert one.finished == ended or request.request_id in self.aborted

    def check_outputs(self) -> None:
        """Each sample of a finished request has the tokens that it gets alone."""
        for request_id in self.finished:
            outputs = [self.outputs[request_id + sample] for sample in range(self.widths[request_id])]
            if request_id in self.beams:
                assert outputs == beams_alone(self.prompts[request_id], [len(output) for output in outputs])
            for sample, output in enumerate(outputs):
                if request_id not in self.beams:
                    assert output == alone(self.prompts[request_id], len(output), sample)
                assert request_id in self.aborted or len(output) == self.stops[request_id + sample]


def make_manager(num_blocks: int = 100, **options: Any) -> BlockManager:
    defaults = {"block_size": 4, "watermark": 0.0, "max_sequences": 64, "max_sequence_tokens": 1024}
    return BlockManager(BlocksConfig(num_blocks=num_blocks, **{**defaults, **options}))


def open_rig(scheduler: Scheduler, manager: BlockManager, weight: float = 1.0, **config: Any) -> EngineRig:
    namespace = manager.open_namespace()
    engine = scheduler.open_engine(namespace, SchedulerConfig(**config), weight)
    return EngineRig(manager, engine, namespace, scheduler)


def make_rig(num_blocks: int = 100, blocks: dict[str, Any] | None = None, **config: Any) -> EngineRig:
    """Return an engine alone in a pool of blocks of 4 tokens. Prompts of all sizes queue by arrival."""
    config = {"size_delay_steps": 0.0, **config}
    manager = make_manager(num_blocks, **blocks or {})
    return open_rig(Scheduler(manager), manager, **config)
