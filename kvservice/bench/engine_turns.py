"""Inference engines of other projects that take turns: what `bench vllm` and `bench sglang` share.

All engines live at the same time, each in a process of its own, and take turns on one device: in each round every
engine gets the same prompts, and its figures are set against those of the baseline in the same round. The model is a
Llama with weights without a meaning.
"""

from __future__ import annotations

import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rich.table import Table

from kvservice import plain_json
from kvservice.bench import PeerMissingError, table
from kvservice.bench.engine_workloads import RequestBatch, Sizes
from kvservice.owned import OwnedProcess

# The engine that the others are compared with. It has no store.
BASELINE = "none"
END_S = 30.0
GIB = 1 << 30
# The daemon's pool is not used.
POOL = {"num_layers": 1, "num_kv_heads": 1, "head_size": 32, "num_blocks": 64}

# ---- models


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}


def llama(
    layers: int, hidden: int, heads: int, kv_heads: int, head: int, inner: int, vocabulary: int
) -> dict[str, Any]:
    return LLAMA | {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
    }


# The shape of Llama-3.2-3B: 112 KiB of K/V a token, so 5 GiB are 46,800 tokens; and sizes that suit such a pool.
LLAMA_3B = llama(28, 3072, 24, 8, 128, 8192, 128_256)
SIZES_3B = Sizes(
    chat=RequestBatch(128, 512, 128),
    prompts=RequestBatch(64, 2048, 8),
    lengths=(2048, 8192, 32_768),
    documents=RequestBatch(48, 2048, 16),
    beside=RequestBatch(8, 8192, 1),
    small=RequestBatch(16, 64, 4),
)
# To compare tokens, a smaller model is enough.
LLAMA_CHECK = llama(16, 2048, 16, 8, 128, 5632, 32_000)
# So many tokens are generated of a single prompt whose tokens are compared.
CHECKED_TOKENS = 16


