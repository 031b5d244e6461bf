"""Computes what tiers hold for a model, and whether loading K/V from them is faster than computing them again. The plan
is shown as tables, or as one JSON object."""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich import box
from rich.console import Console
from rich.table import Table

from kvservice.config_sources import checked_config
from kvservice.errors import InvalidArgumentError
from kvservice.model_shape import FILE_NAME, MAX_FILE_BYTES, PoolOptions, read_pool_options, snapshot_name
from kvservice.planning.trace import Trace
from kvservice.pool.layout import TENSOR_DTYPES, PoolLayout

# ---- figures of GPUs: memory as nvidia-smi reports it, peaks of dense matrix products in bfloat16, and the host link
#
# The peaks are from NVIDIA's data sheets, without sparsity: H100 SXM and H200 SXM 989 TFLOP/s, A100 80 GB SXM 312,
# L40S 362 and HGX B200 2250. The link is what copies of pinned memory reach, not the nominal figure: 55 GB/s were
# measured on PCIe 5 (kvservice/bench/README.md), and 25 GB/s are usual on PCIe 4.


@dataclass(frozen=True)
class Gpu:
    """A GPU. `host_gb_per_s` is one direction of its link, in 1e9 bytes."""

    name: str
    memory_gib: float
    tflops: float
    host_gb_per_s: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 80.0, 312.0, 25.0),
        Gpu("b200", 179.1, 2250.0, 55.0),
        Gpu("h100", 79.6, 989.0, 55.0),
        Gpu("h200", 140.4, 989.0, 55.0),
        Gpu("l40s", 45.0, 362.0, 25.0),
    )
}


def find_gpu(
    name: str | None, memory_gib: float | None = None, tflops: float | None = None, host_gb_per_s: float | None = None
) -> Gpu:
    """Return a GPU of the table, by its name in any case, with the given figures instead of its own, or one that is all
    given. Raises InvalidArgumentError naming `gpu` or the figure that is missing."""
    given = {"memory_gib": memory_gib, "tflops": tflops, "host_gb_per_s": host_gb_per_s}
    if name is not None:
        if (known := GPUS.get(name.lower())) is None:
            raise InvalidArgumentError(f"{name!r} is not one of {', '.join(GPUS)}", field="gpu")
        return Gpu(
            known.name, memory_gib or known.memory_gib, tflops or known.tflops, host_gb_per_s or known.host_gb_per_s
        )
    for field, value in given.items():
        if value is None:
            raise InvalidArgumentError(
                f"is needed without --gpu, which is one of {', '.join(GPUS)}", field=_OPTIONS[field]
            )
    assert memory_gib is not None
    assert tflops is not None
    assert host_gb_per_s is not None
    return Gpu("own", memory_gib, tflops, host_gb_per_s)


_OPTIONS = {"memory_gib": "gpu_memory_gib", "tflops": "gpu_tflops", "host_gb_per_s": "host_gbps"}


# ---- how many parameters a model has, and how many of them a token meets, from its `config.json`


Config = Mapping[str, Any]

# No model has more of anything.
_MAX_VALUE = 1 << 40
_HIDDEN = ("hidden_size", "n_embd", "d_model", "emb_dim")
_QUERY_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads")
_INNER = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "d_inner", "dff")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k")
# Model types whose feed-forward layers have two matrices. The others have three: gate, up and down.
_TWO_MATRICES = frozenset(
    {
        "bloom", "codegen", "ctrl", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "openai-gpt",
        "opt", "phi", "starcoder2", "trocr", "xglm", "xlm", "xlnet",
    }
)  # fmt: skip
# Without a width of their own, the feed-forward layers of these are four times as wide as the model.
_FOUR_TIMES = frozenset({"bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mpt", "openai-gpt"})


@dataclass(frozen=True)
class Parameters:
    """`in_layers` are multiplied for each token (of a mixture of experts, those of its experts); `total` are all.
    `attention_width` is query heads times head size, for the products with K and V."""

    in_layers: float
    total: float
    attention_width: int

    def prefill_flops(self, num_layers: int, mean_context: float) -> float:
        """Return the floating-point operations of one token of a prompt: two for each parameter that it meets, and
        the products with K and V of `mean_context` tokens."""
        return 2 * self.in_layers + 4 * num_layers * self.attention_width * mean_context


def read_config(model: Path) -> dict[str, Any]:
    """Return the text model's configuration. The file has been read before: `read_pool_options` reports its faults."""
    path = model / FILE_NAME if model.is_dir() else model
    with path.open("rb") as file:
        config: dict[str, Any] = json.loads(file.read(MAX_FILE_BYTES))
    while isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    return config


