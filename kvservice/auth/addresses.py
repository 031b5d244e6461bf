"""Loopback detection for addresses."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether `host` is reachable from this host only. `host` is an IP address (IPv6 with or without brackets)
    or a name. The only name that counts as loopback is localhost."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
