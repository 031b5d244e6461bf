"""Where the bytes are and who computes on them: one `Device` for each place, which the engine hands its plans to."""

from kvservice.devices.base import AttentionOptions, CudaRegion, Device, LaneServer, LaneSession
from kvservice.devices.factory import open_device
from kvservice.ops.cuda import BlockSparse

__all__ = ["AttentionOptions", "BlockSparse", "CudaRegion", "Device", "LaneServer", "LaneSession", "open_device"]
