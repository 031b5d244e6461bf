from kvservice.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttendRequest(_message.Message):
    __slots__ = ("session_token", "step_id", "layer", "query", "key", "value", "options", "return_lse", "output_place", "lse_place", "first_token", "num_tokens")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    RETURN_LSE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_PLACE_FIELD_NUMBER: _ClassVar[int]
    LSE_PLACE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    step_id: int
    layer: int
    query: _tensor_pb2.Tensor
    key: _tensor_pb2.Tensor
    value: _tensor_pb2.Tensor
    options: AttentionOptions
    return_lse: bool
    output_place: _tensor_pb2.SharedMemoryPlace
    lse_place: _tensor_pb2.SharedMemoryPlace
    first_token: int
    num_tokens: int
    def __init__(self, session_token: _Optional[bytes] = ..., step_id: _Optional[int] = ..., layer: _Optional[int] = ..., query: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., key: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., value: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., options: _Optional[_Union[AttentionOptions, _Mapping]] = ..., return_lse: bool = ..., output_place: _Optional[_Union[_tensor_pb2.SharedMemoryPlace, _Mapping]] = ..., lse_place: _Optional[_Union[_tensor_pb2.SharedMemoryPlace, _Mapping]] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class AttentionOptions(_message.Message):
    __slots__ = ("scale", "sliding_window", "logits_soft_cap", "alibi_slopes", "block_sparse")
    SCALE_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    LOGITS_SOFT_CAP_FIELD_NUMBER: _ClassVar[int]
    ALIBI_SLOPES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SPARSE_FIELD_NUMBER: _ClassVar[int]
    scale: float
    sliding_window: int
    logits_soft_cap: float
    alibi_slopes: _containers.RepeatedScalarFieldContainer[float]
    block_sparse: BlockSparse
    def __init__(self, scale: _Optional[float] = ..., sliding_window: _Optional[int] = ..., logits_soft_cap: _Optional[float] = ..., alibi_slopes: _Optional[_Iterable[float]] = ..., block_sparse: _Optional[_Union[BlockSparse, _Mapping]] = ...) -> None: ...

class BlockSparse(_message.Message):
    __slots__ = ("vert_stride", "local_blocks", "block_size", "head_sliding_step", "tp_rank")
    VERT_STRIDE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEAD_SLIDING_STEP_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    vert_stride: int
    local_blocks: int
    block_size: int
    head_sliding_step: int
    tp_rank: int
    def __init__(self, vert_stride: _Optional[int] = ..., local_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., head_sliding_step: _Optional[int] = ..., tp_rank: _Optional[int] = ...) -> None: ...

class AttendResponse(_message.Message):
    __slots__ = ("output", "lse")
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    LSE_FIELD_NUMBER: _ClassVar[int]
    output: _tensor_pb2.Tensor
    lse: _tensor_pb2.Tensor
    def __init__(self, output: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., lse: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("session_token", "step_id", "layer", "key", "value", "first_token", "num_tokens")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    step_id: int
    layer: int
    key: _tensor_pb2.Tensor
    value: _tensor_pb2.Tensor
    first_token: int
    num_tokens: int
    def __init__(self, session_token: _Optional[bytes] = ..., step_id: _Optional[int] = ..., layer: _Optional[int] = ..., key: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., value: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class WriteResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SequenceRange(_message.Message):
    __slots__ = ("sequence_id", "start", "stop")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    start: int
    stop: int
    def __init__(self, sequence_id: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("session_token", "ranges", "layer", "key_place", "value_place")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    KEY_PLACE_FIELD_NUMBER: _ClassVar[int]
    VALUE_PLACE_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    ranges: _containers.RepeatedCompositeFieldContainer[SequenceRange]
    layer: int
    key_place: _tensor_pb2.SharedMemoryPlace
    value_place: _tensor_pb2.SharedMemoryPlace
    def __init__(self, session_token: _Optional[bytes] = ..., ranges: _Optional[_Iterable[_Union[SequenceRange, _Mapping]]] = ..., layer: _Optional[int] = ..., key_place: _Optional[_Union[_tensor_pb2.SharedMemoryPlace, _Mapping]] = ..., value_place: _Optional[_Union[_tensor_pb2.SharedMemoryPlace, _Mapping]] = ...) -> None: ...

class ReadResponse(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: _tensor_pb2.Tensor
    value: _tensor_pb2.Tensor
    def __init__(self, key: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., value: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...
