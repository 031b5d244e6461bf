"""vLLM with the connector of this project beside vLLM with its own offloading, and beside vLLM without a connector.

All engines live at the same time, each in a process of its own, and take turns on one device: in each round every
engine gets the same prompts, and its figures are set against those of the engine without a connector in the same round.
The stores get the same bytes of host memory. The model is a Llama with weights without a meaning, unless one is given.
"""

from __future__ import annotations

import importlib.util
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from kvservice import plain_json
from kvservice.bench import PeerMissingError, table
from kvservice.bench.vllm_engine import WORKLOADS, Output, RequestBatch, Sizes
from kvservice.launch import Daemon
from kvservice.owned import OwnedFolder, OwnedProcess

__all__ = ["SCALES", "WORKLOADS", "Output", "RequestBatch", "Sizes", "VLLMBenchOptions", "failures", "render", "run"]

BASELINE = "none"
# The engines that are compared with the one without a connector.
CONNECTORS = ("kvservice", "offloading", "simple")
TITLES = {"offloading": "OffloadingConnector", "simple": "SimpleCPUOffloadConnector"}

START_S, TURN_S, END_S = 600.0, 600.0, 30.0
GIB = 1 << 30
# The daemon's pool is not used.
POOL = {"num_layers": 1, "num_kv_heads": 1, "head_size": 32, "num_blocks": 64}
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
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # It is part of the seed of vLLM's block hashes.
    "PYTHONHASHSEED": "0",
}
ENVIRONMENTS = {
    # Threads of an engine that waits for its turn must not spin.
    "cpu": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "KMP_BLOCKTIME": "0"},
    # FlashInfer, if it is installed, compiles its sampler at the first use.
    "cuda": {"VLLM_USE_FLASHINFER_SAMPLER": "0"},
}


@dataclass(frozen=True)
class Scale:
    """A model, what engines of it are given, and sizes of workloads that suit them."""

    model: dict[str, Any]
    pool_gib: float
    store_gib: float
    engine: dict[str, Any]
    sizes: Sizes


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


SCALES = {
    # The shape of Llama-3.2-3B: 112 KiB of K/V a token, so 5 GiB are 46,800 tokens.
    "cuda": Scale(
        llama(28, 3072, 24, 8, 128, 8192, 128_256),
        pool_gib=5,
        store_gib=16,
        engine={
            "dtype": "bfloat16",
            "max_num_seqs": 128,
            "max_num_batched_tokens": 8192,
            # The size of the pool counts, and other engines use the device, too.
            "gpu_memory_utilization": 0.1,
            "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 48, 64, 96, 128]},
        },
        sizes=Sizes(
            chat=RequestBatch(128, 512, 128),
            prompts=RequestBatch(64, 2048, 8),
            lengths=(2048, 8192, 32_768),
            documents=RequestBatch(48, 2048, 16),
            beside=RequestBatch(8, 8192, 1),
            small=RequestBatch(16, 64, 4),
        ),
    ),
    # 64 KiB of K/V a token.
    "cpu": Scale(
        llama(16, 1024, 16, 8, 64, 2816, 32_000),
        pool_gib=0.3,
        store_gib=2,
        engine={
            "dtype": "float32",
            "max_num_seqs": 32,
            "max_num_batched_tokens": 2048,
            "block_size": 32,
            "enforce_eager": True,
        },
        sizes=Sizes(
            chat=RequestBatch(32, 128, 64),
            prompts=RequestBatch(8, 512, 8),
            lengths=(512, 1024, 2048, 4096),
            documents=RequestBatch(20, 512, 8),
            beside=RequestBatch(4, 2048, 1),
            small=RequestBatch(4, 32, 4),
        ),
    ),
    # For a first look on the CPU: 2 KiB of K/V a token, and a pool of 768 tokens.
    "tiny": Scale(
        llama(4, 128, 4, 2, 32, 256, 512),
        pool_gib=1.5 / 1024,
        store_gib=0.25,
        engine={
            "dtype": "float32",
            "max_num_seqs": 16,
            "max_num_batched_tokens": 512,
            "block_size": 32,
            "enforce_eager": True,
        },
        sizes=Sizes(
            chat=RequestBatch(12, 64, 32),
            prompts=RequestBatch(4, 128, 4),
            lengths=(256,),
            documents=RequestBatch(12, 128, 4),
            beside=RequestBatch(2, 256, 1),
            small=RequestBatch(4, 16, 2),
        ),
    ),
}
# So many tokens are generated of a single prompt whose tokens are compared.
CHECKED_TOKENS = 16
# To compare tokens, a smaller model is enough. The pool holds as many tokens.
SCALES["check"] = replace(SCALES["cuda"], model=llama(16, 2048, 16, 8, 128, 5632, 32_000), pool_gib=2.875)


