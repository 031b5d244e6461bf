"""Timing on a CUDA device, by graphs of many calls that are replayed in turns between two events; and the bandwidth of
plain copies in device memory and over the host link."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from kvservice.bench.harness import medians, take_turns
from kvservice.errors import FailedPreconditionError
from kvservice.ops import cuda

DEVICE_COPY_BYTES = 2 << 30
LINK_BYTES = 1 << 30


def require_device() -> None:
    if not cuda.load_extension().device_count():
        raise FailedPreconditionError("no CUDA device")
    if not torch.cuda.is_available():
        raise FailedPreconditionError("no CUDA device that torch can use: it was built without CUDA, or for another")


def versions() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {"device": properties.name, "torch": torch.__version__, "cuda": torch.version.cuda}


def new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def graph_of(call: Callable[[int], object], num_layers: int, num_calls: int) -> torch.cuda.CUDAGraph:
    """Capture `num_calls` calls, each on the next layer. The very first call runs before the capture."""
    stream = new_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for index in range(num_calls):
            call(index % num_layers)
    return graph


def device_seconds(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each work by the device's clock. The works take turns."""
    return medians(take_turns({name: partial(elapsed_s, work) for name, work in works.items()}, rounds, warm_ups=1))


def elapsed_s(work: Callable[[], object]) -> float:
    """Return the seconds between events around the work that `work` enqueues on the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def ceilings(rounds: int) -> dict[str, float]:
    """Return GB/s of a plain copy within the device (bytes read plus written), and of the host link per direction."""
    source = torch.ones(DEVICE_COPY_BYTES, dtype=torch.uint8, device="cuda")
    copy = torch.empty_like(source)
    pinned = torch.ones(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    part = source[:LINK_BYTES]
    seconds = device_seconds(
        {
            "device_copy": lambda: copy.copy_(source),
            "host_to_device": lambda: part.copy_(pinned, non_blocking=True),
            "device_to_host": lambda: pinned.copy_(part, non_blocking=True),
        },
        rounds,
    )
    return {
        "device_copy_gb_per_s": 2 * DEVICE_COPY_BYTES / seconds["device_copy"] / 1e9,
        "host_to_device_gb_per_s": LINK_BYTES / seconds["host_to_device"] / 1e9,
        "device_to_host_gb_per_s": LINK_BYTES / seconds["device_to_host"] / 1e9,
    }
