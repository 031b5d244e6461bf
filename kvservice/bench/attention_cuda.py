"""Paged attention on a CUDA device, compared with the device's copy bandwidth and with FlashInfer on the same K and V.

Every output is compared with float64 before it is timed, on memory poisoned with NaN. Times are by the device's clock,
of graphs with many calls. Each call uses the next layer, so that no call finds its K and V in L2. Our graphs and the
peer's take rounds. Our kernels need no plan on the host; the peer's plan is timed separately.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any, Final

import torch
from rich.console import Console

from kvservice.bench import cuda_harness, table
from kvservice.bench.cuda_harness import (
    K_SCALE,
    MAX_ERROR,
    SHORT_NAMES,
    Inputs,
    Shape,
    TorchScratch,
    make_inputs,
    relative_error,
)
from kvservice.errors import FailedPreconditionError, InternalError, InvalidArgumentError, KVServiceError
from kvservice.ops.cuda import Kernel

# ---- the shapes


def unequal(num_seqs: int = 64, longest: int = 16384) -> tuple[int, ...]:
    """Return lengths from 1 to `longest`, the same in every run."""
    draw = random.Random(0)
    return (1, longest, *(draw.randint(1, longest) for _ in range(num_seqs - 2)))


DECODE_BATCHES = ((1, 1024), (1, 8192), (1, 131072), (4, 2048), (8, 32768), (16, 1024), (64, 4096), (256, 1024))
DECODE_HEADS = ((32, 8, 128), (64, 8, 128), (32, 32, 128), (16, 1, 128), (32, 4, 64))
EXTEND_BATCHES = ((1, 0, 8192), (8, 7680, 512), (64, 1920, 128), (64, 4088, 8))  # sequences, prefix, new tokens

# Shapes of servers that the grid has not: family, pool types, heads, batches.
_16_BIT, _BOTH = ("bfloat16",), tuple(SHORT_NAMES)
DECODE_FAMILIES = (
    ("few-kv-heads", _BOTH, ((16, 1, 128),), ((32, 512), (400, 160))),
    ("few-kv-heads", _BOTH, ((32, 2, 128),), ((1, 8192), (16, 1024), (32, 512), (64, 4096), (256, 1024), (400, 160))),
    ("short-sequences", _BOTH, ((16, 2, 128), (32, 8, 128), (128, 8, 128), (32, 8, 256)), ((400, 160),)),
    ("head-256", _16_BIT, ((32, 8, 256),), ((1, 8192), (16, 1024), (64, 4096))),
)
EXTEND_FAMILIES = (
    ("short-prompts", _16_BIT, ((32, 8, 128), (32, 32, 128), (16, 1, 128), (32, 8, 64)), ((256, 0, 100), (400, 0, 40))),
    ("prompts", _16_BIT, ((32, 8, 128),), ((2, 0, 2048), (1, 0, 16384), (16, 5, 1000))),
    ("no-groups", _16_BIT, ((32, 32, 128),), ((17, 2011, 65),)),
    ("head-64", _16_BIT, ((32, 8, 64),), ((1, 0, 8192), (8, 0, 1000), (16, 1024, 512), (64, 1920, 128))),
    ("head-256", _16_BIT, ((32, 8, 256),), ((1, 0, 8192), (8, 7680, 512), (64, 1920, 128))),
    (
        "8-bit-extend",
        ("float8_e4m3fn",),
        ((32, 8, 128),),
        ((1, 0, 4096), (8, 7680, 512), (64, 1920, 128), (256, 0, 100)),
    ),
)


def _decode(dtype: str, heads: tuple[int, int, int], num_seqs: int, context: int, family: str = "grid") -> Shape:
    return Shape("decode", dtype, (context,) * num_seqs, f"{num_seqs}x{context}", *heads, family=family)


def _extend(
    dtype: str, heads: tuple[int, int, int], num_seqs: int, prefix: int, query_len: int, family: str = "grid"
) -> Shape:
    contexts, lengths = (prefix + query_len,) * num_seqs, f"{num_seqs}x{query_len} on {prefix}"
    return Shape("extend", dtype, contexts, lengths, *heads, query_len=query_len, family=family)


def _grid() -> Iterator[Shape]:
    for num_seqs, prefix, query_len in EXTEND_BATCHES:
        yield _extend("bfloat16", (32, 8, 128), num_seqs, prefix, query_len)
    for dtype in SHORT_NAMES:
        for heads in DECODE_HEADS:
            for num_seqs, context in DECODE_BATCHES:
                yield _decode(dtype, heads, num_seqs, context)
            yield Shape("decode", dtype, unequal(), "64x1..16384", *heads)


def _families() -> Iterator[Shape]:
    for family, dtypes, all_heads, decodes in DECODE_FAMILIES:
        for dtype, heads, decode in itertools.product(dtypes, all_heads, decodes):
            yield _decode(dtype, heads, *decode, family=family)
    for family, dtypes, all_heads, extends in EXTEND_FAMILIES:
        for dtype, heads, extend in itertools.product(dtypes, all_heads, extends):
            yield _extend(dtype, heads, *extend, family=family)


SHAPES = (*_grid(), *_families())
QUICK = ("extend bf16 32/8x128 64x8 on 4088", "decode bf16 32/8x128 16x1024", "decode e4m3 32/8x128 16x1024")


def select(wanted: str, shapes: tuple[Shape, ...] = SHAPES) -> tuple[Shape, ...]:
    """Return the shapes of which a comma-separated word is the family, or a part of the name; all for the
    empty string."""
    words = [word.strip() for word in wanted.split(",")]
    return tuple(shape for shape in shapes if any(word == shape.family or word in shape.name for word in words))


# ---- shapes drawn at random, so that nobody tunes kernels to a list
#
# Heads are as models have them, batches as servers have them, from one long sequence to hundreds of short ones.


# Query heads, KV heads.
HEADS: Final = (
    (8, 1),
    (16, 1),
    (16, 2),
    (32, 2),
    (28, 4),
    (32, 4),
    (32, 8),
    (40, 8),
    (64, 8),
    (128, 8),
    (16, 16),
    (32, 32),
)
# 128 is what most models have.
HEAD_SIZES: Final = (64, 128, 128, 128, 256)
MAX_SEQS: Final = 512
MAX_LENGTH: Final = 65536
MAX_QUERY_LEN: Final = 16384
# Most bytes of K and V, and most multiplications and additions, of one call.
MAX_KV_BYTES: Final = 2 << 30
MAX_FLOP: Final = 1 << 44


def random_shapes(count: int, seed: int) -> tuple[Shape, ...]:
    """Return `count` shapes, the same for the same seed; the first of them are those of a smaller count."""
    draw = random.Random(seed)
    return tuple(_shape(draw, number) for number in range(count))


def _shape(draw: random.Random, number: int) -> Shape:
    while True:
        shape = _any_shape(draw, number)
        if shape.kv_bytes <= MAX_KV_BYTES and shape.flop <= MAX_FLOP:
            return shape


def _any_shape(draw: random.Random, number: int) -> Shape:
    num_heads, num_kv_heads = draw.choice(HEADS)
    num_seqs = _log_uniform(draw, MAX_SEQS)
    is_decode = draw.random() < 0.5
    query_len = 1 if is_decode else 1 + _log_uniform(draw, MAX_QUERY_LEN - 1)
    longest = 0 if not is_decode and draw.random() < 0.5 else _log_uniform(draw, MAX_LENGTH)
    prefixes = tuple(_prefixes(draw, num_seqs, longest))
    return Shape(
        "decode" if is_decode else "extend",
        draw.choice(tuple(SHORT_NAMES)),
        tuple(query_len + prefix for prefix in prefixes),
        f"{num_seqs}x{query_len} on {min(prefixes)}..{max(prefixes)} #{number}",
        num_heads,
        num_kv_heads,
        draw.choice(HEAD_SIZES),
        query_len,
    )


def _prefixes(draw: random.Random, num_seqs: int, longest: int) -> Iterator[int]:
    """Yield the tokens before the new ones of each sequence: all the same, or any."""
    equal = draw.random() < 0.5
    for _ in range(num_seqs):
        yield longest if equal else draw.randint(0, longest)


def _log_uniform(draw: random.Random, most: int) -> int:
    """Return a number from 1 to `most`: each power of two has the same chance."""
    return int(math.exp(draw.uniform(0, math.log(most + 1))))


# ---- FlashInfer as a peer, if it is installed: the same K and V, in pages of the same size with the same tables
#
# Decode has one path with CUDA cores and one with tensor cores, extend has two with tensor cores; each is measured. Its
# preparation on the host (`plan`) runs before and is timed separately. It compiles a path at its first use.


WORKSPACE_BYTES = 512 << 20
PLANS = 7

PATHS = {"decode": ("CUDA cores", "tensor cores"), "extend": ("fa2", "fa3")}
_KV_DTYPES = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}


def load() -> ModuleType:
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise FailedPreconditionError(f"FlashInfer cannot be imported: {error}") from error


class FlashInfer:
    def __init__(self) -> None:
        self._module = load()
        self.version = str(getattr(self._module, "__version__", "unknown"))
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def prepare(self, inputs: Inputs, path: str, out: torch.Tensor) -> tuple[Callable[[int], object], float]:
        """Return a call that attends in a layer, and the seconds of its plan."""
        wrapper = self._decode(path) if inputs.shape.kind == "decode" else self._extend(path)
        plan = self._planner(wrapper, inputs)
        plan()
        plan_s = statistics.median(host_seconds(plan) for _ in range(PLANS))
        assert inputs.pages is not None
        pages = inputs.pages.view(_KV_DTYPES[inputs.shape.dtype])
        scales = {} if inputs.k_scale is None else {"k_scale": K_SCALE}
        return lambda layer: wrapper.run(inputs.query, pages[layer], out=out, **scales), plan_s

    def _decode(self, path: str) -> Any:
        return self._module.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, kv_layout="HND", use_tensor_cores=path == "tensor cores"
        )

    def _extend(self, path: str) -> Any:
        return self._module.BatchPrefillWithPagedKVCacheWrapper(self._workspace, kv_layout="HND", backend=path)

    def _planner(self, wrapper: Any, inputs: Inputs) -> Callable[[], object]:
        shape = inputs.shape
        starts = torch.tensor((0, *shape.blocks), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        ids = torch.cat([row[:used] for row, used in zip(inputs.block_tables, shape.blocks, strict=True)])
        last = torch.tensor([(context - 1) % shape.block_size + 1 for context in shape.contexts], dtype=torch.int32)
        sizes = (shape.num_heads, shape.num_kv_heads, shape.head_size, shape.block_size)
        dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": _KV_DTYPES[shape.dtype]}
        if shape.kind == "decode":
            return lambda: wrapper.plan(starts, ids, last, *sizes, **dtypes)
        queries = torch.arange(shape.num_seqs + 1, dtype=torch.int32) * shape.query_len
        return lambda: wrapper.plan(queries, starts, ids, last, *sizes, causal=True, **dtypes)


def host_seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# ---- the measurement


OURS, INVARIANT = "ours", "batch-invariant"


@dataclass(frozen=True)
class DeviceBenchOptions:
    """`shapes` are comma-separated parts of names, empty for all. With `random` so many shapes are drawn by the `seed`.
    `batch_invariant` measures it too."""

    shapes: str = ""
    random: int | None = None
    seed: int = 0
    kernel: Kernel = "auto"
    batch_invariant: bool = False
    vs: str | None = None
    quick: bool = False

    @property
    def rounds(self) -> int:
        return 5 if self.quick else 15

    def selected(self) -> tuple[Shape, ...]:
        """Raises InvalidArgumentError if there are none."""
        shapes = random_shapes(self.random, self.seed) if self.random else SHAPES
        for word in self.shapes.split(","):
            if not select(word, shapes):
                families = ", ".join(sorted({shape.family for shape in shapes}))
                raise InvalidArgumentError(f"{word!r} is in no shape's name, and no family: {families}", field="shapes")
        return select(self.shapes or (",".join(QUICK) if self.quick and not self.random else ""), shapes)


def run(options: DeviceBenchOptions) -> dict[str, Any]:
    """Return `ceilings` of the device, and for each shape: `us`, `gb_per_s` (K and V once, per second) or
    `tflop_per_s`, `share_of_copy`, `relative_error` against float64, `peers` by path with `us`, `plan_us` and
    `relative_error`, `peer_us` (of the fastest path) and `speedup`, `batch_invariant_us`; or `failed` with the reason.
    """
    shapes = options.selected()
    cuda_harness.require_device()
    peer = FlashInfer() if options.vs == "flashinfer" else None
    ceilings = cuda_harness.ceilings(options.rounds)
    results = []
    for shape in shapes:
        result = measure_or_fail(shape, options, peer, ceilings["device_copy_gb_per_s"])
        results.append(result)
        print(progress_line(result), file=sys.stderr, flush=True)
        if "failed" in result and not device_works():
            break
    return {
        **cuda_harness.versions(),
        "flashinfer": peer.version if peer else None,
        "kernel": options.kernel,
        "ceilings": ceilings,
        "shapes": results,
    }


def measure_or_fail(
    shape: Shape, options: DeviceBenchOptions, peer: FlashInfer | None, copy_gb_per_s: float
) -> dict[str, Any]:
    """Measure one shape. An error does not stop the measurement of later shapes."""
    facts = {"name": shape.name, **asdict(shape), "num_seqs": shape.num_seqs}
    try:
        return facts | measure(shape, options, peer, copy_gb_per_s)
    except (KVServiceError, RuntimeError) as error:
        return facts | {"failed": str(error).splitlines()[0]}


def device_works() -> bool:
    """Check the device. After most CUDA errors it is unusable for this process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


