"""The command line. The options of `serve` are generated from the fields of ServeConfig.

Each command imports its heavy dependencies itself, and gRPC only after its environment is set.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from kvservice import __version__, plain_json
from kvservice.auth import tokens
from kvservice.auth.client import target_of
from kvservice.commands import (
    Number,
    Presented,
    configuration,
    connection_options,
    failed,
    needs,
    reexec_with_environment,
    usual_configuration,
)
from kvservice.commands.bench import bench
from kvservice.commands.generate import generate
from kvservice.config import ENV_PREFIX, ServeConfig, home_folder
from kvservice.environment import missing_of_daemon, prepare_grpc
from kvservice.errors import InvalidArgumentError, KVServiceError
from kvservice.keeper.control import ControlSocketError
from kvservice.keeper.control import ask as ask_keeper
from kvservice.keeper.keeper import KeeperSettings, become_keeper
from kvservice.keeper.notify import report_failure, report_version
from kvservice.keeper.private_paths import control_path

if TYPE_CHECKING:
    from kvservice.demo import DemoResult, TiersResult


ADDRESS_HELP = "unix:///path/of.sock, /path/of.sock or host:port.  [default: what serve would listen on]"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def main() -> None:
    """The KV cache as a service."""
    _open_closed_streams()


def _open_closed_streams() -> None:
    """Put the null device in place of standard streams that the caller has closed. Otherwise Python has none, and the
    next file that is opened gets the number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  open until the end


def _option(name: str, field: FieldInfo) -> click.Option:
    default = "" if field.default is PydanticUndefined else f"  [default: {field.default}]"
    if field.default_factory is not None:
        default = f"  [default: {field.get_default(call_default_factory=True)}]"
    flags = f"--{name.replace('_', '-')}"
    kind: Any = str
    if field.annotation is bool:
        flags += f"/--no-{name.replace('_', '-')}"
        kind = bool
    elif typing.get_origin(field.annotation) is typing.Literal:
        kind = click.Choice(typing.get_args(field.annotation))
    text = f"{field.description}{default if field.default is not None else ''}"
    return click.Option([flags, name], type=kind, default=None, help=text, metavar=_metavar(field))


def _metavar(field: FieldInfo) -> str | None:
    names = {int: "INTEGER", float: "NUMBER", str: "TEXT", int | None: "INTEGER"}
    return names.get(field.annotation)  # type: ignore[arg-type]


def _keeper_settings(settings: ServeConfig) -> KeeperSettings:
    """Return the settings of a keeper that starts the daemon with the command line of this process."""
    command = (sys.executable, *sys.orig_argv[1:])
    path = control_path(settings.unix_socket)
    return KeeperSettings(command, path, settings.drain_timeout_s, settings.log_level, settings.log_format)


def _make_private(unix_socket: str) -> None:
    from kvservice.keeper.private_paths import private_folder

    try:
        private_folder(Path(unix_socket).parent)
    except OSError as error:
        raise click.ClickException(f"unix_socket: {unix_socket}: {error.strerror}") from None


def _serve(config: str | None, **options: Any) -> None:
    try:
        sys.exit(_served(config, options))
    except Exception as error:
        report_failure(str(error))
        if isinstance(error, KVServiceError):
            raise click.ClickException(str(error)) from None
        raise


def _served(config: str | None, options: dict[str, Any]) -> int:
    """Run the daemon, or the keeper in place of this process. Returns the exit status."""
    settings = configuration({name: value for name, value in options.items() if value is not None}, config)
    if settings.unix_socket and os.path.dirname(settings.unix_socket) == home_folder():
        _make_private(settings.unix_socket)
    missing = missing_of_daemon(os.environ)
    if settings.keeper and not os.environ.get("NOTIFY_SOCKET"):
        become_keeper(_keeper_settings(settings), os.environ | missing)
    reexec_with_environment(missing_of_daemon)
    report_version(__version__)
    gc.disable()  # imports leave little garbage, and clients wait for the end of the start; see freeze_heap
    from kvservice.server.daemon import run

    return run(settings)


main.add_command(
    click.Command(
        "serve",
        callback=_serve,
        params=[
            click.Option(
                ["--config"],
                type=click.Path(dir_okay=False),
                envvar=f"{ENV_PREFIX}CONFIG",
                help="TOML file with these options as keys, underscores for hyphens.",
            ),
            *(_option(name, field) for name, field in ServeConfig.model_fields.items()),
        ],
        help="Run the daemon until SIGTERM, which drains it.\n\nEvery option can also be set as "
        f"{ENV_PREFIX}<OPTION> in the environment, or as a key of a TOML file. An option wins over the environment, "
        "the environment over the file.",
    )
)