@dataclass(frozen=True)
class VLLMBenchOptions:
    """Options of `bench vllm`. `model` is a directory or a name that vLLM knows, `engine` are more options of vLLM's
    LLM. `check` compares tokens instead of times: those of each engine with those of the one without a connector. On a
    CUDA device vLLM is batch-invariant then, unless the environment says VLLM_BATCH_INVARIANT=0, which models with
    recurrent layers need. With some models (MLA) vLLM itself answers otherwise to a prefix in its own cache than to a
    computed prompt; then either answer is right for what an engine has found. `lengths` are those of the prompts of the
    workload `found`."""

    device: str = "cpu"
    model: str | None = None
    connectors: tuple[str, ...] = CONNECTORS
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    pool_gib: float | None = None
    store_gib: float | None = None
    share_store: str = "auto"
    rounds: int = 3
    quick: bool = False
    check: bool = False
    lengths: tuple[int, ...] = ()
    engine: dict[str, Any] | None = None
    logs: str | None = None

    @property
    def scale(self) -> Scale:
        """The sizes for the device, with those that are given instead."""
        names = {"cpu": "tiny" if self.quick or self.check else "cpu", "cuda": "check" if self.check else "cuda"}
        scale = SCALES[names[self.device]]
        lengths = self.lengths or (scale.sizes.lengths[:2] if self.quick else scale.sizes.lengths)
        sizes = replace(scale.sizes, lengths=lengths, answer=CHECKED_TOKENS if self.check else 1)
        pool_gib, store_gib = self.pool_gib or scale.pool_gib, self.store_gib or scale.store_gib
        engine = scale.engine | (self.engine or {})
        return replace(scale, sizes=sizes, pool_gib=pool_gib, store_gib=store_gib, engine=engine)

    @property
    def turns(self) -> range:
        """The numbers of the rounds. The first round warms up, unless it is the only one."""
        return range(1 if self.quick or self.check else 1 + self.rounds)


def run(options: VLLMBenchOptions) -> dict[str, Any]:
    """Return the figures of all engines by workload, and why engines are missing. Raises PeerMissingError if there is
    no vLLM, or it does not start without a connector."""
    if importlib.util.find_spec("vllm") is None:
        raise PeerMissingError("vLLM is not installed in this environment.")
    scale = options.scale
    names = (BASELINE, *options.connectors)
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        directory = stack.enter_context(OwnedFolder("kvservice-vllm-"))
        logs = Path(options.logs) if options.logs else directory
        logs.mkdir(parents=True, exist_ok=True)
        model = options.model or save_model(directory / "model", scale.model, random=options.check)
        address = ""
        if "kvservice" in names:
            store = {"store_gib": scale.store_gib, "share_store": options.share_store}
            address = stack.enter_context(Daemon(start_timeout_s=START_S, **store, **POOL)).address
        # They start side by side.
        engines = {}
        for name in names:
            llm = llm_options(name, str(model), address, scale, patient=options.check)
            setup = {"llm": llm, "sizes": asdict(scale.sizes)}
            environment = environment_of(options)
            engines[name] = stack.enter_context(EngineProcess(name, setup, environment, logs / f"{name}.log"))
        ready: dict[str, Any] = {}
        for name in names:
            try:
                ready[name] = engines[name].answer(START_S)
            except PeerMissingError as error:
                leave_out(name, error, missing)
        turns = measure(options, {name: engines[name] for name in ready}, missing)
    return {
        "device": options.device,
        "model": options.model or scale.model,
        "pool_gib": scale.pool_gib,
        "store_gib": scale.store_gib,
        "share_store": options.share_store,
        "rounds": len(options.turns),
        **ready[BASELINE],
        "engines": [name for name in names if name not in missing],
        "missing": missing,
        "rows": rows(turns),
        "steps": {} if options.check else step_shares(turns),
        "equal": equal_answers(turns) if options.check else {},
    }


