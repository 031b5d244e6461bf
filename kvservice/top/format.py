"""Compact formatting of figures for people."""

from __future__ import annotations

_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400
NOTHING = "-"


def count(value: float) -> str:
    """Format a count, exactly below a million."""
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= factor:
            return f"{value / factor:,.2f}{unit}"
    return f"{round(value):,}"


def rate(value: float) -> str:
    """Format a count per second, with one decimal below 10."""
    return f"{value:.1f}" if 0 < value < 10 else count(value)


def size(num_bytes: float) -> str:
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:,.1f} TiB"


def latency(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def age(seconds: float) -> str:
    whole = int(seconds)
    minutes, hours, days = whole // _MINUTE_S % 60, whole // _HOUR_S % 24, whole // _DAY_S
    if days:
        return f"{days}d {hours:02}h"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def share(part: float | None) -> str:
    """Format a fraction of 1 in per cent. Only exact values show as 100 % and 0 %."""
    if part is None:
        return NOTHING
    if 0 < part < 1:
        return f"{min(max(part * 100, 0.1), 99.9):.1f} %"
    return f"{part * 100:.0f} %"


def printable(text: str) -> str:
    """Return a client's text without control characters, which could move the cursor or change colours."""
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text)
