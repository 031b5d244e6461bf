from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AllocStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ALLOC_STATUS_UNSPECIFIED: _ClassVar[AllocStatus]
    ALLOC_STATUS_OK: _ClassVar[AllocStatus]
    ALLOC_STATUS_LATER: _ClassVar[AllocStatus]
    ALLOC_STATUS_NEVER: _ClassVar[AllocStatus]

class SwapTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SWAP_TIER_UNSPECIFIED: _ClassVar[SwapTier]
    SWAP_TIER_DISK: _ClassVar[SwapTier]
ALLOC_STATUS_UNSPECIFIED: AllocStatus
ALLOC_STATUS_OK: AllocStatus
ALLOC_STATUS_LATER: AllocStatus
ALLOC_STATUS_NEVER: AllocStatus
SWAP_TIER_UNSPECIFIED: SwapTier
SWAP_TIER_DISK: SwapTier

class ExtraKey(_message.Message):
    __slots__ = ("position", "key")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    position: int
    key: bytes
    def __init__(self, position: _Optional[int] = ..., key: _Optional[bytes] = ...) -> None: ...

class SequenceAllocation(_message.Message):
    __slots__ = ("sequence_id", "token_ids", "extra_keys")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    extra_keys: _containers.RepeatedCompositeFieldContainer[ExtraKey]
    def __init__(self, sequence_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., extra_keys: _Optional[_Iterable[_Union[ExtraKey, _Mapping]]] = ...) -> None: ...

class AllocateRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "sequences", "lookahead")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceAllocation]
    lookahead: int
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ..., sequences: _Optional[_Iterable[_Union[SequenceAllocation, _Mapping]]] = ..., lookahead: _Optional[int] = ...) -> None: ...

class AllocateResponse(_message.Message):
    __slots__ = ("num_cached_tokens", "num_blocks")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_cached_tokens: _Optional[_Iterable[int]] = ..., num_blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class CanAllocateRequest(_message.Message):
    __slots__ = ("session_token", "sequences", "lookahead")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceAllocation]
    lookahead: int
    def __init__(self, session_token: _Optional[bytes] = ..., sequences: _Optional[_Iterable[_Union[SequenceAllocation, _Mapping]]] = ..., lookahead: _Optional[int] = ...) -> None: ...

class CanAllocateResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: AllocStatus
    def __init__(self, status: _Optional[_Union[AllocStatus, str]] = ...) -> None: ...

class AppendRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "sequence_ids", "token_ids", "num_tokens", "expected_lengths", "lookahead", "return_slot_mapping")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    RETURN_SLOT_MAPPING_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    expected_lengths: _containers.RepeatedScalarFieldContainer[int]
    lookahead: int
    return_slot_mapping: bool
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., expected_lengths: _Optional[_Iterable[int]] = ..., lookahead: _Optional[int] = ..., return_slot_mapping: bool = ...) -> None: ...

class CanAppendRequest(_message.Message):
    __slots__ = ("session_token", "sequence_ids", "num_tokens", "lookahead")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    lookahead: int
    def __init__(self, session_token: _Optional[bytes] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., lookahead: _Optional[int] = ...) -> None: ...

class CanAppendResponse(_message.Message):
    __slots__ = ("ok",)
    OK_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    def __init__(self, ok: bool = ...) -> None: ...

class OpenStepRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "sequence_ids", "num_tokens", "return_slot_mapping")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETURN_SLOT_MAPPING_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    return_slot_mapping: bool
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., return_slot_mapping: bool = ...) -> None: ...

class OpenAheadRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "sequence_ids", "num_steps", "expected_lengths")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    num_steps: int
    expected_lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., num_steps: _Optional[int] = ..., expected_lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitAheadRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "step_id", "token_ids", "num_tokens", "num_steps")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    step_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_steps: int
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ..., step_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., num_steps: _Optional[int] = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("step_id", "query_lens", "context_lens", "cow_copies", "slot_mapping", "mapped")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    QUERY_LENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENS_FIELD_NUMBER: _ClassVar[int]
    COW_COPIES_FIELD_NUMBER: _ClassVar[int]
    SLOT_MAPPING_FIELD_NUMBER: _ClassVar[int]
    MAPPED_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    query_lens: _containers.RepeatedScalarFieldContainer[int]
    context_lens: _containers.RepeatedScalarFieldContainer[int]
    cow_copies: int
    slot_mapping: _containers.RepeatedScalarFieldContainer[int]
    mapped: MappedStep
    def __init__(self, step_id: _Optional[int] = ..., query_lens: _Optional[_Iterable[int]] = ..., context_lens: _Optional[_Iterable[int]] = ..., cow_copies: _Optional[int] = ..., slot_mapping: _Optional[_Iterable[int]] = ..., mapped: _Optional[_Union[MappedStep, _Mapping]] = ...) -> None: ...

