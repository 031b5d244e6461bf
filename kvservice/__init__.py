"""The KV cache as a service: a daemon that owns the paged KV pool and the block tables of a transformer."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvservice")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"
