"""SGLang's hierarchical cache (HiCache) on its own host memory, the same with the storage of this project below a small
part of it, and SGLang without either.

Both stores get the same bytes of host memory. Engines take turns, see engine_turns.py.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from kvservice import plain_json
from kvservice.bench import PeerMissingError
from kvservice.bench.engine_turns import (
    BASELINE,
    CHECKED_TOKENS,
    LLAMA_3B,
    LLAMA_CHECK,
    POOL,
    SIZES_3B,
    Turns,
    compare,
    equal_answers,
    failures,
    rows,
    same_tokens,
    save_model,
    speeds,
)
from kvservice.bench.engine_workloads import Sizes
from kvservice.bench.sglang_engine import IN_FLIGHT, SGLangEngine
from kvservice.launch import Daemon
from kvservice.owned import OwnedFolder

__all__ = [
    "CACHES",
    "IN_FLIGHT",
    "LLAMA_3B",
    "WORKLOADS",
    "SGLangBenchOptions",
    "SGLangEngine",
    "Sizes",
    "failures",
    "render",
    "run",
]

CACHES = ("hicache", "kvservice")
TITLES = {BASELINE: "no host cache", "hicache": "HiCache", "kvservice": "HiCache over kvservice"}
WORKLOADS = ("found", "prompts", "cycle")

GB = 10**9
# The tokens of the engine's pool on the device, as `bench vllm` has them.
POOL_TOKENS = 46_800
PAGE_SIZE = 64
# HiCache's own host pool below which kvservice is, of 69,700 tokens. SGLang keeps there what is on the device, too, and
# saves nothing if that does not fit. What a request wants of the storage passes through the rest.
HOST_GB = 8
STORE_GB = 24
# With the default, a request is computed if the storage takes longer than 2 s. The connector has limits of its own, and
# counts as found only what comes sooner than it is computed.
PREFETCH_POLICY = "wait_complete"
# Where tokens are compared and not times, nothing is missed because the machine is slow.
PATIENT = {"lookup_timeout_s": 30.0, "transfer_timeout_s": 30.0}
ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "random_seed": 0,
    "page_size": PAGE_SIZE,
    "max_total_tokens": POOL_TOKENS,
    "max_running_requests": 64,
    "chunked_prefill_size": 8192,
    # The size of the pool counts. The rest is room for the other engines, which use the device at the same time.
    "mem_fraction_static": 0.85,
    "attention_backend": "fa3",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    # Graphs of prompts are for short ones, and take most of the time of a start.
    "disable_prefill_cuda_graph": True,
    "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 64],
    "log_level": "warning",
}
# FlashInfer, if it is installed, compiles at the first use.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "SGLANG_IS_FLASHINFER_AVAILABLE": "false"}


@dataclass(frozen=True)
class SGLangBenchOptions:
    """Options of `bench sglang`. `engine` are more options of SGLang's Engine. `store_gb` is the host memory of each
    store, of which `host_gb` are the host pool of HiCache above kvservice. `check` compares tokens instead of times, of
    single prompts unless workloads are given: SGLang itself answers otherwise in another batch."""

    caches: tuple[str, ...] = CACHES
    workloads: tuple[str, ...] = ()
    host_gb: int = HOST_GB
    store_gb: int = STORE_GB
    rounds: int = 1
    quick: bool = False
    check: bool = False
    engine: dict[str, Any] | None = None
    logs: str | None = None
    start_s: float = 150.0
    turn_s: float = 100.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "workloads", self.workloads or (("found",) if self.check else WORKLOADS))

    @property
    def baseline_title(self) -> str:
        return "SGLang without a host cache"

    @property
    def turns(self) -> range:
        """The numbers of the rounds. All count: each engine has warmed up before it is ready."""
        return range(1 if self.quick or self.check else self.rounds)

    @property
    def sizes(self) -> Sizes:
        lengths = SIZES_3B.lengths[: 2 if self.quick else None]
        return replace(SIZES_3B, lengths=lengths, odd=(0,), answer=CHECKED_TOKENS if self.check else 1)


def run(options: SGLangBenchOptions) -> dict[str, Any]:
    """Return the figures of all engines by workload, and why engines are missing. Raises PeerMissingError if there is
    no SGLang, or it does not start without a host cache."""
    if importlib.util.find_spec("sglang") is None:
        raise PeerMissingError("SGLang is not installed in this environment.")
    names, config = (BASELINE, *options.caches), LLAMA_CHECK if options.check else LLAMA_3B
    with ExitStack() as stack:
        directory = stack.enter_context(OwnedFolder("kvservice-sglang-"))
        model = str(save_model(directory / "model", config, random=options.check))
        address = ""
        if "kvservice" in names:
            store_gib = (options.store_gb - options.host_gb) * GB / (1 << 30)
            daemon = Daemon(start_timeout_s=options.start_s, store_gib=store_gib, **POOL)
            address = stack.enter_context(daemon).address
        setups = {
            name: {
                "cache": name,
                "engine": engine_options(name, model, address, options),
                "vocabulary": config["vocab_size"],
                "sizes": asdict(options.sizes),
            }
            for name in names
        }
        logs = Path(options.logs) if options.logs else directory
        ready, turns, missing = compare(options, SGLangEngine.__module__, setups, os.environ | ENVIRONMENT, logs)
    return {
        "model": config,
        "store_gb": options.store_gb,
        "host_gb": options.host_gb,
        "prefetch_policy": PREFETCH_POLICY,
        "in_flight": IN_FLIGHT,
        "rounds": len(options.turns),
        **ready[BASELINE],
        "engines": [name for name in names if name not in missing],
        "missing": missing,
        "rows": rows(turns, warm_ups=0),
        "cached_tokens": cached_tokens(turns),
        "equal": equal_answers(turns) if options.check else {},
    }


def cached_tokens(turns: Turns) -> dict[str, dict[str, list[list[int]]]]:
    """Return for each workload, engine and round how many tokens of each prompt were found, in the order in which the
    prompts were asked."""
    return {
        workload: {name: [turn["num_cached"] for turn in by_number.values()] for name, by_number in by_name.items()}
        for workload, by_name in turns.items()
    }


def engine_options(name: str, model: str, address: str, options: SGLangBenchOptions) -> dict[str, Any]:
    """Return the options of SGLang's Engine."""
    made = {
        "model_path": model,
        "load_format": "auto" if options.check else "dummy",
        "context_length": options.sizes.longest,
    }
    made |= ENGINE
    if name != BASELINE:
        size_gb = options.host_gb if name == "kvservice" else options.store_gb
        made |= {"enable_hierarchical_cache": True, "hicache_mem_layout": "page_first", "hicache_size": size_gb}
    if name == "kvservice":
        extra = {
            "backend_name": "kvservice",
            "module_path": "kvservice.integrations.sglang",
            "class_name": "KVServiceStorage",
            "interface_v1": 1,
            "kvservice": {"address": address} | (PATIENT if options.check else {}),
        }
        made |= {
            "hicache_storage_backend": "dynamic",
            "hicache_storage_prefetch_policy": PREFETCH_POLICY,
            "hicache_storage_backend_extra_config": plain_json.dumps(extra),
        }
    return made | (options.engine or {})


def render(results: dict[str, Any], console: Console) -> None:
    """Print a row for each figure: that without a host cache, and how many times as fast the others are."""
    host, store = results["host_gb"], results["store_gb"]
    console.print(
        f"SGLang {results['sglang']}: pool of {results['pool_tokens']:,} tokens, {store} GB of host memory for each: "
        f"HiCache's own, or {host} GB of it and {store - host} GB of kvservice below. Rounds: {results['rounds']}"
    )
    heads = tuple(TITLES[name] for name in results["engines"])
    if results["equal"]:
        console.print(same_tokens(results, "Answers with the same tokens as without a host cache", heads))
    else:
        console.print(speeds(results, "Times as fast as without a host cache, and the share of prompts found", heads))
    for name, reason in results["missing"].items():
        console.print(f"{TITLES[name]}: not measured. {reason}")
