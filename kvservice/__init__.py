"""The KV cache as a service: a daemon that owns the paged KV pool and the block tables of a transformer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str


def __getattr__(name: str) -> str:
    """Return `__version__`. Finding it imports more than all of the keeper, which does without."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kvservice")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0+unknown"
