"""The command line. The options of `serve` are generated from the fields of ServeConfig.

Each command imports its heavy dependencies itself, and gRPC only after its environment is set.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from kvservice import __version__, plain_json
from kvservice.commands.connection import Presented, connection_options, failed
from kvservice.commands.extras import needs
from kvservice.commands.generate import generate
from kvservice.commands.plan import plan
from kvservice.commands.tenants import tenants
from kvservice.commands.token import token
from kvservice.commands.upgrade import reset, upgrade
from kvservice.config import ENV_PREFIX, ServeConfig, home_folder
from kvservice.config_sources import load_config
from kvservice.environment import missing_environment, prepare_grpc
from kvservice.errors import KVServiceError
from kvservice.keeper.keeper import KeeperSettings, become_keeper
from kvservice.keeper.notify import report_failure, report_version
from kvservice.keeper.private_paths import control_path

if TYPE_CHECKING:
    from rich.console import Console

    from kvservice.demo import DemoResult, TiersResult


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


class _Finite(click.FloatRange):
    """A range of numbers. click's own range accepts nan."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


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


def _reexec_with(environment: dict[str, str]) -> None:
    """Execute this process again with these variables, because malloc reads its environment only at exec."""
    if environment:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | environment)


def _settings(options: dict[str, Any], file: str | None) -> ServeConfig:
    try:
        return load_config(options, os.environ, Path(file) if file else None)
    except KVServiceError as error:
        raise click.ClickException(str(error)) from None


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
    settings = _settings({name: value for name, value in options.items() if value is not None}, config)
    if settings.unix_socket and os.path.dirname(settings.unix_socket) == home_folder():
        _make_private(settings.unix_socket)
    missing = missing_environment(os.environ)
    if settings.keeper and not os.environ.get("NOTIFY_SOCKET"):
        become_keeper(_keeper_settings(settings), os.environ | missing)
    _reexec_with(missing)
    report_version(__version__)
    gc.disable()  # imports leave little garbage, and clients wait for the end of the start; see freeze_heap
    from kvservice.server.daemon import run

    return run(settings)


main.add_command(generate)
main.add_command(plan)
main.add_command(token)
main.add_command(tenants)
main.add_command(upgrade)
main.add_command(reset)
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
    _settings({"device": device}, None)
    _reexec_with(missing_environment(os.environ))
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


@main.command()
@click.option("--address", help="unix:///path/of.sock or host:port.  [default: what serve would listen on]")
@click.option("--timeout-s", type=_Finite(0, 3600, min_open=True), default=5.0, show_default=True)
@connection_options
def health(address: str | None, timeout_s: float, presented: Presented) -> None:
    """Exit with 0 if the daemon serves, with 1 if not.

    Print what the daemon has to do without, for example a disk that is suspended because it fails.
    """
    prepare_grpc()
    from kvservice.health import address_of, ask

    where = address or address_of(_settings({}, os.environ.get(f"{ENV_PREFIX}CONFIG")))
    try:
        answer = ask(where, timeout_s, presented.at(where))
    except KVServiceError as error:
        raise click.ClickException(str(error)) from None
    if answer.note:
        click.echo(answer.note)
    if answer.reason:
        raise click.ClickException(f"not serving: {answer.reason}")


@main.command()
@click.option("--address", help="unix:///path/of.sock or host:port.  [default: what serve would listen on]")
@click.option("--interval", type=_Finite(0.1, 3600), default=1.0, show_default=True, help="Seconds between updates.")
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
    from kvservice.health import address_of, door_of
    from kvservice.top import SORT_KEYS, TopOptions, run

    if sort not in SORT_KEYS:
        raise click.BadParameter(f"one of {', '.join(SORT_KEYS)}", param_hint="--sort")
    where = address or address_of(_settings({}, os.environ.get(f"{ENV_PREFIX}CONFIG")))
    if not where:
        raise click.UsageError("--address is needed: the configuration opens no gRPC address")
    try:
        run(TopOptions(door_of(where), interval, once, as_json, sort, search, presented.at(where)))
    except KVServiceError as error:
        raise failed(where, error) from None


@main.group()
def bench() -> None:
    """Benchmarks: bookkeeping, scheduling, serving, clusters, calls, stores, restarts, limits, attention, vLLM."""


def _report(
    run: Callable[[], dict[str, Any]], render: Callable[[dict[str, Any], Console], None], as_json: bool
) -> None:
    try:
        results = run()
    except KVServiceError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(plain_json.dumps(results))
        return
    from rich.console import Console

    render(results, Console())