@dataclass
class Contender:
    graph: torch.cuda.CUDAGraph
    call: object  # it owns the memory that the graph uses
    relative_error: float


def measure(shape: Shape, options: DeviceBenchOptions, peer: FlashInfer | None, copy_gb_per_s: float) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    inputs = make_inputs(shape, seed=0, with_pages=peer is not None)
    contenders = {OURS: prepare(inputs, our_call(inputs, options.kernel, invariant=False))}
    if options.batch_invariant:
        contenders[INVARIANT] = prepare(inputs, our_call(inputs, options.kernel, invariant=True))
    peers = prepare_peers(inputs, peer, contenders)
    replay_s = cuda_harness.device_seconds(
        {name: entry.graph.replay for name, entry in contenders.items()}, options.rounds
    )
    us = {name: seconds / shape.num_calls * 1e6 for name, seconds in replay_s.items()}
    for path in peers.keys() & us.keys():
        peers[path] |= {"us": us[path], "relative_error": contenders[path].relative_error}
    fastest = min((entry["us"] for entry in peers.values() if "us" in entry), default=None)
    return {
        "us": us[OURS],
        "relative_error": contenders[OURS].relative_error,
        "gb_per_s": shape.kv_bytes / us[OURS] / 1e3 if shape.kind == "decode" else None,
        "tflop_per_s": shape.flop / us[OURS] / 1e6 if shape.kind == "extend" else None,
        "share_of_copy": shape.kv_bytes / us[OURS] / 1e3 / copy_gb_per_s if shape.kind == "decode" else None,
        "batch_invariant_us": us.get(INVARIANT),
        "peers": peers,
        "peer_us": fastest,
        "speedup": fastest / us[OURS] if fastest else None,
    }


