"""Workloads for inference engines of other projects, and one engine in a process of its own: what `bench vllm` and
`bench sglang` share on the engine's side.

The process gets a SETUP, a JSON object: `sizes` are those of the workloads, the rest is for the engine. A line on the
standard input, {"workload": name, "number": n}, asks for a turn, and {"workload": name, "cached": [...]} for prompts of
its last turn again, see `from_cache`. The answer to it, and one when the engine is ready, is a line of JSON on the
standard output. The engine's own output goes to the standard error.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TextIO

from kvservice import plain_json

# ---- the workloads: prompts, and the figures of one turn with them
#
# Prompts are token ids that depend on the workload, the turn and their number only, so all engines get the same ones.
# Every turn leaves the engine idle, with everything saved that it saves.


# Tokens by which a prompt is longer than a multiple of all block sizes.
ODD = 7
# How often a prompt is sent again that should be found, and was not found to its last block.
TRIES = 5


@dataclass(frozen=True)
class Output:
    """A step brings new tokens of a request, and tells how many tokens of its prompt were not computed."""

    request: str
    tokens: Sequence[int]
    num_cached: int
    ended: bool


class ServingEngine(Protocol):
    """`stores`: whether it has a store, so that prompts can be found after `forget`."""

    vocabulary: int
    block_size: int
    stores: bool

    def submit(self, prompt: list[int], max_tokens: int, streamed: bool) -> str:
        """Add a request of greedy tokens that no token ends. Returns its name. A request that is not streamed has one
        output, at its end."""

    def step(self) -> list[Output]:
        """Wait for the outputs of a step."""

    def forget(self) -> None:
        """Empty the prefix cache of the engine's own pool. What is in its store stays."""

    def wait_for_saves(self) -> None:
        """Return when the engine has probably saved what it saves."""

    def take_counts(self) -> dict[str, Any]:
        """Return what the engine has counted since the last call, by name."""


@dataclass(frozen=True)
class RequestBatch:
    """Requests of `num` prompts of `length` tokens, with `max_tokens` tokens generated for each."""

    num: int
    length: int
    max_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num * (self.length + self.max_tokens)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the workloads. `chat` should need more than the engine's pool, and `documents` about twice the pool."""

    chat: RequestBatch
    prompts: RequestBatch
    lengths: tuple[int, ...]
    documents: RequestBatch
    # Long prompts, and small requests of which so many run beside them.
    beside: RequestBatch
    small: RequestBatch
    # Tokens that are generated of a single prompt.
    answer: int = 1
    # By how many tokens single prompts are longer than these lengths.
    odd: tuple[int, ...] = (0, ODD)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Sizes:
        """Return the sizes that `asdict` made these values of, also after JSON."""
        batches = {name: RequestBatch(**value) for name, value in values.items() if isinstance(value, dict)}
        return cls(lengths=tuple(values["lengths"]), answer=values["answer"], odd=tuple(values["odd"]), **batches)

    @property
    def longest(self) -> int:
        """The longest request, in tokens."""
        documents = self.documents.length + 2 * self.documents.max_tokens
        batches = (self.chat, self.prompts, self.beside, self.small)
        single = max(self.lengths) + self.answer
        return max(single, documents, *(one.length + one.max_tokens for one in batches)) + ODD + 1


@dataclass(frozen=True)
class Figure:
    """A figure of one turn: tokens a second, or seconds. `found` is the share of the prompts' tokens that were not
    computed."""

    row: str
    value: float
    unit: str
    found: float


@dataclass
class Turn:
    """The figures of a turn. Of each prompt, in the order in which they were asked: the tokens that the engine
    generated, and how many of the prompt it did not compute."""

    figures: list[Figure] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    num_cached: list[int] = field(default_factory=list)

    def add(self, row: str, value: float, unit: str, prompts: list[list[int]], served: list[ServedRequest]) -> None:
        found = sum(one.num_cached for one in served) / sum(map(len, prompts))
        self.figures.append(Figure(row, value, unit, found))
        self.note(prompts, served)

    def note(self, prompts: list[list[int]], served: list[ServedRequest]) -> None:
        self.prompts += prompts
        self.answers += [one.tokens for one in served]
        self.num_cached += [one.num_cached for one in served]

    def as_values(self) -> dict[str, Any]:
        """The prompts are those of every engine."""
        figures = [asdict(figure) for figure in self.figures]
        return {"figures": figures, "answers": self.answers, "num_cached": self.num_cached, "earlier": self._earlier()}

    def _earlier(self) -> list[int | None]:
        """Return for each answer the number of the last one before it to the same prompt."""
        last: dict[tuple[int, ...], int] = {}
        earlier: list[int | None] = []
        for number, prompt in enumerate(map(tuple, self.prompts)):
            earlier.append(last.get(prompt))
            last[prompt] = number
        return earlier


