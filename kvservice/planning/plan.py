"""What tiers hold for a model, and whether loading K/V from them is faster than computing them again."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from kvservice.errors import InvalidArgumentError
from kvservice.model_shape import PoolOptions, read_pool_options
from kvservice.planning.gpus import Gpu
from kvservice.planning.parameters import count_parameters, read_config, weight_bytes
from kvservice.planning.reuse import accesses_of, hit_share, stack_distances
from kvservice.planning.trace import Trace
from kvservice.pool.layout import DTYPES, PoolLayout

GIB = 1 << 30


@dataclass(frozen=True)
class PlanOptions:
    """What is known or assumed. Speeds in GB/s are 1e9 bytes a second; None: the GPU's own, or estimated. A tier with
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


@dataclass(frozen=True)
class Plan:
    """The figures of a model on a GPU. `unbounded_share` is the hit share of the trace if nothing were evicted, and
    `needed_gib` the capacity that reaches 95 % of it."""

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
            field="num_gpus",
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
        commands=_commands(options, shape, layout, tiers),
        notes=tuple(_notes(options, tiers, unbounded)),
    )


def _layout(shape: PoolOptions, options: PlanOptions) -> PoolLayout:
    """Return the pool of one GPU. KV heads are divided among the GPUs."""
    if shape.num_kv_heads % options.num_gpus:
        raise InvalidArgumentError(f"{shape.num_kv_heads} KV heads cannot be divided", field="num_gpus")
    dtypes = {"auto": shape.dtype, "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
    dtype = dtypes.get(options.kv_cache_dtype, options.kv_cache_dtype)
    if dtype not in DTYPES:
        raise InvalidArgumentError(f"{dtype!r} is not a dtype of a pool", field="kv_cache_dtype")
    heads = shape.num_kv_heads // options.num_gpus
    return PoolLayout(shape.num_layers, heads, shape.head_size, options.block_size, dtype)


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
    itemsize = DTYPES[shape.dtype].itemsize if shape.dtype in DTYPES else 2
    return total * itemsize / GIB


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
    for name, gib, gb_per_s in (
        ("GPU pool", pool_gib, None),
        ("host store", options.store_gib, link),
        ("disk", options.disk_gib, min(link, options.disk_gb_per_s)),
        ("shared", options.shared_gib, min(link, options.shared_gb_per_s)),
    ):
        if gib <= 0:
            continue
        blocks = int(gib * GIB / (token_bytes * options.block_size))
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


def _commands(
    options: PlanOptions, shape: PoolOptions, layout: PoolLayout, tiers: tuple[TierPlan, ...]
) -> tuple[str, ...]:
    """Return the command line of a daemon. With several GPUs there is one for each, with its part of the tiers."""
    model = f"--model {options.model}"
    if options.num_gpus > 1:
        model = (
            f"--num-layers {layout.num_layers} --num-kv-heads {layout.num_kv_heads} --head-size {layout.head_size} "
            f"--dtype {shape.dtype}"
        )
    words = [f"kvservice serve {model} --device cuda --block-size {options.block_size}"]
    if options.kv_cache_dtype != "auto":
        words.append(f"--kv-cache-dtype {options.kv_cache_dtype}")
    for tier in tiers:
        share_gib = round(tier.gib / options.num_gpus, 1)
        if tier.name == "GPU pool":
            words.append(f"--pool-gib {int(10 * tier.gib / options.num_gpus) / 10:g}")
        elif tier.name == "host store":
            words.append(f"--store-gib {share_gib:g}")
        elif tier.is_worth_loading and tier.name == "disk":
            words.append(f"--disk DIRECTORY --disk-gib {share_gib:g}")
        elif tier.is_worth_loading:
            words.append("--mooncake MASTER:PORT")
    return (" ".join(words),)


def _notes(options: PlanOptions, tiers: tuple[TierPlan, ...], unbounded: float | None) -> list[str]:
    notes = []
    for tier in tiers[1:]:
        if not tier.is_worth_loading:
            notes.append(f"{tier.name}: loading takes longer than computing again; it is left out of the command.")
        elif tier.gained_share is not None and tier.gained_share < 0.005:
            notes.append(f"{tier.name}: this trace finds next to nothing there that the tiers above do not have.")
    if unbounded is not None and tiers and unbounded - max(tier.hit_share or 0.0 for tier in tiers) > 0.02:
        notes.append("larger tiers would find more: see the capacity for 95 % of all reuse.")
    if options.prefill_tokens_per_s is None:
        notes.append(f"the speed of prefill is an estimate at {options.efficiency:.0%} of the GPU's peak.")
    return notes
