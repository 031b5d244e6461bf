from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class CreateRemoteRegionRequest(_message.Message):
    __slots__ = ("session_token", "name", "byte_size", "remote_bytes", "ports", "address")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTE_SIZE_FIELD_NUMBER: _ClassVar[int]
    REMOTE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PORTS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    name: str
    byte_size: int
    remote_bytes: int
    ports: _containers.RepeatedScalarFieldContainer[int]
    address: int
    def __init__(self, session_token: _Optional[bytes] = ..., name: _Optional[str] = ..., byte_size: _Optional[int] = ..., remote_bytes: _Optional[int] = ..., ports: _Optional[_Iterable[int]] = ..., address: _Optional[int] = ...) -> None: ...

class CreateRemoteRegionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveRemoteRegionRequest(_message.Message):
    __slots__ = ("session_token", "name")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    name: str
    def __init__(self, session_token: _Optional[bytes] = ..., name: _Optional[str] = ...) -> None: ...

class RemoveRemoteRegionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
