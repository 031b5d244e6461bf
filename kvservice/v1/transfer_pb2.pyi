from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class CreateRemoteRegionRequest(_message.Message):
    __slots__ = ("session_token", "name", "byte_size")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTE_SIZE_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    name: str
    byte_size: int
    def __init__(self, session_token: _Optional[bytes] = ..., name: _Optional[str] = ..., byte_size: _Optional[int] = ...) -> None: ...

class CreateRemoteRegionResponse(_message.Message):
    __slots__ = ("segment", "address", "byte_size")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BYTE_SIZE_FIELD_NUMBER: _ClassVar[int]
    segment: str
    address: int
    byte_size: int
    def __init__(self, segment: _Optional[str] = ..., address: _Optional[int] = ..., byte_size: _Optional[int] = ...) -> None: ...

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
