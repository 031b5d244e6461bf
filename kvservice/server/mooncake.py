"""The Mooncake Store of the configuration."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

from kvservice.config import ServeConfig
from kvservice.mooncake.listening import PRELOADED, numeric_address
from kvservice.mooncake.options import MooncakeOptions
from kvservice.pool.sealed import SealedMemory
from kvservice.server.listening import ConfigError
from kvservice.tiers import ChildrenPipe, LowerTier
from kvservice.tiers.mooncake import MooncakeTier

_IMPORT_S: Final = 60.0


def check_mooncake(config: ServeConfig) -> None:
    """Raise ConfigError if a Mooncake Store is configured, but its library cannot be used here, or the address is none
    of a host. The library is tried in another process."""
    if not config.mooncake:
        return
    _options(config)
    if not PRELOADED.exists():
        raise ConfigError(f"{PRELOADED} is missing: build the native code again", field="mooncake")
    command = [sys.executable, "-P", "-c", "import mooncake.store"]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"Mooncake's library is not imported within {_IMPORT_S:g} s", field="mooncake") from None
    if tried.returncode:
        reason = (tried.stderr.strip() or f"it ends with {tried.returncode}").splitlines()[-1]
        raise ConfigError(
            f"Mooncake's library cannot be used: {reason}: install kvservice[mooncake], and the libraries that "
            "deploy/README.md names",
            field="mooncake",
        )


def open_mooncake(config: ServeConfig, memory: SealedMemory, children: ChildrenPipe) -> LowerTier:
    """Return the tier. To be called in the event loop."""
    return MooncakeTier.open(_options(config), memory.fd, memory.num_bytes, config.mooncake_segment_gib, children)


def _options(config: ServeConfig) -> MooncakeOptions:
    """Raises ConfigError."""
    try:
        address = numeric_address(config.mooncake_address)
    except OSError as error:
        raise ConfigError(f"{config.mooncake_address}: {error}", field="mooncake_address") from None
    return MooncakeOptions(
        config.mooncake, address, config.mooncake_metadata, config.mooncake_protocol, config.mooncake_device
    )