@dataclass
class ServedRequest:
    """A request: when it was submitted, the seconds to its first token, and what came out."""

    began: float
    first_s: float | None = None
    tokens: list[int] = field(default_factory=list)
    num_cached: int = 0
    ended: bool = False

    def add(self, output: Output) -> None:
        if self.first_s is None:
            self.first_s = time.perf_counter() - self.began
            self.num_cached = output.num_cached
        self.tokens += output.tokens
        self.ended = output.ended

    @property
    def first_token_s(self) -> float:
        assert self.first_s is not None, "it has been served"
        return self.first_s


class Desk:
    """Submits requests and follows them."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine
        self.open: dict[str, ServedRequest] = {}

    def submit(self, prompt: list[int], max_tokens: int, streamed: bool = True) -> ServedRequest:
        served = ServedRequest(time.perf_counter())
        self.open[self._engine.submit(prompt, max_tokens, streamed)] = served
        return served

    def step(self) -> None:
        for output in self._engine.step():
            served = self.open[output.request]
            served.add(output)
            if served.ended:
                del self.open[output.request]

    def finish(self) -> None:
        while self.open:
            self.step()


def serve(
    engine: ServingEngine, prompts: list[list[int]], max_tokens: int, streamed: bool = True
) -> list[ServedRequest]:
    """Serve requests that all come at once."""
    desk = Desk(engine)
    served = [desk.submit(prompt, max_tokens, streamed) for prompt in prompts]
    desk.finish()
    return served


def prompt_of(engine: ServingEngine, length: int, *of: object) -> list[int]:
    """Return the prompt that these values name."""
    return random.Random(repr(of)).choices(range(3, engine.vocabulary), k=length)


def tokens_per_s(turn: Turn, row: str, engine: ServingEngine, prompts: list[list[int]], max_tokens: int) -> None:
    """Add the tokens a second, read and generated, of requests that come at once."""
    start = time.perf_counter()
    served = serve(engine, prompts, max_tokens, streamed=False)
    seconds = time.perf_counter() - start
    num_tokens = sum(map(len, prompts)) + sum(len(one.tokens) for one in served)
    turn.add(row, num_tokens / seconds, "tokens/s", prompts, served)
    engine.wait_for_saves()


def new_prompts(name: str, engine: ServingEngine, batch: RequestBatch, number: int) -> Turn:
    """Prompts that nobody has seen."""
    engine.forget()
    turn = Turn()
    prompts = [prompt_of(engine, batch.length, name, number, each) for each in range(batch.num)]
    tokens_per_s(turn, f"{batch.num} x {batch.length:,} + {batch.max_tokens}", engine, prompts, batch.max_tokens)
    return turn


def chat(engine: ServingEngine, sizes: Sizes, number: int) -> Turn:
    """Nothing is found, and requests grow until the pool is full and some are preempted."""
    return new_prompts("chat", engine, sizes.chat, number)


def prompts(engine: ServingEngine, sizes: Sizes, number: int) -> Turn:
    """Nothing is found, and nearly everything is prompts."""
    return new_prompts("prompts", engine, sizes.prompts, number)


def found(engine: ServingEngine, sizes: Sizes, number: int) -> Turn:
    """The time to the first token of single prompts: computed, in the engine's own cache, and after that is forgotten:
    in the engine's store, or computed again."""
    turn = Turn()
    for length in [shortest + odd for shortest in sizes.lengths for odd in sizes.odd]:
        repeats = max(1, min(4, 4 * sizes.lengths[0] // length))
        some = [prompt_of(engine, length, "found", number, length, each) for each in range(repeats)]
        computed, cached = [], []
        for prompt in some:
            computed += serve(engine, [prompt], sizes.answer)
            cached += serve(engine, [prompt], sizes.answer)
        engine.wait_for_saves()
        stored = [find(engine, prompt, sizes.answer) for prompt in some]
        for where, served in (("computed", computed), ("in its cache", cached), ("in the store", stored)):
            median = statistics.median(one.first_token_s for one in served)
            turn.add(f"{length:,} {where}", median, "s", some, served)
    return turn


def find(engine: ServingEngine, prompt: list[int], max_tokens: int) -> ServedRequest:
    """Send a prompt that the engine itself has forgotten. What is not found to its last block is sent again."""
    wanted = (len(prompt) - 1) // engine.block_size * engine.block_size if engine.stores else 0
    for _ in range(TRIES):
        engine.forget()
        (served,) = serve(engine, [prompt], max_tokens)
        if served.num_cached >= wanted:
            return served
        engine.wait_for_saves()
    return served


def from_cache(engine: ServingEngine, turn: Turn, wanted: Iterable[tuple[int, int]]) -> list[tuple[int, list[int]]]:
    """Ask for prompts of a turn again. `wanted`: their numbers, and how many tokens of each the engine shall have in
    its own cache, which keeps whole blocks, of windows and recurrent layers those before a prompt's last token. Returns
    numbers and answers of those of which it had these."""
    answers = []
    for number, num_tokens in wanted:
        prompt, whole = turn.prompts[number], num_tokens // engine.block_size * engine.block_size
        engine.forget()
        if whole:
            serve(engine, [prompt[: whole + 1]], 1)
        (served,) = serve(engine, [prompt], len(turn.answers[number]))
        if served.num_cached == whole:
            answers.append((number, served.tokens))
    return answers


def cycle(engine: ServingEngine, sizes: Sizes, number: int) -> Turn:
    """Questions about documents that all do not fit into the pool: about all of them, then about half of them and as
    many new ones. The first turn reads the documents before it is timed."""
    turn, batch = Turn(), sizes.documents
    documents = [prompt_of(engine, batch.length, "document", each) for each in range(batch.num)]
    if number == 0:
        serve(engine, documents, 1, streamed=False)
        engine.wait_for_saves()
    for row, num_known in (("all seen", batch.num), ("half new", batch.num // 2)):
        draw = random.Random(repr((row, number)))
        asked = draw.sample(documents, num_known)
        asked += [prompt_of(engine, batch.length, row, number, each) for each in range(batch.num - num_known)]
        draw.shuffle(asked)
        ends = [prompt_of(engine, batch.max_tokens, "end", row, number, each) for each in range(batch.num)]
        questions = [document + end for document, end in zip(asked, ends, strict=True)]
        tokens_per_s(turn, f"{batch.num} x {batch.length:,}, {row}", engine, questions, batch.max_tokens)
    return turn


def beside(engine: ServingEngine, sizes: Sizes, number: int) -> Turn:
    """The time to the first token of small requests, alone and beside long prompts that come one after the other. The
    long ones are in the engine's store, or computed."""
    turn, batch = Turn(), sizes.beside
    long = [prompt_of(engine, batch.length + ODD, "long", number, each) for each in range(batch.num)]
    for prompt in long:
        serve(engine, [prompt], 1)
    engine.wait_for_saves()
    engine.forget()
    for row, prompts_beside in (("alone", []), (f"beside loads of {batch.length:,}", long)):
        small, loads = crowd(engine, sizes.small, prompts_beside, (number, row))
        quantiles = statistics.quantiles((one.first_token_s for one in small), n=100, method="inclusive")
        for name, value in (("p50", quantiles[49]), ("p99", quantiles[98])):
            share = sum(one.num_cached for one in loads) / max(1, sum(map(len, prompts_beside)))
            turn.figures.append(Figure(f"{row}, {name}", value, "s", share))
        turn.note(prompts_beside, loads)
    engine.wait_for_saves()
    return turn


def crowd(
    engine: ServingEngine, batch: RequestBatch, long: list[list[int]], of: object
) -> tuple[list[ServedRequest], list[ServedRequest]]:
    """Keep `batch.num` small requests running, beside one long one after the other. Returns the small ones and the long
    ones. It ends with the last long one, or after 16 times `batch.num` small ones if there are none."""
    desk = Desk(engine)
    small: list[ServedRequest] = []
    loads: list[ServedRequest] = []
    while len(small) < 16 * batch.num if not long else len(loads) < len(long) or not loads[-1].ended:
        is_loading = bool(loads) and not loads[-1].ended
        for _ in range(batch.num - (len(desk.open) - is_loading)):
            small.append(desk.submit(prompt_of(engine, batch.length, "small", of, len(small)), batch.max_tokens))
        if long and not is_loading:
            loads.append(desk.submit(long[len(loads)], 1))
        desk.step()
    desk.finish()
    return small, loads


WORKLOADS: dict[str, Callable[[ServingEngine, Sizes, int], Turn]] = {
    "chat": chat,
    "prompts": prompts,
    "found": found,
    "cycle": cycle,
    "beside": beside,
}


# ---- the process


def serve_turns(make: Callable[[dict[str, Any]], tuple[ServingEngine, dict[str, Any]]]) -> None:
    """Be the process. `make` gets the setup, and returns the engine and what is told about it when it is ready."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    setup = json.loads(sys.argv[1])
    engine, told = make(setup)
    print(plain_json.dumps(told), file=answers, flush=True)
    answer_turns(engine, Sizes.of(setup["sizes"]), sys.stdin, answers)


def answer_turns(engine: ServingEngine, sizes: Sizes, commands: TextIO, answers: TextIO) -> None:
    turns: dict[str, Turn] = {}
    for line in commands:
        command = json.loads(line)
        if "cached" in command:
            again = from_cache(engine, turns[command["workload"]], command["cached"])
            print(plain_json.dumps({"answers": again}), file=answers, flush=True)
            continue
        engine.take_counts()
        turn = turns[command["workload"]] = WORKLOADS[command["workload"]](engine, sizes, command["number"])
        print(plain_json.dumps(turn.as_values() | engine.take_counts()), file=answers, flush=True)