_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
_device_option = click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
_quick_option = click.option("--quick", is_flag=True, help="Fewer repetitions, for a rough result.")


@bench.command("blocks")
@click.option("--num-blocks", type=click.IntRange(1000, 1 << 24), default=100_000, show_default=True)
@_quick_option
@_json_option
def bench_blocks(num_blocks: int, quick: bool, as_json: bool) -> None:
    """Measure bookkeeping inside one process, in units of a plain Python loop."""
    from kvservice.bench import blocks

    _report(lambda: blocks.run(num_blocks, quick), blocks.render, as_json)


@bench.command("schedule")
@click.option("--trace", type=click.Path(exists=True, dir_okay=False), help="JSON file of lengths of requests.")
@_quick_option
@_json_option
def bench_schedule(trace: str | None, quick: bool, as_json: bool) -> None:
    """Measure the scheduler inside one process, in units of a plain Python loop, and replay traces under pressure.

    The traces are made from seeds. A file of --trace has the lists arrival_step, prompt_len and output_len.
    """
    from kvservice.bench import schedule

    _report(lambda: schedule.run(trace, quick), schedule.render, as_json)


@bench.command("serve")
@_device_option
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="[default: both; on a CUDA device bfloat16]")
@click.option("--trace", type=click.Path(exists=True, dir_okay=False), help="JSON file of requests, instead of a seed.")
@click.option("--kind", type=click.Choice(["chat", "document", "mixed"]), default="chat", show_default=True)
@click.option("--seed", type=click.IntRange(0, 1 << 32), default=0, show_default=True)
@click.option("--requests", type=click.IntRange(1, 100_000), default=64, show_default=True)
@click.option("--rate", type=_Finite(0, 1e6), default=0.0, help="Arrivals a second on average; 0: all at once.")
@click.option("--num-blocks", type=click.IntRange(160, 1 << 24), default=2048, show_default=True, help="Of 16 tokens.")
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="The median one counts.")
@click.option("--plot", type=click.Path(dir_okay=False, writable=True), help="Also write charts to this SVG file.")
@_quick_option
@_json_option
def bench_serve(dtype: str | None, as_json: bool, **options: Any) -> None:
    """Measure an engine that serves many requests at once against the ways of transformers, with the same model.

    On the CPU the model has 4 layers, on a CUDA device 1.3 billion parameters; the weights are random. The requests are
    made from a seed, or read from a file: a JSON object with the list "requests" of objects with "prompt" (token ids),
    "out" (tokens to generate) and, if they do not come all at once, "arrival_s".
    """
    _reexec_with(missing_environment(os.environ))
    with needs("torch"):
        from kvservice.bench import serve
    by_device = ("float32", "bfloat16") if options["device"] == "cpu" else ("bfloat16",)
    settings = serve.ServeOptions(dtypes=by_device if dtype is None else (dtype,), **options)
    _report(lambda: serve.run(settings), serve.render, as_json)


@bench.command("cluster")
@click.option("--trace", type=click.Path(exists=True, dir_okay=False), help="JSON lines in Mooncake's format.")
@click.option("--seed", type=click.IntRange(0, 1 << 32), default=0, show_default=True, help="Of the synthetic trace.")
@click.option(
    "--demand", type=_Finite(0, 100, min_open=True), default=1.5, help="Tokens asked over computed, a second."
)
@click.option("--queue-weight", type=_Finite(0, 100), default=0.5, show_default=True, help="See PlacementSettings.")
@click.option("--plot", type=click.Path(dir_okay=False, writable=True), help="Also write a chart to this SVG file.")
@_quick_option
@_json_option
def bench_cluster(as_json: bool, **options: Any) -> None:
    """Simulate the placement of requests over 1, 8 and 64 daemons, against other policies and upper bounds.

    The trace is made from a seed: shared system prompts, conversations of several turns. Or it is read from a file.
    """
    from kvservice.bench import cluster

    settings = cluster.ClusterBenchOptions(**options)
    _report(lambda: cluster.run(settings), cluster.render, as_json)


