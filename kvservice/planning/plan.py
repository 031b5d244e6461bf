"""Computes what tiers hold for a model, and whether loading K/V from them is faster than computing them again."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvservice.errors import InvalidArgumentError
from kvservice.model_shape import PoolOptions, read_pool_options, snapshot_name
from kvservice.planning.command import DIRECTORY, GIB, MASTER, WEIGHTS, checked_options, serve_command, size_gib
from kvservice.planning.gpus import Gpu
from kvservice.planning.parameters import count_parameters, read_config, weight_bytes
from kvservice.planning.reuse import accesses_of, hit_share, stack_distances
from kvservice.planning.trace import Trace
from kvservice.pool.layout import TENSOR_DTYPES, PoolLayout

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
    `needed_gib` the capacity that reaches 95 % of it. `commands` start the daemon of a GPU."""

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
        commands=(_command(options, shape, layout, tiers),),
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
