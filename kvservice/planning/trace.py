"""Traces of requests that share prefixes: read from files in Mooncake's format, or made from a seed.

A line of a file is a JSON object with `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`: one
number for each block of 512 tokens of the prompt. Equal numbers mean equal blocks with equal blocks before them.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvservice.errors import InvalidArgumentError

# Tokens of a block in Mooncake's published traces.
MOONCAKE_BLOCK_SIZE = 512
# Limits of a file.
MAX_REQUESTS = 1_000_000
MAX_TOKENS = 1 << 24
MAX_LINE_BYTES = 16 << 20


class TracedRequest(NamedTuple):
    """A request. `blocks` are the full blocks of its prompt; those of its output appear in the next turn's prompt."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    conversation: int


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival."""

    name: str
    block_size: int
    requests: tuple[TracedRequest, ...]

    @property
    def input_tokens(self) -> int:
        return sum(request.input_tokens for request in self.requests)

    @property
    def duration_s(self) -> float:
        """The time from the first to the last arrival, above 0."""
        return max(self.requests[-1].arrival_s - self.requests[0].arrival_s, 1e-3)

    def conversation_tokens(self) -> list[int]:
        """Return the length of each conversation after its last turn."""
        longest: dict[int, int] = {}
        for request in self.requests:
            length = request.input_tokens + request.output_tokens
            longest[request.conversation] = max(length, longest.get(request.conversation, 0))
        return list(longest.values())


def read_trace(path: str | Path, block_size: int = MOONCAKE_BLOCK_SIZE) -> Trace:
    """Read a file of JSON lines. Raises InvalidArgumentError naming `trace`, with the number of the line."""
    try:
        with Path(path).open("rb") as file:
            lines = list(itertools.islice(iter(lambda: file.readline(MAX_LINE_BYTES), b""), MAX_REQUESTS + 1))
    except OSError as error:
        raise InvalidArgumentError(f"{path}: {error.strerror or error}", field="trace") from None
    if len(lines) > MAX_REQUESTS:
        raise InvalidArgumentError(f"{path}: has more than {MAX_REQUESTS} lines", field="trace")
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(_row(json.loads(line), block_size))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise InvalidArgumentError(f"{path}, line {number}: {error!r:.200}", field="trace") from None
    if not rows:
        raise InvalidArgumentError(f"{path}: has no requests", field="trace")
    rows.sort(key=lambda row: row[0])
    return Trace(Path(path).stem, block_size, tuple(_with_conversations(rows)))


def _row(found: Any, block_size: int) -> tuple[float, int, int, tuple[int, ...]]:
    """Return the values of a line. Raises ValueError, KeyError, TypeError."""
    arrival_s = float(found["timestamp"]) / 1000
    counts = (_count(found, "input_length"), _count(found, "output_length"))
    blocks = tuple(found["hash_ids"])
    if not 0 <= arrival_s < 1e12:
        raise ValueError("timestamp: is negative or too large")
    if not all(type(block) is int for block in blocks) or len(set(blocks)) < len(blocks):
        raise ValueError("hash_ids: must be different whole numbers")
    num_full = counts[0] // block_size
    if not num_full <= len(blocks) <= num_full + 1:
        raise ValueError(f"hash_ids: {len(blocks)} for {counts[0]} tokens in blocks of {block_size}")
    return arrival_s, *counts, blocks[:num_full]


def _count(found: Any, name: str) -> int:
    value = found[name]
    if type(value) is not int or not 0 <= value <= MAX_TOKENS:
        raise ValueError(f"{name}: must be a whole number from 0 to {MAX_TOKENS}")
    return value


def _with_conversations(rows: Iterable[tuple[float, int, int, tuple[int, ...]]]) -> Iterator[TracedRequest]:
    """Yield requests with their conversations. A request continues the conversation whose latest prompt it contains to
    the last full block, if no earlier conversation had that block."""
    seen, last_blocks, numbers = set[int](), dict[int, int](), itertools.count()
    for arrival_s, input_tokens, output_tokens, blocks in rows:
        found = next((last_blocks[block] for block in reversed(blocks) if block in last_blocks), None)
        conversation = next(numbers) if found is None else found
        if blocks and blocks[-1] not in seen:
            last_blocks[blocks[-1]] = conversation
        seen.update(blocks)
        yield TracedRequest(arrival_s, input_tokens, output_tokens, blocks, conversation)


@dataclass(frozen=True)
class ConversationLoad:
    """A synthetic workload: conversations that begin at random (a Poisson process) with one of several system prompts,
    whose popularity follows Zipf's law, and go on for some turns with pauses for thinking. Lengths are in tokens, and
    exponentially distributed around their means, as the pauses are."""

    num_conversations: int
    conversations_per_s: float
    block_size: int = 64
    num_system_prompts: int = 32
    zipf_exponent: float = 1.0
    system_tokens: tuple[int, int] = (512, 4096)
    mean_turns: float = 5.0
    mean_user_tokens: float = 300.0
    mean_output_tokens: float = 200.0
    mean_think_s: float = 20.0
    tokens_per_s: float = 50.0


def synthetic_trace(workload: ConversationLoad, seed: int) -> Trace:
    """Return a trace; the same for the same seed."""
    rng, new_block = random.Random(seed), itertools.count()
    size = workload.block_size
    systems = []
    for _ in range(workload.num_system_prompts):
        length = rng.randint(*workload.system_tokens) // size
        systems.append([next(new_block) for _ in range(max(1, length))])
    weights = [1 / rank**workload.zipf_exponent for rank in range(1, len(systems) + 1)]
    requests: list[tuple[float, int, TracedRequest]] = []
    start_s = 0.0
    for conversation in range(workload.num_conversations):
        start_s += rng.expovariate(workload.conversations_per_s)
        blocks = list(rng.choices(systems, weights)[0])
        tokens, now = len(blocks) * size, start_s
        for _ in range(1 + int(rng.expovariate(1 / max(workload.mean_turns - 1, 1e-9)) + 0.5)):
            tokens += 1 + int(rng.expovariate(1 / workload.mean_user_tokens))
            output = 1 + int(rng.expovariate(1 / workload.mean_output_tokens))
            blocks += [next(new_block) for _ in range(tokens // size - len(blocks))]
            request = TracedRequest(now, tokens, output, tuple(blocks), conversation)
            heapq.heappush(requests, (now, len(requests), request))
            tokens += output
            now += output / workload.tokens_per_s + rng.expovariate(1 / workload.mean_think_s)
    return Trace(f"synthetic, seed {seed}", size, tuple(heapq.heappop(requests)[2] for _ in range(len(requests))))