def leave_out(name: str, error: PeerMissingError, missing: dict[str, str]) -> None:
    """Go on without an engine. Raises PeerMissingError if nothing could be compared without it."""
    if name == BASELINE:
        raise PeerMissingError(f"vLLM without a connector: {error}")
    missing[name] = str(error)


# The answers of engines to turns, by workload, engine and number of the round.
Turns = dict[str, dict[str, dict[int, dict[str, Any]]]]


def measure(options: VLLMBenchOptions, engines: dict[str, EngineProcess], missing: dict[str, str]) -> Turns:
    """Let the engines take turns. One that fails is left out from then on, and says why in `missing`."""
    turns: Turns = {workload: {name: {} for name in engines} for workload in options.workloads}
    for workload in options.workloads:
        for number in options.turns:
            for name in [name for name in engines if name not in missing]:
                try:
                    turn = turns[workload][name][number] = engines[name].turn(workload, number)
                except PeerMissingError as error:
                    leave_out(name, error, missing)
                    continue
                if options.check and name != BASELINE:
                    turn["from_cache"] = engines[BASELINE].from_cache(
                        workload, differing(turns, workload, name, number)
                    )
                said = (f"{one['row']} {one['value']:.4g} {one['unit']}" for one in turn["figures"])
                # A run takes minutes. Whoever watches it or stops it has these figures.
                print(f"{workload}, round {number}, {name}: {'; '.join(said)}", file=sys.stderr, flush=True)
    return {workload: {n: one for n, one in by.items() if n not in missing} for workload, by in turns.items()}


def rows(turns: Turns) -> list[dict[str, Any]]:
    """Return a row for each figure: for each engine its median, its rounds, and the median of its ratios to the engine
    without a connector in the same rounds. Ratios are of speeds: 2 is twice as fast."""
    made = []
    for workload, by_name in turns.items():
        numbers = timed_numbers(by_name[BASELINE])
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
                    "preemptions": statistics.median(by_number[number]["preemptions"] for number in numbers),
                    "rounds": values,
                }
            made.append(row)
    return made


def timed_numbers(numbers: Iterable[int]) -> list[int]:
    """Return the numbers of the rounds that count: the first warms up, unless it is the only one."""
    every = list(numbers)
    return every[1:] if len(every) > 1 else every


def step_shares(turns: Turns) -> dict[str, dict[str, dict[str, Any]]]:
    """Return for each workload and engine with a connector how many seconds of a step are the connector's calls: `p50`
    and `p99` of all `steps` of the rounds that count. `calls` are the medians of those of the slowest hundredth: by the
    wall's clock and in CPU time, of calls that take a twentieth of it or more."""
    made: dict[str, dict[str, dict[str, Any]]] = {}
    for workload, by_name in turns.items():
        for name, by_number in by_name.items():
            steps = [each for number in timed_numbers(by_number) for each in by_number[number].get("step_s", ())]
            if name != BASELINE and len(steps) > 1:
                seconds = [sum(wall for wall, _ in step.values()) for step in steps]
                quantiles = statistics.quantiles(seconds, n=100, method="inclusive")
                slow = [step for step, all_s in zip(steps, seconds, strict=True) if all_s >= quantiles[98]]
                made.setdefault(workload, {})[name] = {
                    "p50": quantiles[49],
                    "p99": quantiles[98],
                    "steps": len(steps),
                    "calls": slow_calls(slow, quantiles[98] / 20),
                }
    return made