class MappedStep(_message.Message):
    __slots__ = ("slot", "offset")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    slot: int
    offset: int
    def __init__(self, slot: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class TruncateRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "sequence_ids", "lengths")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class TruncateResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "parent_ids", "child_ids")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_IDS_FIELD_NUMBER: _ClassVar[int]
    CHILD_IDS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    parent_ids: _containers.RepeatedScalarFieldContainer[int]
    child_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ..., parent_ids: _Optional[_Iterable[int]] = ..., child_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ForkResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SwapOutRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "sequence_ids", "tier")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    tier: SwapTier
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., tier: _Optional[_Union[SwapTier, str]] = ...) -> None: ...

class CanSwapOutRequest(_message.Message):
    __slots__ = ("session_token", "sequence_ids")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_token: _Optional[bytes] = ..., sequence_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CanSwapOutResponse(_message.Message):
    __slots__ = ("ok",)
    OK_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    def __init__(self, ok: bool = ...) -> None: ...

class SwapInRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "sequence_ids")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ..., sequence_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CanSwapInRequest(_message.Message):
    __slots__ = ("session_token", "sequence_ids")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_token: _Optional[bytes] = ..., sequence_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CanSwapInResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: AllocStatus
    def __init__(self, status: _Optional[_Union[AllocStatus, str]] = ...) -> None: ...

class SwapResponse(_message.Message):
    __slots__ = ("moved_blocks",)
    MOVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    moved_blocks: int
    def __init__(self, moved_blocks: _Optional[int] = ...) -> None: ...

class FreeRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "sequence_ids")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ..., sequence_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class FreeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("session_token", "sequence_ids", "return_token_ids", "return_block_ids", "first")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    RETURN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RETURN_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    return_token_ids: bool
    return_block_ids: bool
    first: int
    def __init__(self, session_token: _Optional[bytes] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., return_token_ids: bool = ..., return_block_ids: bool = ..., first: _Optional[int] = ...) -> None: ...

class SequenceDescription(_message.Message):
    __slots__ = ("sequence_id", "length", "num_computed_tokens", "num_blocks", "swapped", "token_ids", "block_ids", "on_disk")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    ON_DISK_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    length: int
    num_computed_tokens: int
    num_blocks: int
    swapped: bool
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    on_disk: bool
    def __init__(self, sequence_id: _Optional[int] = ..., length: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., swapped: bool = ..., token_ids: _Optional[_Iterable[int]] = ..., block_ids: _Optional[_Iterable[int]] = ..., on_disk: bool = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("sequences", "num_sequences", "lost_sequence_ids", "num_lost_sequences")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    LOST_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOST_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceDescription]
    num_sequences: int
    lost_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    num_lost_sequences: int
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceDescription, _Mapping]]] = ..., num_sequences: _Optional[int] = ..., lost_sequence_ids: _Optional[_Iterable[int]] = ..., num_lost_sequences: _Optional[int] = ...) -> None: ...

class MatchPrefixRequest(_message.Message):
    __slots__ = ("session_token", "token_ids", "extra_keys")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    extra_keys: _containers.RepeatedCompositeFieldContainer[ExtraKey]
    def __init__(self, session_token: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., extra_keys: _Optional[_Iterable[_Union[ExtraKey, _Mapping]]] = ...) -> None: ...

class MatchPrefixResponse(_message.Message):
    __slots__ = ("num_cached_tokens",)
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    def __init__(self, num_cached_tokens: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "token_ids", "extra_keys", "ttl_s")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    extra_keys: _containers.RepeatedCompositeFieldContainer[ExtraKey]
    ttl_s: float
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., extra_keys: _Optional[_Iterable[_Union[ExtraKey, _Mapping]]] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("pin_id", "num_pinned_tokens")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PINNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    pin_id: int
    num_pinned_tokens: int
    def __init__(self, pin_id: _Optional[int] = ..., num_pinned_tokens: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "pin_id")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    pin_id: int
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ..., pin_id: _Optional[int] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ("session_token", "request_id")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ...) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommonPrefixRequest(_message.Message):
    __slots__ = ("session_token", "sequence_ids")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_token: _Optional[bytes] = ..., sequence_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CommonPrefixResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...