def save_model(directory: Path, config: dict[str, Any], random: bool) -> Path:
    """Write the configuration of a Llama, and with `random` weights with which attention depends on single tokens, so
    that wrong K/V change the output. Without them the engine fills the memory of the weights."""
    directory.mkdir()
    dtype = "bfloat16" if config["hidden_size"] > 1024 else "float32"
    (directory / "config.json").write_text(plain_json.dumps(config | {"torch_dtype": dtype}))
    if random:
        import torch
        from safetensors.torch import save_file

        generator = torch.Generator().manual_seed(0)
        weights = {}
        for name, shape, deviation in llama_weights(config):
            weight = torch.randn(shape, generator=generator) * deviation if deviation else torch.ones(shape)
            weights[name] = weight.to(getattr(torch, dtype))
        save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def llama_weights(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Yield name, shape and standard deviation of the weights of a Llama; 0: they are ones."""
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    wide = 2.0 / hidden**0.5
    yield "model.embed_tokens.weight", (vocabulary, hidden), 1.0
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, size in (("q_proj", query), ("k_proj", kv), ("v_proj", kv)):
            yield f"{prefix}.self_attn.{name}.weight", (size, hidden), wide
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, query), wide
        for name in ("gate_proj", "up_proj"):
            yield f"{prefix}.mlp.{name}.weight", (inner, hidden), wide
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner), wide
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", (hidden,), 0.0
    yield "model.norm.weight", (hidden,), 0.0
    yield "lm_head.weight", (vocabulary, hidden), wide


# ---- processes


class EngineProcess:
    """An engine in a process of its own, see engine_workloads.py, as a context manager. Its calls raise
    PeerMissingError if the engine fails."""

    def __init__(self, name: str, program: str, setup: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        """`program` is the name of the module that is run."""
        self._name, self._log = name, log
        with log.open("wb") as errors:
            self._process = OwnedProcess(
                [sys.executable, "-P", "-m", program, plain_json.dumps(setup)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )

    def __enter__(self) -> EngineProcess:
        return self

    def turn(self, workload: str, number: int, timeout_s: float) -> dict[str, Any]:
        """Run a workload. Returns the values of its turn, and what the engine counts."""
        return self._ask({"workload": workload, "number": number}, timeout_s)

    def from_cache(self, workload: str, wanted: list[tuple[int, int]], timeout_s: float) -> list[tuple[int, list[int]]]:
        """Ask for prompts of the last turn again, with so many tokens of each in the engine's own cache. Returns
        numbers and answers of those of which it had these."""
        answers = self._ask({"workload": workload, "cached": wanted}, timeout_s)["answers"] if wanted else []
        return [(number, tokens) for number, tokens in answers]

    def _ask(self, command: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(plain_json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("It has ended") from None
        return self.answer(timeout_s)

    def answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while not select.select([self._process.stdout], [], [], 1.0)[0]:
            if self._process.poll() is not None:
                raise self._failure("It has ended")
            if time.monotonic() > deadline:
                raise self._failure(f"It does not answer within {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._failure("It has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """Let the process end, without waiting for it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def __exit__(self, *_: object) -> None:
        assert self._process.stdout is not None
        self.end()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # it has children
            self._process.wait()
            self._process.stdout.close()

    def _failure(self, what: str) -> PeerMissingError:
        """Return an error with the last line of the log that names one, and the end of the log."""
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        told = [line for line in lines if "Error" in line][-1:] or ["it says nothing"] * (not lines)
        told += [line for line in lines[-1:] if line not in told]
        return PeerMissingError(f"{what}: {' ... '.join(line[-300:] for line in told)}")


# ---- turns


class Comparison(Protocol):
    """The options of a comparison. `turns` are the numbers of the rounds of each of the `workloads`; `check` compares
    tokens instead of times. `baseline_title` is the baseline in words. An engine is left out if it is not ready within
    `start_s` seconds, or has no answer to a turn within `turn_s`."""

    @property
    def workloads(self) -> tuple[str, ...]: ...

    @property
    def turns(self) -> range: ...

    @property
    def check(self) -> bool: ...

    @property
    def baseline_title(self) -> str: ...

    @property
    def start_s(self) -> float: ...

    @property
    def turn_s(self) -> float: ...


# The answers of engines to turns, by workload, engine and number of the round.
Turns = dict[str, dict[str, dict[int, dict[str, Any]]]]


class Compared(NamedTuple):
    """`ready` is what each engine told when it was ready, `missing` why engines are not in `turns`."""

    ready: dict[str, Any]
    turns: Turns
    missing: dict[str, str]


def compare(
    options: Comparison, program: str, setups: dict[str, dict[str, Any]], environment: dict[str, str], logs: Path
) -> Compared:
    """Start an engine for each setup, side by side, and let them take turns. Raises PeerMissingError if the baseline
    fails."""
    logs.mkdir(parents=True, exist_ok=True)
    ready: dict[str, Any] = {}
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(EngineProcess(name, program, setup, environment, logs / f"{name}.log"))
            for name, setup in setups.items()
        }
        for name, engine in engines.items():
            try:
                ready[name] = engine.answer(options.start_s)
            except PeerMissingError as error:
                leave_out(options, name, error, missing)
        turns = measure(options, {name: engines[name] for name in ready}, missing)
        for engine in engines.values():
            engine.end()  # they end side by side: each unpins much memory
    return Compared(ready, turns, missing)


def leave_out(options: Comparison, name: str, error: PeerMissingError, missing: dict[str, str]) -> None:
    """Go on without an engine. Raises PeerMissingError if nothing could be compared without it."""
    if name == BASELINE:
        raise PeerMissingError(f"{options.baseline_title}: {error}")
    missing[name] = str(error)


def measure(options: Comparison, engines: dict[str, EngineProcess], missing: dict[str, str]) -> Turns:
    """Let the engines take turns. One that fails is left out from then on, and says why in `missing`."""
    turns: Turns = {workload: {name: {} for name in engines} for workload in options.workloads}
    for workload in options.workloads:
        for number in options.turns:
            for name in [name for name in engines if name not in missing]:
                try:
                    turn = turns[workload][name][number] = engines[name].turn(workload, number, options.turn_s)
                except PeerMissingError as error:
                    leave_out(options, name, error, missing)
                    continue
                if options.check and name != BASELINE:
                    turn["from_cache"] = engines[BASELINE].from_cache(
                        workload, differing(turns, workload, name, number), options.turn_s
                    )
                said = (f"{one['row']} {one['value']:.4g} {one['unit']}" for one in turn["figures"])
                # A run takes minutes. Whoever watches it or stops it has these figures.
                print(f"{workload}, round {number}, {name}: {'; '.join(said)}", file=sys.stderr, flush=True)
    return {workload: {n: one for n, one in by.items() if n not in missing} for workload, by in turns.items()}