@bench.command("rpc")
@_device_option
@_quick_option
@_json_option
@click.option("--tenants", type=click.IntRange(1, 1000), help="Compare daemons with so many tenants and without any.")
def bench_rpc(device: str, quick: bool, as_json: bool, tenants: int | None) -> None:
    """Measure calls to a real daemon on a unix socket, in units of an echo.

    Also measure the call of one layer with every transport (inline messages, shared memory, a lane, the mapped pool),
    and the same work without a daemon.
    """
    _reexec_with(missing_environment(os.environ))
    from kvservice.bench import rpc

    if tenants is not None:
        _report(lambda: rpc.run_tenants(tenants, quick), rpc.render_tenants, as_json)
        return
    with needs("torch"):
        _report(lambda: rpc.run(quick, device), rpc.render, as_json)


@bench.command("store")
@_device_option
@_quick_option
@_json_option
def bench_store(device: str, quick: bool, as_json: bool) -> None:
    """Measure put and get of the block store against memcpy, and its calls in units of an echo.

    Also measure Redis with the same keys and values, if redis-server and the package redis are installed. On a CUDA
    device, measure the vLLM connector's copies between blocks on the device and the store, against the link.
    """
    _reexec_with(missing_environment(os.environ))
    if device == "cuda":
        with needs("torch"):
            from kvservice.bench import cuda_store

        _report(lambda: cuda_store.run(quick), cuda_store.render, as_json)
        return
    from kvservice.bench import store

    _report(lambda: store.run(quick), store.render, as_json)


@bench.command("tiers")
@click.option("--trace", type=click.Path(exists=True, dir_okay=False), help="Also a trace of Mooncake, JSON lines.")
@click.option("--seed", type=click.IntRange(0, 1 << 32), default=0, show_default=True)
@_json_option
def bench_tiers(trace: str | None, seed: int, as_json: bool) -> None:
    """Simulate which values of the block store are worth writing to a disk below it: hits against bytes written.

    The trace is made from a seed. Mooncake publishes others in FAST25-release/traces.
    """
    from kvservice.bench import tiers

    _report(lambda: tiers.run(trace, seed), tiers.render, as_json)


@bench.command("remote")
@_quick_option
@_json_option
def bench_remote(quick: bool, as_json: bool) -> None:
    """Measure put and get of the block store over TCP, by Mooncake's Transfer Engine and in messages, against a plain
    socket. Needs kvservice[mooncake]."""
    _reexec_with(missing_environment(os.environ))
    from kvservice.bench import remote

    _report(lambda: remote.run(quick), remote.render, as_json)


@bench.command("mooncake")
@_quick_option
@_json_option
def bench_mooncake(quick: bool, as_json: bool) -> None:
    """Measure puts and gets of the Mooncake tier against those of Mooncake's library alone. Needs
    kvservice[mooncake]."""
    from kvservice.bench import mooncake_tier

    _report(lambda: mooncake_tier.run(quick), mooncake_tier.render, as_json)


@bench.command("disk")
@click.option("--directory", type=click.Path(exists=True, file_okay=False), default=".", show_default=True)
@click.option("--rounds", type=click.IntRange(1, 100), default=5, show_default=True, help="The median counts.")
@_quick_option
@_json_option
def bench_disk(directory: str, rounds: int, quick: bool, as_json: bool) -> None:
    """Measure the disk tier against fio on the same files, and its start with a million values.

    It needs about 6 GiB of the disk that has the directory, and removes its files afterwards.
    """
    from kvservice.bench import disk

    options = disk.DiskBenchOptions(Path(directory), rounds)
    if quick:
        options = disk.DiskBenchOptions(Path(directory), 1, round_bytes=256 << 20, num_values=50_000)
    _report(lambda: disk.run(options), disk.render, as_json)


@bench.command("restart")
@_device_option
@click.option("--num-blocks", type=click.IntRange(32, 1 << 24), help="Blocks of the pool.  [default: 100000]")
@click.option("--gib", type=_Finite(0, 65_536, min_open=True), help="Size of the pool, instead of --num-blocks.")
@click.option("--rounds", type=click.IntRange(1, 100), default=5, show_default=True, help="The median one counts.")
@_json_option
def bench_restart(num_blocks: int | None, gib: float | None, as_json: bool, **options: Any) -> None:
    """Measure how long a client waits while its daemon is killed and starts again, and while it is upgraded.

    The pool is full of sequences and cached blocks. Its blocks are small on the CPU, 2 MiB on a CUDA device.
    """
    if num_blocks is not None and gib is not None:
        raise click.UsageError("--num-blocks and --gib exclude each other")
    _reexec_with(missing_environment(os.environ))
    from kvservice.bench import restart

    settings = restart.RestartOptions(num_blocks=num_blocks or 100_000, gib=gib, **options)
    _report(lambda: restart.run(settings), restart.render, as_json)


