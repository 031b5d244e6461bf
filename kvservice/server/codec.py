"""Translation of protobuf requests to native values, and of results to protobuf responses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvservice.attention_options import AttentionOptions, BlockSparse
from kvservice.blocks import BlocksStats, DiskSequence, SequenceSnapshot, StepPlan
from kvservice.config import ServeConfig
from kvservice.devices import Device
from kvservice.errors import InvalidArgumentError
from kvservice.server.memory.region import Place, Region
from kvservice.server.memory.regions import Regions, Target
from kvservice.telemetry.link import MAX_SEARCH_LENGTH
from kvservice.transfer import is_installed
from kvservice.v1 import (
    attention_pb2,
    blocks_pb2,
    host_pb2,
    inspect_pb2,
    pool_pb2,
    shared_memory_pb2,
    store_pb2,
    tensor_pb2,
)
from kvservice.wire.encoded import Encoded, encode_tensor
from kvservice.wire.tensors import Array, put_type, to_array, to_ints

MAX_SNAPSHOT_ROWS = 1000
TENSORS_TOO_LARGE = "a call's tensors may not be larger than a message"
# Bytes reserved for the fields of a message besides its tensors.
_MESSAGE_OVERHEAD = 4096
# The request types that only clients on this host may send.
HOST_REQUESTS: tuple[type[Message], ...] = (
    store_pb2.MapStoreRequest,
    *(
        GetMessageClass(method.input_type)
        for module, name in ((shared_memory_pb2, "SharedMemoryService"), (host_pb2, "HostService"))
        for method in module.DESCRIPTOR.services_by_name[name].methods
    ),
)


def extra_keys(keys: Iterable[blocks_pb2.ExtraKey]) -> tuple[tuple[int, bytes], ...]:
    return tuple((key.position, key.key) for key in keys)


def optional_ints(repeated: Sequence[int], dtype: type[np.integer[Any]] = np.int64) -> Array | None:
    """Return the integers as an array, or None for an empty repeated field, which means that it was not set."""
    return to_ints(repeated, dtype) if repeated else None


def is_for_this_host(request: Message) -> bool:
    """Return whether only clients on the daemon's host may send requests of this type."""
    return isinstance(request, HOST_REQUESTS)


def named_regions(request: Message) -> list[str]:
    """Return the names of the regions that the blocks or tensors of a request are in."""
    names = []
    for _, value in request.ListFields():
        if isinstance(value, tensor_pb2.SharedMemoryPlace | store_pb2.Scatter):
            names.append(value.region)
        elif isinstance(value, tensor_pb2.Tensor) and value.HasField("shared_memory"):
            names.append(value.shared_memory.region)
    return names


def place_of(message: tensor_pb2.SharedMemoryPlace) -> Place:
    return Place(message.region, message.offset, message.byte_size)


class TensorReader:
    """Reads the input tensors of a call from its message or from regions.

    The total size of the tensors in regions is limited to the size of a message.
    """

    def __init__(self, regions: Regions, max_bytes: int) -> None:
        self._regions = regions
        self._left = max_bytes

    def array(self, tensor: tensor_pb2.Tensor, field: str) -> Array:
        """Return the tensor as an array. Raises InvalidArgumentError, and the errors of `Regions.read`."""
        return to_array(tensor, field, self._read)

    def _read(self, message: tensor_pb2.SharedMemoryPlace, field: str) -> Array:
        self._left -= message.byte_size
        if self._left < 0:
            raise InvalidArgumentError(TENSORS_TOO_LARGE, field=f"{field}.byte_size")
        return self._regions.read(place_of(message), field)


@contextlib.contextmanager
def output_target(regions: Regions, request: attention_pb2.AttendRequest, field: str) -> Iterator[Target | None]:
    """Yield the place in a region where the request wants an output, or None if the output belongs in the response.
    The region stays in use until the context ends."""
    if not request.HasField(field):
        yield None
        return
    with regions.target(place_of(getattr(request, field)), field) as target:
        yield target


def encode_output(array: Array, target: Target | None) -> Encoded:
    """Encode a Tensor message. Without a target it contains the elements. Otherwise the elements are written to the
    target, and the message contains their place."""
    if target is None:
        return encode_tensor(array)
    place = target.put(array)
    message = tensor_pb2.Tensor()
    put_type(array, message)
    message.shared_memory.region = place.region
    message.shared_memory.offset = place.offset
    message.shared_memory.byte_size = place.byte_size
    return Encoded((message.SerializeToString(),))


def system_region_status(regions: Mapping[str, Region]) -> shared_memory_pb2.SystemSharedMemoryStatusResponse:
    kind = shared_memory_pb2.SystemSharedMemoryStatusResponse.RegionStatus
    return shared_memory_pb2.SystemSharedMemoryStatusResponse(
        regions={
            name: kind(name=name, key=region.key, offset=region.offset, byte_size=region.byte_size)
            for name, region in regions.items()
        }
    )


