"""How a process joins a Mooncake Store."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from kvservice import plain_json

# Mooncake's word for metadata that its processes ask each other for.
PEER_TO_PEER = "P2PHANDSHAKE"


@dataclass(frozen=True)
class MooncakeOptions:
    """`master` and `metadata` are addresses of servers; `address` is a numeric address of this host. `device` names the
    RDMA devices, separated by commas."""

    master: str
    address: str = "127.0.0.1"
    metadata: str = PEER_TO_PEER
    protocol: str = "tcp"
    device: str = ""

    def to_json(self) -> str:
        return plain_json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> MooncakeOptions:
        return cls(**json.loads(text))
