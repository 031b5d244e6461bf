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
from typing import NamedTuple, TypeAlias

from kvservice.errors import InvalidArgumentError

# Tokens of a block in Mooncake's published traces.
MOONCAKE_BLOCK_SIZE = 512
# Limits of a file.
MAX_REQUESTS = 1_000_000
MAX_TOKENS = 1 << 24
MAX_BLOCKS = 1 << 24
MAX_LINE_BYTES = 16 << 20
MAX_ARRIVAL_MS = 1e15
_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
# Arrival in seconds, tokens of the prompt, tokens of the output, full blocks of the prompt.
_Row: TypeAlias = tuple[float, int, int, tuple[int, ...]]


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


def read_trace(path: str | Path, block_size: int = MOONCAKE_BLOCK_SIZE, max_blocks: int = MAX_BLOCKS) -> Trace:
    """Read a file of JSON lines. Raises InvalidArgumentError naming `trace`, with the number of the line."""
    rows: list[_Row] = []
    num_blocks = 0
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), 1):
                if line.strip():
                    rows.append(_numbered_row(path, number, line, block_size))
                    num_blocks += len(rows[-1][3])
                if number > MAX_REQUESTS or num_blocks > max_blocks:
                    raise InvalidArgumentError(
                        f"{path}: has more than {MAX_REQUESTS:,} lines, or {max_blocks:,} full blocks", field="trace"
                    )
    except OSError as error:
        raise InvalidArgumentError(f"{path}: {error.strerror or error}", field="trace") from None
    if not rows:
        raise InvalidArgumentError(f"{path}: has no requests", field="trace")
    rows.sort(key=lambda row: row[0])
    return Trace(Path(path).stem, block_size, tuple(_with_conversations(rows)))


def _numbered_row(path: str | Path, number: int, line: bytes, block_size: int) -> _Row:
    """Raises InvalidArgumentError naming `trace`, with the number of the line."""
    try:
        return _row(line, block_size)
    except json.JSONDecodeError as error:
        fault = f"is not JSON: {error.msg}"
    except UnicodeDecodeError:
        fault = "is not UTF-8"
    except RecursionError:
        fault = "is nested too deeply"
    except ValueError as error:
        fault = str(error)
    raise InvalidArgumentError(f"{path}, line {number}: {fault:.200}", field="trace")


def _row(line: bytes, block_size: int) -> _Row:
    """Return the values of a line. Raises ValueError, RecursionError."""
    if len(line) == MAX_LINE_BYTES:
        raise ValueError(f"is longer than {MAX_LINE_BYTES:,} bytes")
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError("is not a JSON object")
    if missing := [name for name in _FIELDS if name not in found]:
        raise ValueError(f"has no {' and no '.join(missing)}")
    arrival_ms, input_tokens, output_tokens, blocks = (found[name] for name in _FIELDS)
    if type(arrival_ms) not in (int, float) or not 0 <= arrival_ms < MAX_ARRIVAL_MS:
        raise ValueError(f"timestamp: must be a number of milliseconds from 0 to {MAX_ARRIVAL_MS:g}")
    for name, count in (("input_length", input_tokens), ("output_length", output_tokens)):
        if type(count) is not int or not 0 <= count <= MAX_TOKENS:
            raise ValueError(f"{name}: must be a whole number from 0 to {MAX_TOKENS}")
    if not isinstance(blocks, list) or not all(type(block) is int and abs(block) < 1 << 63 for block in blocks):
        raise ValueError("hash_ids: must be a list of whole numbers of 64 bits")
    if len(set(blocks)) < len(blocks):
        raise ValueError("hash_ids: a number is there twice")
    num_full = input_tokens // block_size
    if not num_full <= len(blocks) <= num_full + 1:
        raise ValueError(f"hash_ids: {len(blocks)} for {input_tokens} tokens in blocks of {block_size}")
    return arrival_ms / 1000, input_tokens, output_tokens, tuple(blocks[:num_full])


def _with_conversations(rows: Iterable[_Row]) -> Iterator[TracedRequest]:
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
