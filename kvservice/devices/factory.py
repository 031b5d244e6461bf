"""From the configuration to a device: the one place that asks which."""

from __future__ import annotations

from kvservice.config import ServeConfig
from kvservice.devices.base import Device


def open_device(config: ServeConfig) -> Device:
    """Take the memory and start the threads that the configured device needs.

    Raises InvalidArgumentError naming the option that the device cannot do, ResourceExhaustedError with the numbers
    where the memory is not there.
    """
    if config.cuda_device is None:
        from kvservice.devices.cpu import CpuDevice

        return CpuDevice(config)
    from kvservice.devices.cuda import CudaDevice

    return CudaDevice(config)