def count_parameters(config: Config, shape: PoolOptions, given: float | None) -> Parameters:
    """Estimate the parameters of a model: matrices of attention, of feed-forward layers, and embeddings. `given` is
    the number of parameters that a token meets, from elsewhere. Raises InvalidArgumentError naming parameters_b."""
    heads = _find(config, _QUERY_HEADS) or shape.num_kv_heads
    width, kv_width = heads * shape.head_size, shape.num_kv_heads * shape.head_size
    if given is not None:
        return Parameters(given, given, width)
    hidden = _find(config, _HIDDEN)
    kind = str(config.get("model_type", ""))
    inner = _find(config, _INNER) or (4 * hidden if hidden and kind in _FOUR_TIMES else None)
    if hidden is None or inner is None:
        missing = "hidden_size" if hidden is None else "intermediate_size"
        raise InvalidArgumentError(f"the model has no {missing}: say how many a token meets", field="parameters_b")
    attention = 2 * hidden * (width + kv_width)
    matrices = 2 if kind in _TWO_MATRICES else 3
    num_experts, used = _find(config, _EXPERTS) or 1, _find(config, _EXPERTS_OF_A_TOKEN) or 1
    if num_experts > 1:
        inner = _find(config, ("moe_intermediate_size", "expert_ffn_hidden_size")) or inner
    expert = matrices * hidden * inner
    vocabulary = (_find(config, ("vocab_size", "n_words")) or 0) * hidden
    embeddings = vocabulary if config.get("tie_word_embeddings") else 2 * vocabulary
    return Parameters(
        shape.num_layers * (attention + min(used, num_experts) * expert),
        shape.num_layers * (attention + num_experts * expert) + embeddings,
        width,
    )


def weight_bytes(model: Path) -> int | None:
    """Return the size of the model's safetensors files; None: there are none."""
    files = list(model.glob("*.safetensors")) if model.is_dir() else []
    return sum(file.stat().st_size for file in files) or None


def _find(config: Config, names: tuple[str, ...]) -> int | None:
    """Return the value of the first of these names that has a whole number of a model."""
    for name in names:
        value = config.get(name)
        if type(value) is int and 0 < value <= _MAX_VALUE:
            return value
    return None


# ---- reuse distances of a trace: what share of the prompt tokens a cache of any capacity finds
#
# They are Mattson's stack distances of an LRU cache.
#
# The blocks of a prompt are used from the last to the first, as the daemon evicts leaves before roots: a block that is
# cached then has the blocks before it cached too.


Int64Array = npt.NDArray[np.int64]


def stack_distances(accesses: Int64Array) -> Int64Array:
    """Return for each access to a block the number of different blocks since the one before, with itself: the smallest
    capacity of an LRU cache that finds it. -1: it is the first access to the block."""
    previous = _previous(accesses)
    found = previous >= 0
    between = np.arange(len(accesses)) - previous
    # Blocks that are used twice in between count once: leave out accesses whose next one is in between too.
    return np.where(found, between - _greater_before(previous), -1)


