"""Where the bytes are and who computes on them: one `Device` for each place, which the engine hands its plans to."""

from kvservice.devices.base import AttentionOptions, BlockSparse, Device
from kvservice.devices.factory import open_device

__all__ = ["AttentionOptions", "BlockSparse", "Device", "open_device"]
