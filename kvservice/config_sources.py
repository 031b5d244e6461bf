"""Sources of the daemon's configuration.

The first of these determines a value: command line option, environment variable `KVSERVICE_<FIELD>`, TOML file,
`config.json` of the configured model, default. Unknown keys in the file or the environment are errors.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvservice.auth import open_regular
from kvservice.config import ENV_PREFIX, ServeConfig
from kvservice.errors import InvalidArgumentError, reason_of
from kvservice.model_shape import read_pool_options, snapshot_name

# Variables that are not fields of the configuration. The kernels, the command line, the build, the client commands and
# daemons that a keeper has started read them.
OTHER_ENV = {
    "KVSERVICE_CPU_ISA", "KVSERVICE_CONFIG", "KVSERVICE_CUDA",
    "KVSERVICE_TLS", "KVSERVICE_TLS_CA", "KVSERVICE_CLIENT_CERT", "KVSERVICE_CLIENT_KEY", "KVSERVICE_SERVER_NAME",
    "KVSERVICE_TOKEN", "KVSERVICE_TOKEN_FILE",
    "KVSERVICE_ENDED", "KVSERVICE_ENDED_AT", "KVSERVICE_ENDED_EARLY", "KVSERVICE_RESTARTS", "KVSERVICE_STANDBY",
}  # fmt: skip
# Kubernetes sets these variables in every container of a namespace with a Service named kvservice.
SERVICE_LINK = re.compile(r"KVSERVICE_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\w+)?)")


def load_config(options: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None) -> ServeConfig:
    """Merge the given options, the environment, the file and the configured model into one configuration.

    Raises InvalidArgumentError naming the field and its source.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for source, found in ((str(file), _read_file(file)), ("environment", _read_environ(environ)), ("option", options)):
        values.update(found)
        origin.update(dict.fromkeys(found, source))
    if model := values.get("model"):
        found = asdict(read_pool_options(Path(str(model)))) | {"weights": snapshot_name(Path(str(model)))}
        values = found | values
        origin = dict.fromkeys(found, str(model)) | origin
    config = checked_config(values, origin)
    if config.pool_blocks == 0:
        raise InvalidArgumentError(
            f"no block fits: a block is {config.layout.block_bytes} bytes, pool_gib is {config.pool_gib}",
            field="pool_gib",
        )
    return config


def checked_config(values: Mapping[str, Any], origin: Mapping[str, str] | None = None) -> ServeConfig:
    """Build and validate the configuration. `origin` maps fields to their sources, for error messages.

    Raises InvalidArgumentError naming the field.
    """
    try:
        return ServeConfig.model_validate(values)
    except ValidationError as error:
        field, message = _first_error(error)
        source = f" ({origin[field]})" if origin and field in origin else ""
        raise InvalidArgumentError(message + source, field=field) from None


def _first_error(error: ValidationError) -> tuple[str, str]:
    """Return (field, message) of the first error. If several fields conflict, the message starts with the field's
    name."""
    first = error.errors()[0]
    if first["type"] == "extra_forbidden":
        field = str(first["loc"][0])
        return field, f"unknown option{_suggestion(field)}"
    # pydantic puts this prefix before the messages of our validators.
    said = first["msg"].removeprefix("Value error, ")
    if first["type"] == "string_pattern_mismatch":
        right = ServeConfig.model_fields[str(first["loc"][0])].examples or ()
        said = f"{first['input']!r} does not have the form of {' or '.join(right)}"
    if first["loc"]:
        return str(first["loc"][0]), said
    field, _, message = said.partition(": ")
    return field, message


def _suggestion(name: str) -> str:
    similar = difflib.get_close_matches(name.lower().replace("-", "_"), ServeConfig.model_fields, n=1)
    return f", did you mean {similar[0]}?" if similar else ""


def _read_file(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        with open_regular(file) as stream:
            found = tomllib.load(stream)
    except (OSError, ValueError, RecursionError) as error:
        # tomllib raises ValueError for what is no TOML, and for very long numbers.
        raise InvalidArgumentError(f"{file}: {reason_of(error)}", field="config") from None
    for name, value in found.items():
        if (field := ServeConfig.model_fields.get(name)) is not None:
            _check_kind(name, value, field.annotation, file)
    return found


def _check_kind(name: str, value: Any, kind: Any, file: Path) -> None:
    """Raise InvalidArgumentError for a value of TOML that has another type than the option. pydantic would convert it,
    as it must for the texts of the environment."""
    if kind is bool:
        is_right, wanted = isinstance(value, bool), "true or false"
    elif kind in (int, int | None):
        is_right, wanted = type(value) is int, "a whole number"
    elif kind is float:
        is_right, wanted = type(value) in (int, float), "a number"
    else:
        is_right, wanted = isinstance(value, str), "a text"
    if not is_right:
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        raise InvalidArgumentError(f"must be {wanted}, not {shown} ({file})", field=name)


def _read_environ(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name.removeprefix(ENV_PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX) and name not in OTHER_ENV and not SERVICE_LINK.fullmatch(name)
    }
