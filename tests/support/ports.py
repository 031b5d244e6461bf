"""Free TCP ports of the loopback interface, for servers that a test starts later."""

from __future__ import annotations

import random
import socket

# Below the ephemeral ports, so that no outgoing connection takes a port between its choice and its use.
CHOICE = range(20_000, 32_000)


def free_port() -> int:
    """Return a random free port, so that parallel test processes use different ones."""
    while True:
        port = random.SystemRandom().choice(CHOICE)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def free_ports(count: int) -> list[int]:
    """Return different free ports."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)
