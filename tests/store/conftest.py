"""The store of these tests."""

from blocks_rig import rig

__all__ = ["rig"]
