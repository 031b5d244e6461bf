"""vLLM with the connector of this project beside vLLM with its own offloading, and beside vLLM without a connector.

All engines live at the same time, each in a process of its own, and take turns on one device: in each round every
engine gets the same prompts, and its figures are set against those of the engine without a connector in the same round.
The stores get the same bytes of host memory. The model is a Llama with weights without a meaning, unless one is given.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from kvservice.bench import PeerMissingError, table
from kvservice.bench.engine_turns import (
    BASELINE,
    CHECKED_TOKENS,
    GIB,
    LLAMA_3B,
    LLAMA_CHECK,
    POOL,
    SIZES_3B,
    Turns,
    compare,
    equal_answers,
    failures,
    llama,
    rows,
    same_tokens,
    save_model,
    speeds,
    timed_numbers,
)
from kvservice.bench.engine_workloads import WORKLOADS, Output, RequestBatch, Sizes, from_cache
from kvservice.launch import Daemon
from kvservice.owned import OwnedFolder

__all__ = [
    "SCALES",
    "WORKLOADS",
    "Output",
    "RequestBatch",
    "Sizes",
    "VLLMBenchOptions",
    "failures",
    "from_cache",
    "render",
    "run",
]

PROGRAM = "kvservice.bench.vllm_engine"
# The engines that are compared with the one without a connector.
CONNECTORS = ("kvservice", "offloading", "simple")
TITLES = {"offloading": "OffloadingConnector", "simple": "SimpleCPUOffloadConnector"}

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


SCALES = {
    "cuda": Scale(
        LLAMA_3B,
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
        sizes=SIZES_3B,
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
# The pool holds as many tokens.
SCALES["check"] = replace(SCALES["cuda"], model=LLAMA_CHECK, pool_gib=2.875)


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
    start_s: float = 600.0
    turn_s: float = 600.0

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
    def baseline_title(self) -> str:
        return "vLLM without a connector"

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
    with ExitStack() as stack:
        directory = stack.enter_context(OwnedFolder("kvservice-vllm-"))
        model = str(options.model or save_model(directory / "model", scale.model, random=options.check))
        address = ""
        if "kvservice" in names:
            store = {"store_gib": scale.store_gib, "share_store": options.share_store}
            address = stack.enter_context(Daemon(start_timeout_s=options.start_s, **store, **POOL)).address
        setups = {
            name: {
                "llm": llm_options(name, model, address, scale, patient=options.check),
                "sizes": asdict(scale.sizes),
            }
            for name in names
        }
        logs = Path(options.logs) if options.logs else directory
        ready, turns, missing = compare(options, PROGRAM, setups, environment_of(options), logs)
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


def render(results: dict[str, Any], console: Console) -> None:
    """Print a row for each figure: that without a connector, and how many times as fast the others are."""
    names = results["engines"]
    console.print(
        f"vLLM {results['vllm']}, {results['device']}: pool of {results['pool_tokens']:,} tokens, "
        f"{results['store_gib']:g} GiB of host memory for each store, {results['rounds']} rounds"
    )
    heads = tuple(TITLES.get(name, name) for name in names)
    if results["equal"]:
        console.print(same_tokens(results, "Answers with the same tokens as without a connector", heads))
    else:
        console.print(speeds(results, "Times as fast as without a connector, and the share of prompts found", heads))
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