def slow_calls(steps: list[dict[str, list[float]]], least_s: float) -> dict[str, list[float]]:
    """Return the calls that take at least so long in the median of these steps, the slowest first."""
    medians = {
        name: [statistics.median(step.get(name, (0.0, 0.0))[clock] for step in steps) for clock in range(2)]
        for name in sorted({name for step in steps for name in step})
    }
    return dict(sorted((one for one in medians.items() if one[1][0] >= least_s), key=lambda one: -one[1][0]))


def differing(turns: Turns, workload: str, name: str, number: int) -> list[tuple[int, int]]:
    """Return the numbers of the answers that are not those of the engine without a connector, which has computed the
    prompts or had them in its own cache, and how many tokens of each prompt were found."""
    turn, other = (turns[workload][each][number] for each in (name, BASELINE))
    rows = zip(turn["answers"], other["answers"], turn["num_cached"], strict=True)
    return [(place, found) for place, (ours, theirs, found) in enumerate(rows) if ours != theirs]


def equal_answers(turns: Turns) -> dict[str, dict[str, list[int]]]:
    """Return for each workload and engine how many answers are right, of how many, and how many of these are not those
    of the engine without a connector, but those that vLLM gives when it has the same tokens of the prompt in its own
    cache: then vLLM itself answers otherwise to what it finds than to what it computes. That is asked of the engine
    without a connector, or the engine has answered so before, to as many tokens that it had just computed."""
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
    """Return the engines that gave other tokens than the one without a connector."""
    return [
        f"{workload}, {name}: {total - equal} of {total} answers differ"
        for workload, by_name in results["equal"].items()
        for name, (equal, total, _) in by_name.items()
        if equal != total
    ]


def llm_options(name: str, model: str, address: str, scale: Scale, *, patient: bool) -> dict[str, Any]:
    """Return the options of vLLM's LLM for an engine."""
    local = Path(model).is_dir()
    options = {
        "model": model,
        "skip_tokenizer_init": True,
        "load_format": "dummy" if local and not any(Path(model).glob("*.safetensors")) else "auto",
        "max_model_len": scale.sizes.longest,
        "kv_cache_memory_bytes": int(scale.pool_gib * GIB),
        "prefix_caching_hash_algo": "sha256_cbor",
        "disable_log_stats": False,
    }
    transfer = transfer_config(name, address, int(scale.store_gib * GIB), patient=patient)
    return options | scale.engine | ({} if transfer is None else {"kv_transfer_config": transfer})


# Where tokens are compared and not times, nothing is missed because the machine is slow.
PATIENT = {"lookup_timeout_s": 30.0, "transfer_timeout_s": 30.0}


def transfer_config(name: str, address: str, store_bytes: int, *, patient: bool) -> dict[str, Any] | None:
    """Return vLLM's `kv_transfer_config`. What `--kv-offloading-size` sets for its own connectors is the same."""
    if name == BASELINE:
        return None
    if name == "kvservice":
        return {
            "kv_connector": "KVServiceConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "kvservice.integrations.vllm",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"address": address} | (PATIENT if patient else {}),
        }
    extra = {"cpu_bytes_to_use": store_bytes}
    return {"kv_connector": TITLES[name], "kv_role": "kv_both", "kv_connector_extra_config": extra}


def environment_of(options: VLLMBenchOptions) -> dict[str, str]:
    invariant = {"VLLM_BATCH_INVARIANT": "1"} if options.check and options.device == "cuda" else {}
    return invariant | os.environ | ENVIRONMENT | ENVIRONMENTS[options.device]


def save_model(directory: Path, config: dict[str, Any], random: bool) -> Path:
    """Write the configuration of a Llama, and with `random` weights with which attention depends on single tokens, so
    that wrong K/V change the output. Without them vLLM fills the memory of the weights."""
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


