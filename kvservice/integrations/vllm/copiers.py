"""The choice of the way by which blocks are copied."""

from __future__ import annotations

import logging

from kvservice.errors import InvalidArgumentError
from kvservice.integrations.vllm.gpu_blocks import GpuBlocks
from kvservice.integrations.vllm.layout import BlockLayout
from kvservice.integrations.vllm.mapped_copies import MappedCopier
from kvservice.integrations.vllm.transfers import BlockCopier, HostCopier, StagedCopier

logger = logging.getLogger(__name__)


def block_copier(layout: BlockLayout, *, verify: bool = False) -> BlockCopier:
    """`verify`: a block whose checksum is wrong is not right. Raises InvalidArgumentError for a device that is not
    supported."""
    kinds = {memory.device.type for memory in layout.memories}
    if kinds == {"cpu"}:
        return HostCopier(layout, verify=verify)
    if kinds != {"cuda"}:
        raise InvalidArgumentError(f"K/V caches on {', '.join(sorted(kinds))} are not supported", field="kv_caches")
    staged = StagedCopier(layout, verify=verify)
    if GpuBlocks.supports(layout):
        return MappedCopier(GpuBlocks(layout), staged, verify=verify)
    logger.warning("kvservice was built without CUDA, or blocks are not aligned to 16 bytes: they are copied twice")
    return staged
