from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("version", "device", "num_layers", "num_kv_heads", "head_size", "dtype", "block_size", "num_blocks", "num_swap_blocks", "block_bytes", "enable_prefix_caching", "max_sequences", "max_sequence_tokens", "max_message_bytes", "session_grace_s", "kv_cache_dtype", "batch_invariant", "allow_client_shm", "share_pool", "max_request_sequences", "max_request_tokens", "max_request_blocks", "store_bytes", "share_store", "transfer_protocol", "transfer_address")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENABLE_PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_GRACE_S_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    ALLOW_CLIENT_SHM_FIELD_NUMBER: _ClassVar[int]
    SHARE_POOL_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STORE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARE_STORE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    version: str
    device: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str
    block_size: int
    num_blocks: int
    num_swap_blocks: int
    block_bytes: int
    enable_prefix_caching: bool
    max_sequences: int
    max_sequence_tokens: int
    max_message_bytes: int
    session_grace_s: float
    kv_cache_dtype: str
    batch_invariant: bool
    allow_client_shm: bool
    share_pool: str
    max_request_sequences: int
    max_request_tokens: int
    max_request_blocks: int
    store_bytes: int
    share_store: str
    transfer_protocol: str
    transfer_address: str
    def __init__(self, version: _Optional[str] = ..., device: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_size: _Optional[int] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_swap_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., enable_prefix_caching: bool = ..., max_sequences: _Optional[int] = ..., max_sequence_tokens: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., session_grace_s: _Optional[float] = ..., kv_cache_dtype: _Optional[str] = ..., batch_invariant: bool = ..., allow_client_shm: bool = ..., share_pool: _Optional[str] = ..., max_request_sequences: _Optional[int] = ..., max_request_tokens: _Optional[int] = ..., max_request_blocks: _Optional[int] = ..., store_bytes: _Optional[int] = ..., share_store: _Optional[str] = ..., transfer_protocol: _Optional[str] = ..., transfer_address: _Optional[str] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("num_blocks", "free_blocks", "active_blocks", "shared_blocks", "cached_blocks", "pinned_blocks", "num_swap_blocks", "used_swap_blocks", "sequences", "swapped_sequences", "tokens", "sessions", "prefix_cache_query_tokens", "prefix_cache_hit_tokens", "cow_copies", "swapped_out_blocks", "swapped_in_blocks", "evicted_blocks", "quarantined_blocks")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_SWAP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COW_COPIES_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_OUT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_IN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    free_blocks: int
    active_blocks: int
    shared_blocks: int
    cached_blocks: int
    pinned_blocks: int
    num_swap_blocks: int
    used_swap_blocks: int
    sequences: int
    swapped_sequences: int
    tokens: int
    sessions: int
    prefix_cache_query_tokens: int
    prefix_cache_hit_tokens: int
    cow_copies: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    evicted_blocks: int
    quarantined_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., active_blocks: _Optional[int] = ..., shared_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., num_swap_blocks: _Optional[int] = ..., used_swap_blocks: _Optional[int] = ..., sequences: _Optional[int] = ..., swapped_sequences: _Optional[int] = ..., tokens: _Optional[int] = ..., sessions: _Optional[int] = ..., prefix_cache_query_tokens: _Optional[int] = ..., prefix_cache_hit_tokens: _Optional[int] = ..., cow_copies: _Optional[int] = ..., swapped_out_blocks: _Optional[int] = ..., swapped_in_blocks: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ...) -> None: ...

class PingRequest(_message.Message):
    __slots__ = ("payload",)
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    def __init__(self, payload: _Optional[bytes] = ...) -> None: ...

class PingResponse(_message.Message):
    __slots__ = ("payload",)
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    def __init__(self, payload: _Optional[bytes] = ...) -> None: ...
