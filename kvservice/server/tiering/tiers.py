"""The tiers below the block store that the configuration names."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Final

from kvservice.config import GIB, ServeConfig
from kvservice.errors import InvalidArgumentError
from kvservice.keeper.private_paths import private_folder
from kvservice.mooncake.listening import PRELOADED, numeric_address
from kvservice.mooncake.options import MooncakeOptions
from kvservice.owned import OwnedProcess
from kvservice.pool.sealed import SealedMemory
from kvservice.server.loop import Clock, SystemClock
from kvservice.store import BlockStore
from kvservice.tiers import ChildrenPipe, DiskOptions, DiskTier, LateTier, LowerTier, TierChain, TierError, WritePolicy
from kvservice.tiers.mooncake import MooncakeTier


def open_chain(
    config: ServeConfig,
    blocks: BlockStore,
    memory: SealedMemory,
    children: ChildrenPipe,
    clock: Clock | None = None,
) -> TierChain | None:
    """Return the chain of tiers below the block store, or None if the configuration names none. Tiers open in the
    background: values in them are misses until then."""
    clock = clock or SystemClock()
    tiers = _tiers(config, memory, children, clock)
    # Other daemons find in the Mooncake Store at once what one has computed.
    policies = {"disk": WritePolicy(config.disk_admission), "mooncake": WritePolicy(soon=True)}
    return TierChain(blocks, tiers, clock, policies) if tiers else None


def _tiers(config: ServeConfig, memory: SealedMemory, children: ChildrenPipe, clock: Clock) -> list[LowerTier]:
    """Return the tiers in the order in which they are asked: the fastest first."""
    tiers: list[LowerTier] = []
    if config.disk_gib:
        tiers.append(LateTier("disk", functools.partial(_disk, config, memory), clock))
    if config.mooncake:
        tiers.append(open_mooncake(config, memory, children))
    return tiers


def _disk(config: ServeConfig, memory: SealedMemory) -> DiskTier:
    """Raises TierError, also while another process has the directory."""
    directory = Path(config.disk) / "values"
    try:
        private_folder(directory)
    except OSError as error:
        raise TierError(f"{directory}: {error.strerror}") from None
    options = DiskOptions(directory, int(config.disk_gib * GIB), num_threads=config.disk_threads)
    return DiskTier(options, memory.address, memory.num_bytes)


# ---- the Mooncake Store

_IMPORT_S: Final = 60.0


def check_mooncake(config: ServeConfig) -> None:
    """Raise InvalidArgumentError if a Mooncake Store is configured, but its library cannot be used here, or the address
    is none of a host. The library is tried in another process."""
    if not config.mooncake:
        return
    _options(config)
    if not PRELOADED.exists():
        raise InvalidArgumentError(f"{PRELOADED} is missing: build the native code again", field="mooncake")
    command = [sys.executable, "-P", "-c", "import mooncake.store"]
    with OwnedProcess(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as tried:
        try:
            errors = tried.communicate(timeout=_IMPORT_S)[1].decode(errors="replace").strip()
        except subprocess.TimeoutExpired:
            tried.kill()
            raise InvalidArgumentError(
                f"Mooncake's library is not imported within {_IMPORT_S:g} s", field="mooncake"
            ) from None
    if tried.returncode:
        reason = (errors or f"it ends with {tried.returncode}").splitlines()[-1]
        raise InvalidArgumentError(
            f"Mooncake's library cannot be used: {reason}: install kvservice[mooncake], and the libraries that "
            "deploy/README.md names",
            field="mooncake",
        )


def open_mooncake(config: ServeConfig, memory: SealedMemory, children: ChildrenPipe) -> LowerTier:
    """Return the tier. To be called in the event loop."""
    return MooncakeTier.open(_options(config), memory.fd, memory.num_bytes, config.mooncake_segment_gib, children)


def _options(config: ServeConfig) -> MooncakeOptions:
    """Raises InvalidArgumentError."""
    try:
        address = numeric_address(config.mooncake_address)
    except OSError as error:
        raise InvalidArgumentError(f"{config.mooncake_address}: {error}", field="mooncake_address") from None
    return MooncakeOptions(
        config.mooncake, address, config.mooncake_metadata, config.mooncake_protocol, config.mooncake_device
    )