def our_call(inputs: Inputs, kernel: Kernel, invariant: bool) -> Callable[[torch.Tensor], Callable[[int], object]]:
    scratch = TorchScratch()
    return lambda out: lambda layer: inputs.attend(layer, out, scratch, kernel, invariant)


def prepare(inputs: Inputs, call_into: Callable[[torch.Tensor], Callable[[int], object]]) -> Contender:
    """Check the first and the last layer, capture a graph, and check its output again."""
    shape = inputs.shape
    out = torch.empty_like(inputs.query)
    call = call_into(out)
    errors = []
    for layer in {0, shape.num_layers - 1}:
        out.fill_(math.nan)
        call(layer)
        errors.append(check(inputs, layer, out))
    graph = cuda_harness.graph_of(call, shape.num_layers, shape.num_calls)
    out.fill_(math.nan)
    graph.replay()
    errors.append(check(inputs, (shape.num_calls - 1) % shape.num_layers, out))
    return Contender(graph, call, max(errors))


def check(inputs: Inputs, layer: int, out: torch.Tensor) -> float:
    error = relative_error(inputs, layer, out)
    if not error <= MAX_ERROR:
        raise InternalError(f"wrong result: relative error {error:.3g}")
    return error


def prepare_peers(
    inputs: Inputs, peer: FlashInfer | None, contenders: dict[str, Contender]
) -> dict[str, dict[str, Any]]:
    """Add the peer's paths to the contenders. Returns the time of each path's plan, or the reason why it is missing."""
    peers: dict[str, dict[str, Any]] = {}
    if peer is None:
        return peers
    for path in PATHS[inputs.shape.kind]:
        try:
            contenders[path], plan_s = prepare_peer(inputs, peer, path)
        except Exception as error:  # any error of the peer's library becomes the result in its column
            peers[path] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        else:
            peers[path] = {"plan_us": plan_s * 1e6}
    return peers


