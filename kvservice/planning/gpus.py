"""Figures of GPUs: memory as nvidia-smi reports it, peaks of dense matrix products in bfloat16, and the host link.

The peaks are from NVIDIA's data sheets, without sparsity: H100 SXM and H200 SXM 989 TFLOP/s, A100 80 GB SXM 312, L40S
362 and HGX B200 2250. The link is what copies of pinned memory reach, not the nominal figure: 55 GB/s were measured on
PCIe 5 (kvservice/bench/README.md), and 25 GB/s are usual on PCIe 4.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvservice.errors import InvalidArgumentError


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
