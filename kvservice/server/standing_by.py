"""A new process of the daemon that waits to take over from the running one: all that can be done before."""

from __future__ import annotations

import os

from kvservice.config import ServeConfig
from kvservice.devices import prepare_device
from kvservice.errors import KVServiceError
from kvservice.keeper.standby import Standby
from kvservice.kept import KeptFiles, KeptState
from kvservice.server.core import state_identity
from kvservice.server.credentials import Credentials
from kvservice.server.listening import check_addresses, check_free
from kvservice.server.tiering.tiers import check_mooncake


class StandbyEndedError(Exception):
    """This process does not take over."""


def stand_by(config: ServeConfig, standby: Standby, taken: dict[str, int]) -> dict[str, int]:
    """Check that this process can take over the state whose descriptors are `taken`, and wait until it shall. Returns
    the descriptors that are kept then. Raises StandbyEndedError.

    The state is only read, because its process still runs.
    """
    try:
        refused = _refusal(config, taken)
        if refused:
            standby.refuse(refused)
            raise StandbyEndedError(f"this process cannot take over: {refused}")
        return standby.wait_for_go()
    except EOFError as error:
        raise StandbyEndedError(str(error)) from None
    finally:
        for descriptor in taken.values():
            os.close(descriptor)


def _refusal(config: ServeConfig, taken: dict[str, int]) -> str:
    """Return why this process cannot take over, or an empty text."""
    try:
        check_addresses(config)
        check_mooncake(config)
        check_free(config, taken)
        Credentials(config)
        if refused := KeptState.check(KeptFiles(taken, None), state_identity(config)):
            return refused
        prepare_device(config)
    except KVServiceError as error:
        return str(error)
    return ""
