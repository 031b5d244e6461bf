"""Conversion between protobuf messages and native values, for client and daemon.

tensors     Tensor messages and token ids as arrays; messages with tensors or blocks without protobuf
status      errors as google.rpc.Status
channels    gRPC channels, in plain text or over TLS
keepalive   how either end notices that the other one is gone

The modules that need gRPC are not imported here: who imports them prepares its environment first.
"""

from kvservice.wire.status import from_reason, from_status, to_status
from kvservice.wire.tensors import (
    Array,
    Encoded,
    encode_tensor,
    fields_of,
    put_tensor,
    put_type,
    split_last_field,
    to_array,
    token_array,
)

__all__ = [
    "Array",
    "Encoded",
    "encode_tensor",
    "fields_of",
    "from_reason",
    "from_status",
    "put_tensor",
    "put_type",
    "split_last_field",
    "to_array",
    "to_status",
    "token_array",
]
