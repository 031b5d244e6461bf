"""The options of a connector, which are part of the engine's configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvservice.errors import InvalidArgumentError


@dataclass(frozen=True)
class ConnectorOptions:
    """The address of the daemon is required. A connector with more options inherits from this."""

    # The numbers that are not limited to above 0 and below 3600: the largest value is below the second. A first of -1
    # allows 0.
    LIMITS: ClassVar[dict[str, tuple[float, float]]] = {"prefill_tokens_per_s": (0, 1e9)}

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

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> Self:
        """Raises InvalidArgumentError naming the option."""
        kinds = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        kinds["address"] = str
        for name, value in extra_config.items():
            if name not in kinds:
                raise InvalidArgumentError(f"is not one of {', '.join(kinds)}", field=name)
            least, most = cls.LIMITS.get(name, (0, 3600))
            is_number = type(value) in (int, float) and (0 <= value < most if least < 0 else least < value < most)
            if kinds[name] is float and not is_number:
                what = f"above {least:g}" if least >= 0 else "from 0"
                raise InvalidArgumentError(f"{value!r} is not a number {what} and below {most:g}", field=name)
            if kinds[name] is bool and not isinstance(value, bool):
                raise InvalidArgumentError(f"{value!r} is neither true nor false", field=name)
            if kinds[name] is str and not isinstance(value, str):
                raise InvalidArgumentError(f"{value!r} is not a text", field=name)
        if not extra_config.get("address"):
            raise InvalidArgumentError("the address of the daemon is missing", field="address")
        return cls(**extra_config)