@main.command()
@click.option("--device", default="cpu", show_default=True, help="Device of the pool: cpu, cuda or cuda:N.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--address", help="Use this daemon instead of starting one: its pool must have the demo model's shape.")
@click.option("--tiers", is_flag=True, help="K/V that go down to a disk, and come back to a daemon started anew.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@connection_options
def demo(device: str, dtype: str, address: str | None, tiers: bool, as_json: bool, presented: Presented) -> None:
    """Generate with a small Llama whose K/V are in a daemon, and compare every token with the library's own cache.

    In bfloat16, where rounding can change tokens, it compares the logits. The model computes on the CPU.
    """
    if tiers and (address or dtype != "float32"):
        raise click.UsageError("--tiers starts its own daemons, for float32")
    configuration({"device": device}, None)
    reexec_with_environment()
    with needs("demo"):
        from kvservice.demo import run, run_tiers
    from rich.console import Console

    try:
        if tiers:
            result: DemoResult | TiersResult = run_tiers(device=device, console=Console(), quiet=as_json)
        else:
            result = run(
                address=address,
                device=device,
                dtype=dtype,
                console=Console(),
                quiet=as_json,
                credentials=presented.at(address),
            )
    except KVServiceError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(plain_json.dumps(result.to_json()))
    if result.problems:
        raise click.ClickException("; ".join(result.problems))


def _daemon_address(given: str | None) -> str:
    """Return gRPC's target of the given address, or of a daemon with the usual configuration. Raises ClickException."""
    from kvservice.health import address_of

    where = address_of(usual_configuration()) if given is None else given
    if given is None and not where:
        raise click.UsageError("--address is needed: the configuration opens no gRPC address")
    try:
        return target_of(where)
    except InvalidArgumentError as error:
        raise click.ClickException(str(error)) from None


@main.command()
@click.option("--address", help=ADDRESS_HELP)
@click.option("--timeout-s", type=Number(0, 3600, min_open=True), default=5.0, show_default=True)
@connection_options
def health(address: str | None, timeout_s: float, presented: Presented) -> None:
    """Exit with 0 if the daemon serves, with 1 if not.

    Print what the daemon has to do without, for example a disk that is suspended because it fails.
    """
    prepare_grpc()
    from kvservice.health import ask

    where = _daemon_address(address)
    try:
        answer = ask(where, timeout_s, presented.at(where))
    except KVServiceError as error:
        raise click.ClickException(str(error)) from None
    if answer.note:
        click.echo(answer.note)
    if answer.reason:
        raise click.ClickException(f"not serving: {answer.reason}")


@main.command()
@click.option("--address", help=ADDRESS_HELP)
@click.option("--interval", type=Number(0.1, 3600), default=1.0, show_default=True, help="Seconds between updates.")
@click.option("--once", is_flag=True, help="Print one snapshot and exit.")
@click.option("--json", "as_json", is_flag=True, help="With --once: one JSON object instead of tables.")
@click.option("--sort", default="blocks", show_default=True, help="Column to sort by, in the tables that have it.")
@click.option("--filter", "search", default="", help="Only sessions and sequences with this in a name, tenant or id.")
@connection_options
def top(
    address: str | None, interval: float, once: bool, as_json: bool, sort: str, search: str, presented: Presented
) -> None:
    """Show the pool, its sessions and sequences, and the calls, until q is pressed.

    It needs no session and changes nothing. It exits with 1 if no daemon answers.
    """
    if as_json and not once:
        raise click.UsageError("--json needs --once")
    if not once and not sys.stdout.isatty():
        raise click.UsageError("standard output is not a terminal: --once prints one snapshot")
    from kvservice.health import door_of
    from kvservice.top import SORT_KEYS, TopOptions, run

    if sort not in SORT_KEYS:
        raise click.BadParameter(f"one of {', '.join(SORT_KEYS)}", param_hint="--sort")
    where = _daemon_address(address)
    try:
        run(TopOptions(door_of(where), interval, once, as_json, sort, search, presented.at(where)))
    except KVServiceError as error:
        raise failed(where, error) from None


@main.command()
@click.option("--address", help=ADDRESS_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@connection_options
def tenants(address: str | None, as_json: bool, presented: Presented) -> None:
    """Show what the tenants of the daemon use, and their quotas.

    An observer sees its own tenant, an admin all of them, as does the daemon's user on the same host. Quotas are in the
    file of the option tenants.
    """
    from rich.console import Console
    from rich.table import Table

    from kvservice.health import door_of
    from kvservice.top.source import Source, to_json

    where = _daemon_address(address)

    async def asked() -> list[dict[str, object]]:
        async with Source(door_of(where), presented.at(where)) as source:
            return [to_json(tenant) for tenant in (await source.first_snapshot()).tenants]

    try:
        found = asyncio.run(asked())
    except KVServiceError as error:
        raise failed(where, error) from None
    if as_json:
        click.echo(plain_json.dumps({"tenants": found}))
        return
    if not found:
        click.echo("The daemon has one tenant: see the option tenants.")
        return
    table = Table("tenant", "of", "used", "quota", "refused", box=None)
    for column in table.columns[2:]:
        column.justify = "right"
    for tenant in found:
        quotas: list[dict[str, float]] = tenant["quotas"]  # type: ignore[assignment]  # as the contract says
        for one in quotas:
            quota = "" if one["value"] is None else f"{one['value']:,.12g}"
            table.add_row(str(tenant["name"]), str(one["limit"]), f"{one['used']:,.0f}", quota, f"{one['refused']:,}")
    console = Console()
    (console if console.is_terminal else Console(width=100)).print(table)


# ---- commands of an operator to the keeper: a process of the installed version takes over, or the state is let go of


RESET_S = 10.0
_socket_option = click.option("--address", "--unix-socket", help=ADDRESS_HELP)


@main.command()
@_socket_option
@click.option(
    "--timeout-s",
    type=click.FloatRange(1, 86400),
    default=300.0,
    show_default=True,
    help="Seconds that each part of the upgrade may take before this command gives up waiting.",
)
def upgrade(address: str | None, timeout_s: float) -> None:
    """Replace the running daemon by a process of the installed version, with all K/V and sessions.

    The new process starts beside the old one and checks that it can take over. Then the old one finishes its calls and
    hands over. If the new process cannot take over, the old one goes on serving, and the exit status is 1. SIGHUP to
    the process of `kvservice serve` does the same.
    """
    try:
        for answer in ask_keeper(_keeper_of(address, "send SIGHUP to it instead"), "upgrade", timeout_s):
            if answer["event"] == "progress":
                click.echo(answer["message"], err=True)
            elif answer["ok"]:
                click.echo(answer["message"])
            else:
                raise click.ClickException(answer["message"])
    except ControlSocketError as error:
        raise click.ClickException(str(error)) from None


@main.command()
@_socket_option
@click.option("--yes", is_flag=True, help="Do not ask.")
def reset(address: str | None, yes: bool) -> None:
    """Start the daemon empty: all sessions and K/V that its keeper holds are lost.

    It is the last resort for a daemon that cannot start with the state of the process before. A daemon that serves is
    killed. Addresses stay the daemon's.
    """
    path = _keeper_of(address, "stop it, and start it again")
    if not yes:
        click.confirm("All sessions and K/V of the daemon are lost. Go on?", abort=True)
    try:
        for answer in ask_keeper(path, "reset", RESET_S):
            click.echo(answer["message"])
    except ControlSocketError as error:
        raise click.ClickException(str(error)) from None


def _keeper_of(address: str | None, otherwise: str) -> str:
    """Return the path of the keeper's control socket. `otherwise` is what to do if there can be none."""
    kind, _, path = ("" if address == "" else _daemon_address(address)).partition(":")
    control = control_path(path.removeprefix("//")) if kind == "unix" else ""
    if not control:
        raise click.ClickException(f"the daemon's keeper is found by its unix socket: {otherwise}")
    return control


# ---- tokens


F = TypeVar("F", bound=Callable[..., Any])

_file_option: Callable[[F], F] = click.option(
    "--file",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="KVSERVICE_AUTH_TOKENS",
    required=True,
    show_envvar=True,
    help="The token file, the daemon's --auth-tokens.",
)


@main.group()
def token() -> None:
    """Create, list and remove the tokens with which clients authenticate.

    A token file holds names and hashes, but no tokens. The daemon reloads it when it changes.
    """


@token.command("new")
@click.argument("name")
@_file_option
def new_token(name: str, file: Path) -> None:
    """Create a token for NAME, add its hash to the file, and print it.

    The token is printed only once and is not stored.
    """
    try:
        made = tokens.add_token(file, name)
    except KVServiceError as error:
        raise click.ClickException(str(error)) from None
    click.echo(made)


@token.command("list")
@_file_option
def list_tokens(file: Path) -> None:
    """Print the names in the file."""
    try:
        identities = list(tokens.parse(tokens.load(file), file))
    except KVServiceError as error:
        raise click.ClickException(str(error)) from None
    for identity in identities:
        click.echo(identity.name)


@token.command("remove")
@click.argument("name")
@_file_option
def remove_token(name: str, file: Path) -> None:
    """Remove the token of NAME from the file.

    The daemon closes the streams that were opened with it, and refuses further calls.
    """
    try:
        tokens.remove_token(file, name)
    except KVServiceError as error:
        raise click.ClickException(str(error)) from None


# ---- plans


_GIB, _SPEED = Number(0, 1 << 30), Number(0, 1e6, min_open=True)


@main.command()
@click.option("--model", required=True, type=click.Path(exists=True, path_type=Path), help="Directory or config.json.")
@click.option("--gpu", help="a100, b200, h100, h200 or l40s. Without it, give the three figures below.")
@click.option("--gpu-memory-gib", type=Number(0, 65_536, min_open=True), help="Memory of a GPU, instead of --gpu's.")
@click.option("--gpu-tflops", type=Number(0, 1e6, min_open=True), help="Peak in bfloat16, without sparsity.")
@click.option("--host-gbps", type=_SPEED, help="Link between host and a GPU, one direction, in 1e9 bytes a second.")
@click.option("--num-gpus", type=click.IntRange(1, 64), default=1, show_default=True, help="Tensor parallel ranks.")
@click.option(
    "--gpu-memory-utilization", type=Number(0, 1, min_open=True), default=0.9, show_default=True, help="As for serve."
)
@click.option(
    "--kv-cache-dtype", type=click.Choice(["auto", "fp8_e4m3", "fp8_e5m2"]), default="auto", show_default=True
)
@click.option("--block-size", type=click.Choice(["8", "16", "32", "64", "128"]), default="16", show_default=True)
@click.option("--weights-gib", type=_GIB, help="Of all GPUs.  [default: the safetensors files, or an estimate]")
@click.option("--parameters-b", type=Number(0, 1e6, min_open=True), help="Billions that a token meets.")
@click.option("--store-gib", type=_GIB, default=64.0, show_default=True, help="The block store, host memory.")
@click.option("--disk-gib", type=_GIB, default=0.0, show_default=True)
@click.option("--shared-gib", type=_GIB, default=0.0, show_default=True, help="A store that many hosts share.")
@click.option("--disk-gbps", type=_SPEED, default=5.0, show_default=True, help="Reads, in 1e9 bytes a second.")
@click.option("--shared-gbps", type=_SPEED, default=10.0, show_default=True, help="Reads, in 1e9 bytes a second.")
@click.option("--efficiency", type=Number(0, 1, min_open=True), default=0.5, show_default=True, help="Of the peak.")
@click.option("--prefill-tokens-per-s", type=Number(0, 1e9, min_open=True), help="Measured, instead of an estimate.")
@click.option("--trace", type=click.Path(exists=True, dir_okay=False), help="JSON lines in Mooncake's format.")
@click.option("--trace-block-size", type=click.IntRange(1, 1 << 16), default=512, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(1, 1 << 24), default=4096, show_default=True, help="No --trace.")
@click.option("--session-tokens", type=click.IntRange(1, 1 << 24), default=8192, show_default=True, help="No --trace.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def plan(trace: str | None, trace_block_size: int, as_json: bool, **given: Any) -> None:
    """Plan the tiers for a model: what each holds, and whether loading from it is faster than computing again.

    A trace adds how much of its prompts each capacity finds. Its lines have timestamp, input_length, output_length and
    hash_ids, one number for each block of a prompt.
    """
    from kvservice.planning import PlanOptions, find_gpu, make_plan, read_trace, render, to_json

    try:
        gpu = find_gpu(given.pop("gpu"), given.pop("gpu_memory_gib"), given.pop("gpu_tflops"), given.pop("host_gbps"))
        parameters_b = given.pop("parameters_b")
        options = PlanOptions(
            gpu=gpu,
            block_size=int(given.pop("block_size")),
            parameters=None if parameters_b is None else parameters_b * 1e9,
            disk_gb_per_s=given.pop("disk_gbps"),
            shared_gb_per_s=given.pop("shared_gbps"),
            **given,
        )
        made = make_plan(options, None if trace is None else read_trace(trace, trace_block_size))
    except InvalidArgumentError as error:
        raise click.BadParameter(error.message, param_hint=f"--{error.field.replace('_', '-')}") from None
    if as_json:
        click.echo(plain_json.dumps(to_json(made)))
        return
    from rich.console import Console

    render(made, Console())


main.add_command(generate)
main.add_command(bench)