def prepare_peer(inputs: Inputs, peer: FlashInfer, path: str) -> tuple[Contender, float]:
    plan_s = math.nan

    def call_into(out: torch.Tensor) -> Callable[[int], object]:
        nonlocal plan_s
        call, plan_s = peer.prepare(inputs, path, out)
        return call

    return prepare(inputs, call_into), plan_s


def progress_line(result: dict[str, Any]) -> str:
    if "failed" in result:
        return f"{result['name']}: {result['failed']}"
    peers = ", ".join(
        f"{path} {entry['us']:.1f} us" if "us" in entry else f"{path} failed" for path, entry in result["peers"].items()
    )
    rate = f"{result['gb_per_s']:.0f} GB/s" if result["gb_per_s"] else f"{result['tflop_per_s']:.0f} TFLOP/s"
    return f"{result['name']}: {result['us']:.1f} us, {rate}, error {result['relative_error']:.1e}; {peers}"


def failures(results: dict[str, Any]) -> list[str]:
    return [f"{shape['name']}: {shape['failed']}" for shape in results["shapes"] if "failed" in shape]


def render(results: dict[str, Any], console: Console) -> None:
    limits = results["ceilings"]
    title = (
        f"{results['device']}, device copy {limits['device_copy_gb_per_s']:.0f} GB/s, "
        f"link {limits['host_to_device_gb_per_s']:.1f} in, {limits['device_to_host_gb_per_s']:.1f} out, "
        f"torch {results['torch']}" + (f", FlashInfer {results['flashinfer']}" if results["flashinfer"] else "")
    )
    figures = ("us", "GB/s", "TFLOP/s", "of copy", "invariant us", "peer us", "plan us", "speedup", "error")
    rows = table(title, ("",), figures)
    for shape in results["shapes"]:
        rows.add_row(shape["name"], *(("failed: " + shape["failed"],) if "failed" in shape else cells(shape)))
    console.print(rows)
    if summary := speedups(results):
        console.print(summary)