def cuda_region_status(regions: Mapping[str, Region]) -> shared_memory_pb2.CudaSharedMemoryStatusResponse:
    kind = shared_memory_pb2.CudaSharedMemoryStatusResponse.RegionStatus
    return shared_memory_pb2.CudaSharedMemoryStatusResponse(
        regions={
            name: kind(name=name, device_id=region.device_id, byte_size=region.byte_size)
            for name, region in regions.items()
        }
    )


def optional_layer(request: attention_pb2.WriteRequest | attention_pb2.ReadRequest) -> int | None:
    return request.layer if request.HasField("layer") else None


def attention_options(options: attention_pb2.AttentionOptions) -> AttentionOptions:
    slopes = np.array(options.alibi_slopes, np.float32) if options.alibi_slopes else None
    sparse = block_sparse(options.block_sparse) if options.HasField("block_sparse") else None
    return AttentionOptions(options.scale or None, options.sliding_window, options.logits_soft_cap, slopes, sparse)


def block_sparse(sparse: attention_pb2.BlockSparse) -> BlockSparse:
    return BlockSparse(
        sparse.vert_stride, sparse.local_blocks, sparse.block_size, sparse.head_sliding_step, sparse.tp_rank
    )


def step_response(step: StepPlan, return_slot_mapping: bool, mapped: tuple[int, int] | None) -> blocks_pb2.StepResponse:
    """Encode a step. `mapped` has the slot and the offset of the step in the session's step tables."""
    response = blocks_pb2.StepResponse(
        step_id=step.step_id,
        query_lens=step.query_lens.tolist(),
        context_lens=step.context_lens.tolist(),
        cow_copies=len(step.copies),
    )
    if return_slot_mapping:
        response.slot_mapping.extend(step.slot_mapping.tolist())
    if mapped is not None:
        response.mapped.slot, response.mapped.offset = mapped
    return response


def description(info: SequenceSnapshot) -> blocks_pb2.SequenceDescription:
    return blocks_pb2.SequenceDescription(
        sequence_id=info.sequence_id,
        length=info.length,
        num_computed_tokens=info.num_computed,
        num_blocks=info.num_blocks,
        swapped=info.swapped,
        token_ids=() if info.token_ids is None else info.token_ids.tolist(),
        block_ids=() if info.block_ids is None else info.block_ids.tolist(),
    )


def disk_description(sequence_id: int, info: DiskSequence) -> blocks_pb2.SequenceDescription:
    return blocks_pb2.SequenceDescription(
        sequence_id=sequence_id,
        length=info.length,
        num_computed_tokens=info.num_computed,
        swapped=True,
        on_disk=True,
    )


def info_response(config: ServeConfig, device: Device, store_bytes: int, version: str) -> pool_pb2.GetInfoResponse:
    limits = config.request_limits
    return pool_pb2.GetInfoResponse(
        version=version,
        device=config.device,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        dtype=config.dtype,
        block_size=config.block_size,
        num_blocks=device.num_blocks,
        num_swap_blocks=device.num_swap_blocks,
        block_bytes=config.layout.block_bytes,
        enable_prefix_caching=config.enable_prefix_caching,
        max_sequences=config.max_sequences,
        max_sequence_tokens=config.max_sequence_tokens,
        max_message_bytes=config.max_message_bytes,
        max_request_sequences=limits.max_request_sequences,
        max_request_tokens=limits.max_request_tokens,
        max_request_blocks=limits.max_request_blocks,
        session_grace_s=config.session_grace_s,
        kv_cache_dtype=config.layout.dtype,
        batch_invariant=config.batch_invariant,
        allow_client_shm=config.shares_memory,
        share_pool=config.share_pool,
        store_bytes=store_bytes,
        share_store=config.shares_store,
        transfer_protocol=config.transfer_protocol if config.transfer_address and is_installed() else "",
        transfer_address=config.transfer_address,
    )


def stats_response(stats: BlocksStats, num_sessions: int) -> pool_pb2.GetStatsResponse:
    """The fields of the response, except the sessions, have the names of `BlocksStats`."""
    published = pool_pb2.GetStatsResponse.DESCRIPTOR.fields_by_name
    figures = {name: value for name, value in stats._asdict().items() if name in published}
    return pool_pb2.GetStatsResponse(**figures, sessions=num_sessions)


def check_snapshot_request(request: inspect_pb2.GetSnapshotRequest) -> None:
    for field in ("max_sessions", "max_sequences"):
        if not 0 <= getattr(request, field) <= MAX_SNAPSHOT_ROWS:
            raise InvalidArgumentError(f"is not from 0 to {MAX_SNAPSHOT_ROWS}", field=field)
    if len(request.search) > MAX_SEARCH_LENGTH:
        raise InvalidArgumentError(f"has more than {MAX_SEARCH_LENGTH} characters", field="search")


def max_response_bytes(config: ServeConfig) -> int:
    """Return the limit on the tensors and lists of a response."""
    return config.max_message_bytes - _MESSAGE_OVERHEAD


def check_response_size(num_bytes: int, limit: int, field: str) -> None:
    """Raise InvalidArgumentError if the response would exceed a message. Called before the work is done."""
    if num_bytes > limit:
        raise InvalidArgumentError(f"the answer would take {num_bytes} bytes, a message may have {limit}", field=field)