def rows(turns: Turns, warm_ups: int = 1) -> list[dict[str, Any]]:
    """Return a row for each figure: for each engine its median, its rounds, and the median of its ratios to the
    baseline in the same rounds. Ratios are of speeds: 2 is twice as fast."""
    made = []
    for workload, by_name in turns.items():
        numbers = timed_numbers(by_name[BASELINE], warm_ups)
        for place, figure in enumerate(by_name[BASELINE][numbers[0]]["figures"]):
            row: dict[str, Any] = {"workload": workload, "row": figure["row"], "unit": figure["unit"], "engines": {}}
            for name, by_number in by_name.items():
                figures = [by_number[number]["figures"][place] for number in numbers]
                values = [one["value"] for one in figures]
                bases = [by_name[BASELINE][number]["figures"][place]["value"] for number in numbers]
                pairs = zip(values, bases, strict=True)
                ratios = [base / value if figure["unit"] == "s" else value / base for value, base in pairs]
                row["engines"][name] = {
                    "median": statistics.median(values),
                    "ratio": statistics.median(ratios),
                    "found": statistics.median(one["found"] for one in figures),
                    "preemptions": statistics.median(by_number[number].get("preemptions", 0) for number in numbers),
                    "rounds": values,
                }
            made.append(row)
    return made


def timed_numbers(numbers: Iterable[int], warm_ups: int = 1) -> list[int]:
    """Return the numbers of the rounds that count: the first ones warm up, unless there are no others."""
    every = list(numbers)
    return every[warm_ups:] or every


def differing(turns: Turns, workload: str, name: str, number: int) -> list[tuple[int, int]]:
    """Return the numbers of the answers that are not those of the baseline, which has computed the prompts or had them
    in its own cache, and how many tokens of each prompt were found."""
    turn, other = (turns[workload][each][number] for each in (name, BASELINE))
    rows = zip(turn["answers"], other["answers"], turn["num_cached"], strict=True)
    return [(place, found) for place, (ours, theirs, found) in enumerate(rows) if ours != theirs]


def equal_answers(turns: Turns) -> dict[str, dict[str, list[int]]]:
    """Return for each workload and engine how many answers are right, of how many, and how many of these are not those
    of the baseline, but those that it gives when it has the same tokens of the prompt in its own cache: then the engine
    itself answers otherwise to what it finds than to what it computes. That is asked of the baseline, or the engine has
    answered so before, to as many tokens that it had just computed."""
    made: dict[str, dict[str, list[int]]] = {}
    for workload, by_name in turns.items():
        for name, by_number in by_name.items():
            equal = total = num_from_cache = 0
            for number, turn in by_number.items():
                answers, found, earlier = turn["answers"], turn["num_cached"], turn["earlier"]
                others = [place for place, _ in differing(turns, workload, name, number)]
                same = {place for place, tokens in turn.get("from_cache", ()) if answers[place] == tokens}
                for place in others:
                    before = earlier[place]
                    if before is not None and (answers[before], found[before]) == (answers[place], found[place]):
                        same.add(place)
                total += len(answers)
                equal += len(answers) - len(others) + len(same)
                num_from_cache += len(same)
            made.setdefault(workload, {})[name] = [equal, total, num_from_cache]
    return made


def failures(results: dict[str, Any]) -> list[str]:
    """Return the engines that gave other tokens than the baseline."""
    return [
        f"{workload}, {name}: {total - equal} of {total} answers differ"
        for workload, by_name in results["equal"].items()
        for name, (equal, total, _) in by_name.items()
        if equal != total
    ]


# ---- results


def speeds(results: dict[str, Any], title: str, heads: tuple[str, ...]) -> Table:
    """Return a table with a row for each figure: that of the baseline, and how many times as fast the others are."""
    shown = table(title, ("workload", ""), heads)
    for row in results["rows"]:
        first, *others = (row["engines"][name] for name in results["engines"])
        value = f"{1e3 * first['median']:,.1f} ms" if row["unit"] == "s" else f"{first['median']:,.0f} {row['unit']}"
        ratios = (f"{one['ratio']:.2f} ({one['found']:.0%})" for one in others)
        shown.add_row(row["workload"], row["row"], value, *ratios)
    return shown


def same_tokens(results: dict[str, Any], title: str, heads: tuple[str, ...]) -> Table:
    """Return a table that says how many answers are equal, by workload and engine."""
    same = table(title, ("workload",), heads)
    for workload, by_name in results["equal"].items():
        same.add_row(workload, *map(same_answers, (by_name[name] for name in results["engines"])))
    return same


def same_answers(counts: list[int]) -> str:
    equal, total, num_from_cache = counts
    return f"{equal} of {total}{f', {num_from_cache} as from its cache' if num_from_cache else ''}"
