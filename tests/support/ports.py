"""TCP ports of the loopback interface for servers that a test starts later."""

from __future__ import annotations

import random
import socket

# Below the ports of outgoing connections, one of which could take a port between its choice and its use.
CHOICE = range(20_000, 32_000)


def free_port() -> int:
    """A port that nobody listens on. It is drawn at random, so that test processes side by side draw different ones."""
    while True:
        port = random.SystemRandom().choice(CHOICE)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)