def speedups(results: dict[str, Any]) -> str:
    """Return how all shapes together compare with the peer's, or nothing without one."""
    found = sorted(shape["speedup"] for shape in results["shapes"] if shape.get("speedup"))
    if not found:
        return ""
    behind = sum(speedup < 1 for speedup in found)
    mean = statistics.geometric_mean(found)
    return f"{len(found)} shapes: speedup {mean:.2f} (geometric mean), {found[0]:.2f} at least, {behind} below 1"


def cells(shape: dict[str, Any]) -> list[str]:
    return [
        f"{shape['us']:.1f}",
        number(shape["gb_per_s"], ".0f"),
        number(shape["tflop_per_s"], ".0f"),
        number(shape["share_of_copy"], ".0%"),
        number(shape["batch_invariant_us"], ".1f"),
        *peer_cells(shape["peers"]),
        number(shape["speedup"], ".2f"),
        f"{shape['relative_error']:.1e}",
    ]


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def peer_cells(peers: dict[str, dict[str, Any]]) -> tuple[str, str]:
    """Return the time of each path and of its plan, or its error."""
    times = [
        f"{path} {entry['us']:.1f}" if "us" in entry else f"{path} {entry['failed']}" for path, entry in peers.items()
    ]
    plans = [f"{entry['plan_us']:.0f}" if "us" in entry else "" for entry in peers.values()]
    return "\n".join(times), "\n".join(plans)