@bench.command("start")
@click.option("--store-gib", type=_Finite(0.1, 65_536), default=4.0, show_default=True, help="Size of the block store.")
@_json_option
def bench_start(store_gib: float, as_json: bool) -> None:
    """Measure how long a daemon with a block store takes until it serves, and until all memory of the store is there.

    It takes that memory of the host.
    """
    _reexec_with(missing_environment(os.environ))
    from kvservice.bench import start

    _report(lambda: start.run(start.StartOptions(store_gib)), start.render, as_json)


@bench.command("vllm")
@_device_option
@click.option("--model", metavar="PATH", help="A model instead of a Llama with 3 billion weights without a meaning.")
@click.option("--connector", "connectors", type=click.Choice(["kvservice", "offloading", "simple"]), multiple=True)
@click.option(
    "--workload", "workloads", type=click.Choice(["chat", "prompts", "found", "cycle", "beside"]), multiple=True
)
@click.option("--pool-gib", type=_Finite(0, 65_536, min_open=True), help="K/V on the device.  [default: 5; cpu: 0.3]")
@click.option("--store-gib", type=_Finite(0, 65_536, min_open=True), help="Of each store.  [default: 16; cpu: 2]")
@click.option("--share-store", type=click.Choice(["read", "auto"]), default="auto", show_default=True)
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="The median one counts.")
@click.option("--check", is_flag=True, help="Compare tokens instead of times, where vLLM is batch-invariant.")
@click.option("--no-engine", is_flag=True, help="Only what kvservice's connector takes of a step, without vLLM.")
@click.option("--engine", metavar="JSON", help="More options of vLLM's LLM, for all engines.")
@click.option("--logs", type=click.Path(file_okay=False), metavar="DIR", help="Keep the logs of the engines here.")
@_quick_option
@_json_option
def bench_vllm(engine: str | None, no_engine: bool, as_json: bool, **options: Any) -> None:
    """Measure vLLM without a connector, with kvservice's and with its own OffloadingConnector and
    SimpleCPUOffloadConnector, on the same bytes of host memory.

    It needs vLLM in the environment, and starts its own daemon. The engines live at the same time and take turns.
    Workloads: chat (nothing is found, requests are preempted), prompts (nothing is found), found (the first token of
    one prompt), cycle (documents that do not fit into the pool), beside (the first token of small requests beside
    loads).
    Without --connector or --workload all are measured.
    With --no-engine, a stand-in for vLLM's scheduler admits prompts and takes the times of the connector's calls. Of
    the other options, only --quick and --json count then.
    """
    prepare_grpc()
    from kvservice.bench import vllm, vllm_steps

    if no_engine:
        steps = vllm_steps.StepsOptions.quick() if options["quick"] else vllm_steps.StepsOptions()
        _report(lambda: vllm_steps.run(steps), vllm_steps.render, as_json)
        return
    try:
        more = json.loads(engine or "{}")
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--engine") from None
    if not isinstance(more, dict):
        raise click.BadParameter("a JSON object", param_hint="--engine")
    chosen = {name: value for name, value in options.items() if value != ()}
    failed: list[str] = []

    def run() -> dict[str, Any]:
        results = vllm.run(vllm.VLLMBenchOptions(engine=more, **chosen))
        failed.extend(vllm.failures(results))
        return results

    _report(run, vllm.render, as_json)
    if failed:
        raise click.ClickException("; ".join(failed))


@bench.command("limits")
@_quick_option
@_json_option
def bench_limits(quick: bool, as_json: bool) -> None:
    """Measure pings to a real daemon while another client sends the largest request of each RPC."""
    _reexec_with(missing_environment(os.environ))
    from kvservice.bench import limits

    _report(lambda: limits.run(quick), limits.render, as_json)


