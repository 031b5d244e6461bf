from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class OpenLaneRequest(_message.Message):
    __slots__ = ("session_token", "request_id")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ...) -> None: ...

class OpenLaneResponse(_message.Message):
    __slots__ = ("handover_token",)
    HANDOVER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    handover_token: bytes
    def __init__(self, handover_token: _Optional[bytes] = ...) -> None: ...

class CloseLaneRequest(_message.Message):
    __slots__ = ("session_token", "request_id")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ...) -> None: ...

class CloseLaneResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MapPoolRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "writable")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WRITABLE_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    writable: bool
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ..., writable: bool = ...) -> None: ...

class MapPoolResponse(_message.Message):
    __slots__ = ("handover_token", "pool_bytes", "table_bytes")
    HANDOVER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    TABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    handover_token: bytes
    pool_bytes: int
    table_bytes: int
    def __init__(self, handover_token: _Optional[bytes] = ..., pool_bytes: _Optional[int] = ..., table_bytes: _Optional[int] = ...) -> None: ...

class UnmapPoolRequest(_message.Message):
    __slots__ = ("session_token", "request_id")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ...) -> None: ...

class UnmapPoolResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "step_id", "layers")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    step_id: int
    layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ..., step_id: _Optional[int] = ..., layers: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
