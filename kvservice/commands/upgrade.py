"""The commands of an operator to the keeper: `kvservice upgrade` has a process of the installed version take over, and
`kvservice reset` lets go of the state."""

from __future__ import annotations

import os
from pathlib import Path

import click

from kvservice.config import ENV_PREFIX
from kvservice.config_sources import load_config
from kvservice.errors import KVServiceError
from kvservice.keeper.control import ControlSocketError, ask
from kvservice.keeper.private_paths import control_path

RESET_S = 10.0


@click.command()
@click.option("--unix-socket", help="The daemon's unix socket.  [default: what serve would listen on]")
@click.option(
    "--timeout-s",
    type=click.FloatRange(1, 86400),
    default=300.0,
    show_default=True,
    help="Seconds that each part of the upgrade may take before this command gives up waiting.",
)
def upgrade(unix_socket: str | None, timeout_s: float) -> None:
    """Replace the running daemon by a process of the installed version, with all K/V and sessions.

    The new process starts beside the old one and checks that it can take over. Then the old one finishes its calls and
    hands over. If the new process cannot take over, the old one goes on serving, and the exit status is 1. SIGHUP to
    the process of `kvservice serve` does the same.
    """
    try:
        for answer in ask(_keeper_of(unix_socket, "send SIGHUP to it instead"), "upgrade", timeout_s):
            if answer["event"] == "progress":
                click.echo(answer["message"], err=True)
            elif answer["ok"]:
                click.echo(answer["message"])
            else:
                raise click.ClickException(answer["message"])
    except ControlSocketError as error:
        raise click.ClickException(str(error)) from None


@click.command()
@click.option("--unix-socket", help="The daemon's unix socket.  [default: what serve would listen on]")
@click.option("--yes", is_flag=True, help="Do not ask.")
def reset(unix_socket: str | None, yes: bool) -> None:
    """Start the daemon empty: all sessions and K/V that its keeper holds are lost.

    It is the last resort for a daemon that cannot start with the state of the process before. A daemon that serves is
    killed. Addresses stay the daemon's.
    """
    path = _keeper_of(unix_socket, "stop it, and start it again")
    if not yes:
        click.confirm("All sessions and K/V of the daemon are lost. Go on?", abort=True)
    try:
        for answer in ask(path, "reset", RESET_S):
            click.echo(answer["message"])
    except ControlSocketError as error:
        raise click.ClickException(str(error)) from None


def _keeper_of(unix_socket: str | None, otherwise: str) -> str:
    """Return the path of the keeper's control socket. `otherwise` is what to do if there can be none."""
    path = control_path(_configured_socket() if unix_socket is None else unix_socket)
    if not path:
        raise click.ClickException(f"the daemon's keeper is found by its unix socket: {otherwise}")
    return path


def _configured_socket() -> str:
    file = os.environ.get(f"{ENV_PREFIX}CONFIG")
    try:
        return load_config({}, os.environ, Path(file) if file else None).unix_socket
    except KVServiceError as error:
        raise click.ClickException(str(error)) from None
