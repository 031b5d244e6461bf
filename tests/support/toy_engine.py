"""An engine over the scheduler of a daemon. Its K/V and its next token depend on all tokens before them."""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvservice.client import BatchReport, PoolInfo, ScheduledRequest

VOCABULARY = 1000


def next_token(tokens: list[int]) -> int:
    """Return the token that the model gives after these tokens."""
    return zlib.crc32(np.array(tokens, np.int32).tobytes()) % VOCABULARY


def alone(prompt: list[int], count: int) -> list[int]:
    """Return the tokens that a request gets when nothing else runs."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def content(info: PoolInfo, tokens: list[int], start: int = 0) -> np.ndarray:
    """Return the keys of the tokens from `start` on, float32 `[num_layers, n, num_kv_heads, head_size]`. Each depends
    on all tokens up to its own; the values are the negative keys."""
    data = np.array(tokens, np.int32).tobytes()
    prefixes = [zlib.crc32(data[: 4 * (at + 1)]) % 4096 for at in range(start, len(tokens))]
    of_tokens = np.array(prefixes, np.float32)[None, :, None, None]
    layers = np.arange(info.num_layers, dtype=np.float32)[:, None, None, None] * 4096
    heads = np.arange(info.num_kv_heads, dtype=np.float32)[None, None, :, None] / 4
    return np.broadcast_to(of_tokens + layers + heads, (*(of_tokens + layers + heads).shape[:3], info.head_size)).copy()


@dataclass
class ToyEngine:
    """Drives a scheduler whose methods are awaited, see both_faces. `outputs` are the tokens of each sequence, and
    `finished` the requests that are over."""

    kv: Any
    scheduler: Any
    prompts: dict[int, list[int]] = field(default_factory=dict)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    # The request of each sequence.
    firsts: dict[int, int] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)
    batches: list[Any] = field(default_factory=list)

    async def add(self, request_id: int, prompt: Iterable[int], max_tokens: int = 4, **options: Any) -> None:
        tokens = list(prompt)
        await self.scheduler.add([ScheduledRequest(request_id, tokens, max_tokens, **options)])
        for sequence_id in range(request_id, request_id + options.get("width", 1)):
            self.prompts[sequence_id], self.outputs[sequence_id] = tokens, []
            self.firsts[sequence_id] = request_id

    async def schedule(self, *reports: BatchReport, **options: Any) -> Any:
        batch = await self.scheduler.schedule(list(reports), **options)
        self.finished += batch.finished
        self.batches.append(batch)
        return batch

    def rows(self, batch: Any) -> list[tuple[int, int, int]]:
        """Return (sequence id, first position, end) of each row of the batch's step."""
        ends, counts = batch.step.context_lens.tolist(), batch.step.query_lens.tolist()
        return [
            (sequence_id, end - count, end)
            for sequence_id, end, count in zip(batch.sequence_ids.tolist(), ends, counts, strict=True)
        ]

    def sample_number(self, sequence_id: int) -> int:
        return 0 if self.outputs[sequence_id] else sequence_id - self.firsts[sequence_id]

    def known(self, sequence_id: int) -> list[int]:
        return [*self.prompts[sequence_id], *self.outputs[sequence_id]]

    async def compute(self, batch: Any, num_layers: int | None = None) -> None:
        """Write the K/V of the batch's step, of all layers or of the first ones."""
        info = self.kv.info
        keys = np.concatenate(
            [content(info, self.known(sequence_id)[:end], start) for sequence_id, start, end in self.rows(batch)],
            axis=1,
        )
        for layer in range(info.num_layers if num_layers is None else num_layers):
            await batch.step.attend(layer, keys[layer], keys[layer], -keys[layer])

    async def check(self, batch: Any) -> None:
        """Compare all K/V of the batch's sequences with what the model gives."""
        sequences = batch.step.sequences
        for sequence, (sequence_id, _, end) in zip(sequences, self.rows(batch), strict=True):
            assert sequence.sequence_id == sequence_id
            key, value = await self.kv.read(sequence, 0, end)
            expected = content(self.kv.info, self.known(sequence_id)[:end])
            np.testing.assert_array_equal(key, expected)
            np.testing.assert_array_equal(value, -expected)

    def sample(self, batch: Any, gone: Container[int] = ()) -> BatchReport:
        """Return the report of a batch that is computed. The first tokens of samples of one prompt differ. `gone` are
        the sequences that the report of the batch before found finished."""
        sampled = [sequence_id for sequence_id in batch.sampled.tolist() if sequence_id not in gone]
        tokens = [next_token(self.known(sequence_id)) + self.sample_number(sequence_id) for sequence_id in sampled]
        for sequence_id, token in zip(sampled, tokens, strict=True):
            self.outputs[sequence_id].append(token)
        return BatchReport(batch.number, tokens)

    async def run(self, batch: Any = None, max_steps: int = 1000) -> None:
        """Run until nothing can run any more, and check every step."""
        batch = batch or await self.schedule()
        while batch.number:
            assert len(self.batches) < max_steps, "requests starve"
            await self.compute(batch)
            await self.check(batch)
            batch = await self.schedule(self.sample(batch))

    def check_outputs(self) -> None:
        """Each request has the tokens that it gets alone."""
        for request_id in self.finished:
            output = self.outputs[request_id]
            assert output == alone(self.prompts[request_id], len(output))
