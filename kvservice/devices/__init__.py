"""Devices: memory and compute of a pool, on the CPU or on a GPU. The engine submits its plans to a `Device`."""

from kvservice.devices.base import CudaRegion, Device, FinishedSteps, LaneServer, LaneSession, PoolName
from kvservice.devices.factory import open_device, prepare_device

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
