"""Whether other hosts reach an address."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this host reaches `host`, an IP address (IPv6 with or without brackets) or a name. Of names only
    localhost is known to be loopback."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
