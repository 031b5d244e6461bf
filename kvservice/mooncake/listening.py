"""Decides where a process with Mooncake's library listens.

The library binds its ports to all interfaces and has no setting for that. Over TCP whoever connects can read and write
all registered memory. So a preloaded library (csrc/listen) binds them to one address, or to none, and each process
checks the result before it registers memory.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import Final

# Beside the extension, which in a development install is not beside this package. It is not imported: NumPy, which it
# needs, starts threads, and a node blocks signals before there are any.
_EXTENSION: Final = importlib.util.find_spec("kvservice._ext")
PRELOADED: Final = Path((_EXTENSION and _EXTENSION.origin) or __file__).with_name("_ext_listen.so")
VARIABLE: Final = "KVSERVICE_LISTEN_ADDRESS"
NOWHERE: Final = "none"
_LISTENING = "0A"


class ListeningError(Exception):
    """The process listens on an address that it was not told to listen on."""


def numeric_address(host: str) -> str:
    """Return the first numeric address of a host. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


def listening_environment(address: str) -> dict[str, str]:
    """Return the variables for a process that listens on this numeric address only, or NOWHERE."""
    preloaded = [str(PRELOADED), *filter(None, [os.environ.get("LD_PRELOAD")])]
    variables = {"LD_PRELOAD": ":".join(preloaded), VARIABLE: address}
    if ":" in address:
        variables["MC_USE_IPV6"] = "1"
    return variables


def check_listening(address: str) -> None:
    """Raises ListeningError if this process listens on another address than this one, or at all if it is NOWHERE."""
    wanted = None if address == NOWHERE else ipaddress.ip_address(address)
    own = _own_sockets()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[3] == _LISTENING and fields[9] in own:
                local, _, port = fields[1].partition(":")
                found = _parsed(local)
                if found != wanted:
                    raise ListeningError(f"Mooncake listens on {found} port {int(port, 16)}, not on {address} only")


def _own_sockets() -> set[str]:
    """Return the inodes of this process's sockets."""
    own = set()
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
        except FileNotFoundError:  # the descriptor of the scan itself
            continue
        if target.startswith("socket:["):
            own.add(target[len("socket:[") : -1])
    return own


def _parsed(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an address as the kernel prints it: words of 32 bits in the order of this machine's bytes."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