class EngineProcess:
    """A process of vllm_engine.py, as a context manager. Its calls raise PeerMissingError if the engine fails."""

    def __init__(self, name: str, setup: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        self._name, self._log = name, log
        with log.open("wb") as errors:
            self._process = OwnedProcess(
                [sys.executable, "-P", "-m", "kvservice.bench.vllm_engine", plain_json.dumps(setup)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )

    def __enter__(self) -> EngineProcess:
        return self

    def turn(self, workload: str, number: int) -> dict[str, Any]:
        """Run a workload. Returns the values of its turn, and the number of `preemptions`."""
        return self._ask({"workload": workload, "number": number})

    def from_cache(self, workload: str, wanted: list[tuple[int, int]]) -> list[tuple[int, list[int]]]:
        """Ask for prompts of the last turn again, with so many tokens of each in the engine's own cache. Returns
        numbers and answers of those of which it had these."""
        answers = self._ask({"workload": workload, "cached": wanted})["answers"] if wanted else []
        return [(number, tokens) for number, tokens in answers]

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(plain_json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("It has ended") from None
        return self.answer(TURN_S)

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

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            with suppress(BrokenPipeError, subprocess.TimeoutExpired):
                self._process.stdin.close()
                self._process.wait(END_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # it has children
            self._process.wait()
            self._process.stdout.close()

    def _failure(self, what: str) -> PeerMissingError:
        lines = self._log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line]
        return PeerMissingError(f"{what}: {(errors or lines or ['it says nothing'])[-1].strip()[-300:]}")


def same_answers(counts: list[int]) -> str:
    equal, total, num_from_cache = counts
    return f"{equal} of {total}{f', {num_from_cache} as from its cache' if num_from_cache else ''}"


def render(results: dict[str, Any], console: Console) -> None:
    """Print a row for each figure: that without a connector, and how many times as fast the others are."""
    names = results["engines"]
    console.print(
        f"vLLM {results['vllm']}, {results['device']}: pool of {results['pool_tokens']:,} tokens, "
        f"{results['store_gib']:g} GiB of host memory for each store, {results['rounds']} rounds"
    )
    heads = tuple(TITLES.get(name, name) for name in names)
    if results["equal"]:
        same = table("Answers with the same tokens as without a connector", ("workload",), heads)
        for workload, by_name in results["equal"].items():
            same.add_row(workload, *map(same_answers, (by_name[name] for name in names)))
        console.print(same)
    else:
        shown = table("Times as fast as without a connector, and the share of prompts found", ("workload", ""), heads)
        for row in results["rows"]:
            first, *others = (row["engines"][name] for name in names)
            value = (
                f"{1e3 * first['median']:,.1f} ms" if row["unit"] == "s" else f"{first['median']:,.0f} {row['unit']}"
            )
            ratios = (f"{one['ratio']:.2f} ({one['found']:.0%})" for one in others)
            shown.add_row(row["workload"], row["row"], value, *ratios)
        console.print(shown)
    if results["steps"]:
        shares = table("The connector's share of a step: p50, p99", ("workload",), heads[1:])
        for workload, by_name in results["steps"].items():
            cells = [by_name.get(name) for name in names[1:]]
            shares.add_row(
                workload,
                *("" if one is None else f"{1e3 * one['p50']:.2f}, {1e3 * one['p99']:.2f} ms" for one in cells),
            )
        console.print(shares)
        slow = table("Calls of the slowest hundredth of steps, in ms", ("workload", "", "call"), ("wall", "CPU"))
        for workload, by_name in results["steps"].items():
            for name, one in by_name.items():
                for call, clocks in one["calls"].items():
                    slow.add_row(workload, TITLES.get(name, name), call, *(f"{1e3 * each:.2f}" for each in clocks))
        console.print(slow)
    for name, reason in results["missing"].items():
        console.print(f"{TITLES.get(name, name)}: not measured. {reason}")
