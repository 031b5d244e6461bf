"""Creation of the configured device."""

from __future__ import annotations

from kvservice.config import ServeConfig
from kvservice.devices.base import Device


def open_device(config: ServeConfig) -> Device:
    """Allocate the memory and start the threads of the configured device.

    Raises InvalidArgumentError naming an option that the device does not support, and ResourceExhaustedError with the
    sizes if there is not enough memory.
    """
    if config.cuda_device is None:
        from kvservice.devices.cpu import CpuDevice

        return CpuDevice(config)
    from kvservice.devices.cuda import CudaDevice

    return CudaDevice(config)
