"""The options of a connector, which are part of the engine's configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvservice.errors import InvalidArgumentError


@dataclass(frozen=True)
class ConnectorOptions:
    """The address of the daemon is required."""

    address: str
    """The address of the daemon, the same for all processes of the engine."""
    token: str = ""
    """A file with the client's token."""
    tenant: str = ""
    """The tenant of the sessions. Tenants share no blocks."""
    weights: str = ""
    """The identity of the weights, if the connector cannot find it or finds it too narrow."""
    verify: bool = False
    """Compare checksums when blocks are loaded. A damaged block counts as missing."""
    lookup_timeout_s: float = 0.25
    """The time limit in seconds of a look-up. One that takes longer counts as a miss."""
    transfer_timeout_s: float = 1.0
    """The time limit in seconds of a call that saves or loads."""
    prefill_tokens_per_s: float = 0.0
    """Tokens of prompts that the engine computes in a second: blocks below the daemon's memory are loaded only if that
    is faster. 0: an estimate."""

    @staticmethod
    def of(extra_config: Mapping[str, Any]) -> ConnectorOptions:
        """Raises InvalidArgumentError naming the option."""
        kinds = {field.name: type(field.default) for field in dataclasses.fields(ConnectorOptions)}
        kinds["address"] = str
        for name, value in extra_config.items():
            if name not in kinds:
                raise InvalidArgumentError(f"is not one of {', '.join(kinds)}", field=name)
            most = 1e9 if name == "prefill_tokens_per_s" else 3600
            if kinds[name] is float and not (type(value) in (int, float) and 0 < value < most):
                raise InvalidArgumentError(f"{value!r} is not a number above 0 and below {most:g}", field=name)
            if kinds[name] is bool and not isinstance(value, bool):
                raise InvalidArgumentError(f"{value!r} is neither true nor false", field=name)
            if kinds[name] is str and not isinstance(value, str):
                raise InvalidArgumentError(f"{value!r} is not a text", field=name)
        if not extra_config.get("address"):
            raise InvalidArgumentError("the address of the daemon is missing", field="address")
        return ConnectorOptions(**extra_config)
