"""Devices: memory and compute of a pool, on the CPU or on a GPU. The engine submits its plans to a `Device`."""

from __future__ import annotations

from kvservice.config import ServeConfig
from kvservice.devices.base import CudaRegion, Device, FinishedSteps, LaneServer, LaneSession, PoolName
from kvservice.kept import KeptState

__all__ = [
    "CudaRegion",
    "Device",
    "FinishedSteps",
    "LaneServer",
    "LaneSession",
    "PoolName",
    "open_device",
    "prepare_device",
]


def open_device(config: ServeConfig, kept: KeptState | None = None) -> Device:
    """Allocate the memory and start the threads of the configured device. A pool in `kept` is taken over with its
    content. Without `kept` the memory ends with this process.

    Raises InvalidArgumentError naming an option that the device does not support, ResourceExhaustedError with the sizes
    if there is not enough memory, and KeptStateError if the memory of an earlier process cannot be used.
    """
    kept = KeptState.fresh() if kept is None else kept
    if config.cuda_device is None:
        from kvservice.devices.cpu import CpuDevice

        return CpuDevice(config, kept)
    from kvservice.devices.cuda import CudaDevice

    return CudaDevice(config, kept)


def prepare_device(config: ServeConfig) -> None:
    """Do what takes time before `open_device` and takes no memory for the pool: load the code, and initialise the GPU.
    Raises InvalidArgumentError as `open_device` does."""
    if config.cuda_device is None:
        from kvservice.devices import cpu  # noqa: F401

        return
    from kvservice.devices.cuda import prepare

    prepare(config)
