"""Commands share this: numbers, the configuration, the environment, packages that only some need, and the options of
those that connect to a daemon over TCP. Commands with much of their own are modules here."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from kvservice.auth.client import NO_CREDENTIALS, ClientCredentials, TLSConfig, target_of
from kvservice.config import ENV_PREFIX, ServeConfig
from kvservice.config_sources import load_config
from kvservice.environment import missing_environment
from kvservice.errors import CallTimeoutError, ConnectionLostError, KVServiceError, reason_of


class Number(click.FloatRange):
    """A range of finite numbers. click's own accepts nan, and infinity where there is no maximum."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def configuration(options: dict[str, Any], file: str | None) -> ServeConfig:
    """Return the configuration of a daemon that is started with these options here. Raises ClickException."""
    try:
        return load_config(options, os.environ, Path(file) if file else None)
    except KVServiceError as error:
        raise click.ClickException(str(error)) from None


def usual_configuration() -> ServeConfig:
    """Return the configuration of a daemon that is started without options here. Raises ClickException."""
    return configuration({}, os.environ.get(f"{ENV_PREFIX}CONFIG"))


def reexec_with_environment(missing_of: Callable[[Mapping[str, str]], dict[str, str]] = missing_environment) -> None:
    """Execute this process again if variables are missing in its environment, which malloc and the dynamic linker read
    only at exec."""
    if missing := missing_of(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | missing)


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Report a missing package as an error of the user, with the extra of kvservice that has it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "kvservice":
            raise
        message = f"the package {error.name} is missing; `pip install '.[{extra}]'` in kvservice's source installs it"
        raise click.ClickException(message) from None


# ---- options of commands that connect to a daemon over TCP


_FILE = click.Path(dir_okay=False)
_OPTIONS = (
    click.option("--tls", is_flag=True, envvar="KVSERVICE_TLS", show_envvar=True, help="Use TLS with public CAs."),
    click.option(
        "--tls-ca",
        type=_FILE,
        envvar="KVSERVICE_TLS_CA",
        show_envvar=True,
        help="Use TLS with the CA in this PEM file.",
    ),
    click.option(
        "--client-cert", type=_FILE, envvar="KVSERVICE_CLIENT_CERT", show_envvar=True, help="PEM file: certificate."
    ),
    click.option("--client-key", type=_FILE, envvar="KVSERVICE_CLIENT_KEY", show_envvar=True, help="PEM file: key."),
    click.option(
        "--server-name",
        default="",
        envvar="KVSERVICE_SERVER_NAME",
        show_envvar=True,
        help="Name in the daemon's certificate, if it differs from the host of the address.",
    ),
    click.option(
        "--token-file",
        type=_FILE,
        envvar="KVSERVICE_TOKEN_FILE",
        show_envvar=True,
        help="File with the token. Alternatively, KVSERVICE_TOKEN in the environment is the token itself.",
    ),
)


@dataclass(frozen=True)
class Presented:
    """The values of the options. They apply to TCP; a unix socket needs no credentials."""

    tls: TLSConfig | None
    token: str = field(repr=False)

    def at(self, address: str | None) -> ClientCredentials:
        """Return the credentials for an address, None for a private daemon. Raises InvalidArgumentError."""
        if address is None or target_of(address).startswith("unix:"):
            return NO_CREDENTIALS
        return ClientCredentials.for_address(address, self.tls, self.token)


def connection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command, which gets a Presented as its argument `presented`."""

    @functools.wraps(command)
    def with_credentials(**given: Any) -> Any:
        names = ("tls", "tls_ca", "client_cert", "client_key", "server_name", "token_file")
        try:
            presented = _presented(*(given.pop(name) for name in names))
        except KVServiceError as error:
            raise click.ClickException(str(error)) from None
        return command(presented=presented, **given)

    for option in reversed(_OPTIONS):
        with_credentials = option(with_credentials)
    return with_credentials


def failed(address: str, error: KVServiceError) -> click.ClickException:
    """Return what a command says that a daemon has refused, or that no daemon has answered."""
    is_refused = error.status not in (ConnectionLostError.status, CallTimeoutError.status)
    return click.ClickException(f"{address} refuses: {error}" if is_refused else f"no answer from {address}: {error}")


def _presented(
    tls: bool, ca: str | None, cert: str | None, key: str | None, server_name: str, token_file: str | None
) -> Presented:
    config = TLSConfig(ca, cert, key, server_name) if tls or ca or cert or key or server_name else None
    if token_file is None:
        return Presented(config, os.environ.get("KVSERVICE_TOKEN", "").strip())
    try:
        with open(token_file, encoding="ascii") as stream:
            return Presented(config, stream.read().strip())
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{token_file}: {reason_of(error)}") from None