def hit_share(trace: Trace, distances: Int64Array, capacity_tokens: float) -> float:
    """Return the share of prompt tokens that an LRU cache of this capacity finds."""
    hits = int(((distances > 0) & (distances <= capacity_tokens // trace.block_size)).sum())
    return hits * trace.block_size / max(1, trace.input_tokens)


def accesses_of(trace: Trace) -> Int64Array:
    """Return the blocks of all prompts in the order of their use."""
    return np.array([block for request in trace.requests for block in reversed(request.blocks)], np.int64)


def _previous(accesses: Int64Array) -> Int64Array:
    """Return the position of the access before to the same block, or -1."""
    order = np.argsort(accesses, kind="stable")
    previous = np.full(len(accesses), -1, np.int64)
    same = accesses[order[1:]] == accesses[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    return previous


def _greater_before(values: Int64Array) -> Int64Array:
    """Return for each value how many of those before it are greater, by merging sorted halves."""
    size = max(1, 1 << (len(values) - 1).bit_length()) if len(values) else 1
    counts = np.zeros(size, np.int64)
    # Padding lies at the end and is less than all, so that it counts for none.
    padded = np.full(size, -2, np.int64)
    padded[: len(values)] = values
    stride = size + 3  # the values of a pair of halves lie between those of its neighbours
    width = 1
    while width < size:
        halves = padded.reshape(-1, 2, width)
        pairs = np.arange(len(halves), dtype=np.int64)[:, None]
        left = np.sort(halves[:, 0], axis=1) + pairs * stride
        right = halves[:, 1] + pairs * stride
        not_greater = np.searchsorted(left.ravel(), right.ravel(), side="right").reshape(right.shape)
        counts.reshape(-1, 2, width)[:, 1] += (pairs + 1) * width - not_greater
        width *= 2
    return counts[: len(values)]


# ---- the command that starts a daemon of a plan
#
# It passes the checks of the daemon's own configuration.


GIB = 1 << 30
# The reader of the command replaces these words.
DIRECTORY = "DIRECTORY"
MASTER = "MASTER:50051"
WEIGHTS = "NAME"
_SHAPE = ("num_layers", "num_kv_heads", "head_size", "dtype")
# Other options of the daemon that have the same name in a plan.
_SAME = frozenset({"block_size", "disk_gib", "kv_cache_dtype", "store_gib"})


def checked_options(layout: PoolLayout, dtype: str, kv_cache_dtype: str, **sizes: Any) -> dict[str, Any]:
    """Return options of `kvservice serve`. `dtype` is that of the model, `sizes` are options of the pool and the tiers.
    Raises InvalidArgumentError naming the option of the plan if the daemon refuses them."""
    shape = (layout.num_layers, layout.num_kv_heads, layout.head_size, dtype)
    options = dict(zip(_SHAPE, shape, strict=True)) | {
        "device": "cuda",
        "block_size": layout.block_size,
        "kv_cache_dtype": kv_cache_dtype,
        **sizes,
    }
    _check(options)
    return options


def _check(options: Mapping[str, Any]) -> None:
    """Raise InvalidArgumentError naming the option of the plan if the daemon refuses these options."""
    try:
        checked_config(options)
    except InvalidArgumentError as error:
        if error.field in _SAME:
            raise InvalidArgumentError(f"the daemon refuses it: {error.message}", field=error.field) from None
        raise InvalidArgumentError(f"{error.field}: {error.message}", field="model") from None


def serve_command(options: Mapping[str, Any], model: Path | None) -> str:
    """Return the command line for options of `checked_options`. `model` determines the shape; None: the options do."""
    words = ["kvservice", "serve", *(() if model is None else ("--model", str(model)))]
    for name, value in options.items():
        if value != "auto" and (model is None or name not in _SHAPE):
            words += [f"--{name.replace('_', '-')}", _text(value)]
    return shlex.join(words)


def size_gib(gib: float, block_bytes: int) -> float:
    """Round a size down to tenths of a GiB, unless it is small or that of a few blocks."""
    return math.floor(10 * gib) / 10 if gib >= max(1.0, 100 * block_bytes / GIB) else gib


def _text(value: Any) -> str:
    """`repr` has all digits of a number: the size of a single block must not get smaller."""
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


# ---- the plan


# The dtypes of caches for which a GPU stores K/V in fewer bits than the model.
_CACHE_DTYPES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
# A tier that finds a smaller share of the prompt tokens, beyond those above it, is left out of the command.
_MIN_GAIN = 0.005
# Names of the tiers.
POOL, STORE, DISK, SHARED = "GPU pool", "host store", "disk", "shared"


@dataclass(frozen=True)
class PlanOptions:
    """Known and assumed figures. Speeds in GB/s are 1e9 bytes a second; None: the GPU's own, or estimated. A tier with
    0 GiB is left out. Lengths, in tokens, are those of the trace if there is one."""

    model: Path
    gpu: Gpu
    num_gpus: int = 1
    gpu_memory_utilization: float = 0.9
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    weights_gib: float | None = None
    parameters: float | None = None
    store_gib: float = 64.0
    disk_gib: float = 0.0
    shared_gib: float = 0.0
    disk_gb_per_s: float = 5.0
    shared_gb_per_s: float = 10.0
    efficiency: float = 0.5
    prefill_tokens_per_s: float | None = None
    prompt_tokens: int = 4096
    session_tokens: int = 8192


@dataclass(frozen=True)
class TierPlan:
    """A tier. Times are those of 1,000 tokens. `hit_share` is that of the trace with this capacity, and `gained_share`
    what it finds beyond the tiers above; None: there is no trace."""

    name: str
    gib: float
    blocks: int
    tokens: int
    sessions: float
    gb_per_s: float | None
    load_ms: float
    recompute_ms: float
    hit_share: float | None
    gained_share: float | None

    @property
    def is_worth_loading(self) -> bool:
        return self.load_ms < self.recompute_ms

    @property
    def finds_something(self) -> bool:
        return self.gained_share is None or self.gained_share >= _MIN_GAIN


@dataclass(frozen=True)
class Plan:
    """The figures of a model on a GPU. `unbounded_share` is the hit share of the trace if nothing were evicted, and
    `needed_gib` the capacity that reaches 95 % of it. The first of `commands` starts a daemon whose pool is on the GPU;
    the second, if a store is worth it, the daemon of a host beside an engine that has its own pool."""

    layout: PoolLayout
    token_bytes: int
    block_bytes: int
    weights_gib: float
    prefill_tokens_per_s: float
    break_even_gb_per_s: float
    prompt_tokens: float
    session_tokens: float
    tiers: tuple[TierPlan, ...]
    unbounded_share: float | None
    needed_gib: float | None
    commands: tuple[str, ...]
    notes: tuple[str, ...]


def make_plan(options: PlanOptions, trace: Trace | None) -> Plan:
    """Raises InvalidArgumentError naming the option."""
    for field, gib in (("disk_gib", options.disk_gib), ("shared_gib", options.shared_gib)):
        if gib and not options.store_gib:
            raise InvalidArgumentError("this tier keeps values of the block store: set --store-gib", field=field)
    shape = read_pool_options(options.model)
    layout = _layout(shape, options)
    if trace is not None:
        options = _with_lengths(options, trace)
    whole = layout.token_bytes * options.num_gpus
    weights, speed = _weights_gib(options, shape), _prefill_speed(options, shape)
    pool_gib = options.gpu.memory_gib * options.gpu_memory_utilization * options.num_gpus - weights
    if pool_gib * GIB < whole * options.block_size:
        raise InvalidArgumentError(
            f"weights of {weights:.1f} GiB leave no room for a block on {options.num_gpus} GPUs of "
            f"{options.gpu.memory_gib:g} GiB at a utilization of {options.gpu_memory_utilization:g}",
            field="num_gpus" if options.weights_gib is None else "weights_gib",
        )
    tiers = _tiers(options, trace, pool_gib, whole, speed)
    unbounded, needed = (None, None) if trace is None else _unbounded(trace, whole)
    return Plan(
        layout=layout,
        token_bytes=whole,
        block_bytes=whole * options.block_size,
        weights_gib=weights,
        prefill_tokens_per_s=speed,
        break_even_gb_per_s=whole * speed / 1e9,
        prompt_tokens=options.prompt_tokens,
        session_tokens=options.session_tokens,
        tiers=tiers,
        unbounded_share=unbounded,
        needed_gib=needed,
        commands=(_command(options, shape, layout, tiers), *_beside(tiers)),
        notes=tuple(_notes(options, tiers, unbounded)),
    )


def _layout(shape: PoolOptions, options: PlanOptions) -> PoolLayout:
    """Return the pool of one GPU, of a shape that the daemon accepts. KV heads are divided among the GPUs. Where there
    are more GPUs than heads, several have the same head."""
    heads, num_gpus = shape.num_kv_heads, options.num_gpus
    if heads % num_gpus and num_gpus % heads:
        raise InvalidArgumentError(f"{heads} KV heads cannot be divided among {num_gpus} GPUs", field="num_gpus")
    if shape.dtype not in TENSOR_DTYPES:
        known = ", ".join(TENSOR_DTYPES)
        raise InvalidArgumentError(f"the model's dtype is {shape.dtype!r}, not one of {known}", field="model")
    dtype = _CACHE_DTYPES.get(options.kv_cache_dtype, shape.dtype)
    layout = PoolLayout(shape.num_layers, max(1, heads // num_gpus), shape.head_size, options.block_size, dtype)
    checked_options(layout, shape.dtype, options.kv_cache_dtype)
    return layout


def _with_lengths(options: PlanOptions, trace: Trace) -> PlanOptions:
    """Return the options with the mean lengths of a trace."""
    prompts = [request.input_tokens for request in trace.requests]
    prompt_tokens, session_tokens = (
        max(1, round(statistics.fmean(lengths))) for lengths in (prompts, trace.conversation_tokens())
    )
    return replace(options, prompt_tokens=prompt_tokens, session_tokens=session_tokens)


def _weights_gib(options: PlanOptions, shape: PoolOptions) -> float:
    if options.weights_gib is not None:
        return options.weights_gib
    if (found := weight_bytes(options.model)) is not None:
        return found / GIB
    total = count_parameters(read_config(options.model), shape, options.parameters).total
    return total * TENSOR_DTYPES[shape.dtype].itemsize / GIB


def _prefill_speed(options: PlanOptions, shape: PoolOptions) -> float:
    """Return tokens a second of all GPUs together."""
    if options.prefill_tokens_per_s is not None:
        return options.prefill_tokens_per_s
    parameters = count_parameters(read_config(options.model), shape, options.parameters)
    flops = parameters.prefill_flops(shape.num_layers, options.prompt_tokens / 2)
    return options.gpu.tflops * 1e12 * options.num_gpus * options.efficiency / flops


def _tiers(
    options: PlanOptions, trace: Trace | None, pool_gib: float, token_bytes: int, speed: float
) -> tuple[TierPlan, ...]:
    distances = None if trace is None else stack_distances(accesses_of(trace))
    link = options.gpu.host_gb_per_s * options.num_gpus
    tiers: list[TierPlan] = []
    above = 0.0
    for name, field, gib, gb_per_s in (
        (POOL, "num_gpus", pool_gib, None),
        (STORE, "store_gib", options.store_gib, link),
        (DISK, "disk_gib", options.disk_gib, min(link, options.disk_gb_per_s)),
        (SHARED, "shared_gib", options.shared_gib, min(link, options.shared_gb_per_s)),
    ):
        if gib <= 0:
            continue
        blocks = int(gib * GIB / (token_bytes * options.block_size))
        if not blocks:
            raise InvalidArgumentError(
                f"{gib:g} GiB have no room for a block of {token_bytes * options.block_size:,} bytes", field=field
            )
        tokens = blocks * options.block_size
        share = None if trace is None or distances is None else hit_share(trace, distances, tokens)
        tiers.append(
            TierPlan(
                name=name,
                gib=gib,
                blocks=blocks,
                tokens=tokens,
                sessions=tokens / options.session_tokens,
                gb_per_s=gb_per_s,
                load_ms=0.0 if gb_per_s is None else 1000 * token_bytes / gb_per_s / 1e6,
                recompute_ms=1e6 / speed,
                hit_share=share,
                gained_share=None if share is None else max(0.0, share - above),
            )
        )
        above = max(above, share or 0.0)
    return tuple(tiers)


def _unbounded(trace: Trace, token_bytes: int) -> tuple[float, float]:
    """Return the hit share without eviction, and the GiB with which an LRU cache reaches 95 % of it."""
    distances = stack_distances(accesses_of(trace))
    found = sorted(distances[distances > 0].tolist())
    share = len(found) * trace.block_size / max(1, trace.input_tokens)
    needed = found[max(0, -(-len(found) * 95 // 100) - 1)] if found else 0
    return share, needed * trace.block_size * token_bytes / GIB


def _chosen(tiers: tuple[TierPlan, ...]) -> set[str]:
    """Return the names of the tiers that the command has. The store is above all others: none is faster, and they need
    it."""
    below = {tier.name for tier in tiers[1:] if tier.is_worth_loading and tier.finds_something}
    return {POOL, STORE, *below} if below else {POOL}


def _command(options: PlanOptions, shape: PoolOptions, layout: PoolLayout, tiers: tuple[TierPlan, ...]) -> str:
    """Return the command line of a daemon, with its part of the tiers."""
    chosen = _chosen(tiers)
    gib = {tier.name: size_gib(tier.gib / options.num_gpus, layout.block_bytes) for tier in tiers}
    model = options.model if options.num_gpus == 1 else None
    given: dict[str, Any] = {"pool_gib": gib[POOL]}
    if STORE in chosen:
        given["store_gib"] = gib[STORE]
    if DISK in chosen:
        given |= {"disk": DIRECTORY, "disk_gib": gib[DISK]}
    if SHARED in chosen:
        given["mooncake"] = MASTER
    weights = snapshot_name(options.model)
    if {DISK, SHARED} & chosen and not (weights and model):
        given["weights"] = weights or WEIGHTS  # without a name, blocks of the pool stay in memory
    return serve_command(checked_options(layout, shape.dtype, options.kv_cache_dtype, **given), model)


def _beside(tiers: tuple[TierPlan, ...]) -> Iterator[str]:
    """Yield the command line of a daemon beside an engine that has its own pool. All GPUs of the host share its store,
    so it has the whole tiers."""
    chosen, gib = _chosen(tiers), {tier.name: size_gib(tier.gib, 1) for tier in tiers}
    if STORE not in chosen:
        return
    given: dict[str, Any] = {"store_gib": gib[STORE], "pool_gib": 0.1, "swap_space_gib": 0}
    if DISK in chosen:
        given |= {"disk": DIRECTORY, "disk_gib": gib[DISK]}
    if SHARED in chosen:
        given["mooncake"] = MASTER
    _check(given)
    yield serve_command(given, None)


def _notes(options: PlanOptions, tiers: tuple[TierPlan, ...], unbounded: float | None) -> list[str]:
    notes = []
    chosen = _chosen(tiers)
    for tier in tiers[1:]:
        fate = "those below it need it" if tier.name in chosen else "it is left out of the command"
        if not tier.is_worth_loading:
            notes.append(f"{tier.name}: loading takes longer than computing again; {fate}.")
        elif not tier.finds_something:
            notes.append(f"{tier.name}: this trace finds next to nothing there that the tiers above lack; {fate}.")
    if unbounded is not None and tiers and unbounded - max(tier.hit_share or 0.0 for tier in tiers) > 0.02:
        notes.append("larger tiers would find more: see the capacity for 95 % of all reuse.")
    if options.num_gpus > 1:
        notes.append(
            "the command is that of one GPU: the daemon of each needs its own --device, --unix-socket, --tcp-address, "
            "--http-address and --disk."
        )
    if options.prefill_tokens_per_s is None:
        notes.append(f"the speed of prefill is an estimate at {options.efficiency:.0%} of the GPU's peak.")
    return notes


# ---- the plan as tables, or as one JSON object


def to_json(plan: Plan) -> dict[str, Any]:
    return asdict(plan)


def render(plan: Plan, console: Console) -> None:
    facts = Table("what", "figure", title_justify="left", show_header=False)
    for what, figure in _facts(plan):
        facts.add_row(what, figure)
    console.print(facts)
    tiers = Table(
        title="Tiers, each by itself; times in ms of 1,000 tokens",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        title_justify="left",
    )
    tiers.add_column("tier", no_wrap=True)
    for heading in ("GiB", "blocks", "tokens", "sessions", "GB/s", "load", "compute", "found", "gain"):
        tiers.add_column(heading, justify="right", no_wrap=True)
    for tier in plan.tiers:
        tiers.add_row(tier.name, *_figures(tier))
    console.print(tiers)
    for line in (*plan.notes, *_with_titles(plan.commands)):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _with_titles(commands: tuple[str, ...]) -> Iterator[str]:
    titles = ("a daemon whose pool is the engine's:", "a daemon beside an engine that has its own pool:")
    for title, command in zip(titles, commands, strict=False):
        yield from (title, command)


def _facts(plan: Plan) -> list[tuple[str, str]]:
    facts = [
        ("K/V of a token", f"{plan.token_bytes:,} bytes"),
        (f"a block of {plan.layout.block_size} tokens", f"{plan.block_bytes:,} bytes"),
        ("weights", f"{plan.weights_gib:.1f} GiB"),
        ("prompt, session (mean)", f"{plan.prompt_tokens:,} tokens, {plan.session_tokens:,} tokens"),
        ("prefill", f"{plan.prefill_tokens_per_s:,.0f} tokens/s"),
        ("break-even bandwidth", f"{plan.break_even_gb_per_s:.2f} GB/s: below it computing again is faster"),
    ]
    if plan.unbounded_share is not None:
        facts.append(("reuse in the trace", f"{plan.unbounded_share:.1%} of the prompt tokens, if nothing is evicted"))
        facts.append(("capacity for 95 % of it", f"{plan.needed_gib:,.0f} GiB"))
    return facts


def _figures(tier: TierPlan) -> list[str]:
    shares = ["" if share is None else f"{share:.1%}" for share in (tier.hit_share, tier.gained_share)]
    speed = "" if tier.gb_per_s is None else f"{tier.gb_per_s:g}"
    counts = [short(number) for number in (tier.gib, tier.blocks, tier.tokens, round(tier.sessions, 1))]
    return [*counts, speed, f"{tier.load_ms:.1f}", f"{tier.recompute_ms:.1f}", *shares]


def short(number: float) -> str:
    """Return a number with three or four digits: 57k, 16.4M."""
    for unit, size, least in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e3, 1e4)):
        if number >= least:
            return f"{number / size:.3g}{unit}"
    return f"{number:.4g}"
