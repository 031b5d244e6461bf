from kvservice.v1 import store_pb2 as _store_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SubscribeRequest(_message.Message):
    __slots__ = ("start_number", "daemon_id")
    START_NUMBER_FIELD_NUMBER: _ClassVar[int]
    DAEMON_ID_FIELD_NUMBER: _ClassVar[int]
    start_number: int
    daemon_id: int
    def __init__(self, start_number: _Optional[int] = ..., daemon_id: _Optional[int] = ...) -> None: ...

class KVEventBatch(_message.Message):
    __slots__ = ("number", "ts", "events", "daemon_id", "gap")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    DAEMON_ID_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    number: int
    ts: float
    events: _containers.RepeatedCompositeFieldContainer[KVEvent]
    daemon_id: int
    gap: Gap
    def __init__(self, number: _Optional[int] = ..., ts: _Optional[float] = ..., events: _Optional[_Iterable[_Union[KVEvent, _Mapping]]] = ..., daemon_id: _Optional[int] = ..., gap: _Optional[_Union[Gap, _Mapping]] = ...) -> None: ...

class Gap(_message.Message):
    __slots__ = ("first_number", "count")
    FIRST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    first_number: int
    count: int
    def __init__(self, first_number: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class KVEvent(_message.Message):
    __slots__ = ("block_stored", "block_removed", "all_blocks_cleared", "store_blocks_stored", "store_blocks_removed", "store_cleared")
    BLOCK_STORED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_REMOVED_FIELD_NUMBER: _ClassVar[int]
    ALL_BLOCKS_CLEARED_FIELD_NUMBER: _ClassVar[int]
    STORE_BLOCKS_STORED_FIELD_NUMBER: _ClassVar[int]
    STORE_BLOCKS_REMOVED_FIELD_NUMBER: _ClassVar[int]
    STORE_CLEARED_FIELD_NUMBER: _ClassVar[int]
    block_stored: BlockStored
    block_removed: BlockRemoved
    all_blocks_cleared: AllBlocksCleared
    store_blocks_stored: StoreBlocksStored
    store_blocks_removed: StoreBlocksRemoved
    store_cleared: StoreCleared
    def __init__(self, block_stored: _Optional[_Union[BlockStored, _Mapping]] = ..., block_removed: _Optional[_Union[BlockRemoved, _Mapping]] = ..., all_blocks_cleared: _Optional[_Union[AllBlocksCleared, _Mapping]] = ..., store_blocks_stored: _Optional[_Union[StoreBlocksStored, _Mapping]] = ..., store_blocks_removed: _Optional[_Union[StoreBlocksRemoved, _Mapping]] = ..., store_cleared: _Optional[_Union[StoreCleared, _Mapping]] = ...) -> None: ...

class BlockStored(_message.Message):
    __slots__ = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "medium")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENT_BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    parent_block_hash: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_size: int
    medium: str
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ..., parent_block_hash: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., block_size: _Optional[int] = ..., medium: _Optional[str] = ...) -> None: ...

class BlockRemoved(_message.Message):
    __slots__ = ("block_hashes", "medium")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    medium: str
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ..., medium: _Optional[str] = ...) -> None: ...

class AllBlocksCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StoreBlocksStored(_message.Message):
    __slots__ = ("namespace", "tenant", "keys")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace: _store_pb2.StoreNamespace
    tenant: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, namespace: _Optional[_Union[_store_pb2.StoreNamespace, _Mapping]] = ..., tenant: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class StoreBlocksRemoved(_message.Message):
    __slots__ = ("namespace", "tenant", "keys")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace: _store_pb2.StoreNamespace
    tenant: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, namespace: _Optional[_Union[_store_pb2.StoreNamespace, _Mapping]] = ..., tenant: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class StoreCleared(_message.Message):
    __slots__ = ("namespace", "tenant")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    namespace: _store_pb2.StoreNamespace
    tenant: str
    def __init__(self, namespace: _Optional[_Union[_store_pb2.StoreNamespace, _Mapping]] = ..., tenant: _Optional[str] = ...) -> None: ...