@bench.command("floods")
@click.option("--kind", "kinds", multiple=True, help="Only these frames, such as PING.  [default: all]")
@click.option("--seconds", type=_Finite(0.1, 3600), default=4.0, show_default=True, help="Of each flood.")
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True)
@_json_option
def bench_floods(kinds: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Measure pings to a real daemon while 20 connections without a token send HTTP/2 frames that are no calls."""
    _reexec_with(missing_environment(os.environ))
    from kvservice.bench import floods

    if unknown := set(kinds) - {floods.COMPUTING, *floods.FLOODS}:
        raise click.BadParameter(f"not {', '.join(unknown)}: one of {', '.join(floods.FLOODS)}", param_hint="--kind")
    _report(lambda: floods.run(floods.FloodOptions(kinds=kinds, **options)), floods.render, as_json)


@bench.command("soak")
@click.option("--seconds", type=_Finite(1, 30 * 86400), default=1800.0, show_default=True)
@_json_option
def bench_soak(seconds: float, as_json: bool) -> None:
    """Work with a real daemon for some time, and compare its memory, descriptors and latency at the end with those at
    the beginning. Fails if they have grown."""
    _reexec_with(missing_environment(os.environ))
    from kvservice.bench import soak

    grown: list[str] = []

    def run() -> dict[str, Any]:
        results = soak.run(seconds)
        grown.extend(results["grown"])
        return results

    _report(run, soak.render, as_json)
    if grown:
        raise click.ClickException(f"grown: {', '.join(grown)}")


@bench.command("attention")
@_device_option
@click.option("--vs", type=click.Choice(["flashinfer"]), help="cuda: also measure this library, if it is installed.")
@click.option(
    "--shapes",
    default="",
    help="cuda: only these families, and shapes with these words in their names; comma-separated.",
)
@click.option("--random", type=click.IntRange(1, 10000), metavar="N", help="cuda: N shapes drawn at random.")
@click.option("--seed", type=click.IntRange(0), default=0, help="cuda: another seed draws other shapes.")
@click.option("--kernel", type=click.Choice(["auto", "reference", "decode", "extend"]), default="auto", help="cuda.")
@click.option("--batch-invariant", is_flag=True, help="cuda: also measure the cost of batch-invariant results.")
@_quick_option
@_json_option
def bench_attention(device: str, quick: bool, as_json: bool, **options: Any) -> None:
    """Check and measure paged attention.

    On the CPU it is compared with the machine's read bandwidth, and with torch on contiguous K/V; on a CUDA device with
    the device's copy bandwidth, and with FlashInfer.
    """
    if device == "cuda":
        _bench_cuda(quick, as_json, options)
        return
    given = [name for name, value in options.items() if value and (name, value) != ("kernel", "auto")]
    if given:
        raise click.UsageError(f"--{given[0].replace('_', '-')} needs --device cuda")
    from kvservice.bench import attention

    _report(lambda: attention.run(device, quick), attention.render, as_json)


def _bench_cuda(quick: bool, as_json: bool, options: dict[str, Any]) -> None:
    with needs("torch"):
        from kvservice.bench import attention_cuda
    failed: list[str] = []

    def run() -> dict[str, Any]:
        results = attention_cuda.run(attention_cuda.DeviceBenchOptions(quick=quick, **options))
        failed.extend(attention_cuda.failures(results))
        return results

    _report(run, attention_cuda.render, as_json)
    if failed:
        raise click.ClickException("; ".join(failed))


@bench.command("lane")
@_quick_option
@_json_option
def bench_lane(quick: bool, as_json: bool) -> None:
    """Measure a decode step of 32 layers by a daemon on a CUDA device, in units of its kernels alone."""
    _reexec_with(missing_environment(os.environ))
    with needs("torch"):
        from kvservice.bench import lane_cuda

        _report(lambda: lane_cuda.run(quick), lane_cuda.render, as_json)


@bench.command("slots")
@_quick_option
@_json_option
def bench_slots(quick: bool, as_json: bool) -> None:
    """Check and measure writing new K and V into the pool of a CUDA device, in units of a plain copy."""
    with needs("torch"):
        from kvservice.bench import cuda_slots

    _report(lambda: cuda_slots.run(quick), cuda_slots.render, as_json)


@bench.command("spill")
@_device_option
@click.option(
    "--directory", type=click.Path(exists=True, file_okay=False), help="Where the disk tier is.  [default: /tmp]"
)
@_quick_option
@_json_option
def bench_spill(device: str, directory: str | None, quick: bool, as_json: bool) -> None:
    """Measure a prompt whose blocks left the pool: loading them from the store or the disk against computing them."""
    with needs("torch"):
        from kvservice.bench import spill

        _report(lambda: spill.run(device, quick, directory), spill.render, as_json)


@bench.command("swap")
@_quick_option
@_json_option
def bench_swap(quick: bool, as_json: bool) -> None:
    """Measure swapping of blocks between a CUDA device and pinned memory, alone and during a decode."""
    with needs("torch"):
        from kvservice.bench import swap

    _report(lambda: swap.run(quick), swap.render, as_json)
