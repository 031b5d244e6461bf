"""`kvservice bench`: its commands and their options. Each imports what it measures itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvservice import plain_json
from kvservice.commands import Number, needs, reexec_with_environment
from kvservice.environment import prepare_grpc
from kvservice.errors import KVServiceError

if TYPE_CHECKING:
    from rich.console import Console


@click.group()
def bench() -> None:
    """Benchmarks: bookkeeping, scheduling, serving, clusters, calls, stores, restarts, limits, attention, engines."""


def _report(
    run: Callable[[], dict[str, Any]],
    render: Callable[[dict[str, Any], Console], None],
    as_json: bool,
    failures: Callable[[dict[str, Any]], list[str]] = lambda _: [],
) -> None:
    """Run a benchmark and show its results. Exits with 1 if there are failures in them."""
    try:
        results = run()
    except KVServiceError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(plain_json.dumps(results))
    else:
        from rich.console import Console

        render(results, Console())
    if failed := failures(results):
        raise click.ClickException("; ".join(failed))


def _json_object(text: str | None, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from None
    if not isinstance(value, dict):
        raise click.BadParameter("a JSON object", param_hint=option)
    return value


_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
_device_option = click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
_quick_option = click.option("--quick", is_flag=True, help="Fewer repetitions, for a rough result.")


@bench.command("blocks")
@click.option("--num-blocks", type=click.IntRange(1000, 1 << 24), default=100_000, show_default=True)
@_quick_option
@_json_option
def bench_blocks(num_blocks: int, quick: bool, as_json: bool) -> None:
    """Measure bookkeeping inside one process, in units of a plain Python loop."""
    from kvservice.bench import bookkeeping

    _report(lambda: bookkeeping.run_blocks(num_blocks, quick), bookkeeping.render_blocks, as_json)


@bench.command("schedule")
@click.option("--trace", type=click.Path(exists=True, dir_okay=False), help="JSON file of lengths of requests.")
@_quick_option
@_json_option
def bench_schedule(trace: str | None, quick: bool, as_json: bool) -> None:
    """Measure the scheduler inside one process, in units of a plain Python loop, and replay traces under pressure.

    The traces are made from seeds. A file of --trace has the lists arrival_step, prompt_len and output_len.
    """
    from kvservice.bench import bookkeeping

    _report(lambda: bookkeeping.run_schedule(trace, quick), bookkeeping.render_schedule, as_json)


@bench.command("serve")
@_device_option
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="[default: both; on a CUDA device bfloat16]")
@click.option("--trace", type=click.Path(exists=True, dir_okay=False), help="JSON file of requests, instead of a seed.")
@click.option("--kind", type=click.Choice(["chat", "document", "mixed"]), default="chat", show_default=True)
@click.option("--seed", type=click.IntRange(0, 1 << 32), default=0, show_default=True)
@click.option("--requests", type=click.IntRange(1, 100_000), default=64, show_default=True)
@click.option("--rate", type=Number(0, 1e6), default=0.0, help="Arrivals a second on average; 0: all at once.")
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
    reexec_with_environment()
    with needs("torch"):
        from kvservice.bench import serve
    by_device = ("float32", "bfloat16") if options["device"] == "cpu" else ("bfloat16",)
    settings = serve.ServeOptions(dtypes=by_device if dtype is None else (dtype,), **options)
    _report(lambda: serve.run(settings), serve.render, as_json)


@bench.command("cluster")
@click.option("--trace", type=click.Path(exists=True, dir_okay=False), help="JSON lines in Mooncake's format.")
@click.option("--seed", type=click.IntRange(0, 1 << 32), default=0, show_default=True, help="Of the synthetic trace.")
@click.option("--demand", type=Number(0, 100, min_open=True), default=1.5, help="Tokens asked over computed, a second.")
@click.option("--queue-weight", type=Number(0, 100), default=0.5, show_default=True, help="See PlacementSettings.")
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
    reexec_with_environment()
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
    reexec_with_environment()
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

    _report(lambda: tiers.run_rules(trace, seed), tiers.render_rules, as_json)


@bench.command("remote")
@_quick_option
@_json_option
def bench_remote(quick: bool, as_json: bool) -> None:
    """Measure put and get of the block store over TCP, by Mooncake's Transfer Engine and in messages, against a plain
    socket. Needs kvservice[mooncake]."""
    reexec_with_environment()
    from kvservice.bench import remote

    _report(lambda: remote.run(quick), remote.render, as_json)


@bench.command("mooncake")
@_quick_option
@_json_option
def bench_mooncake(quick: bool, as_json: bool) -> None:
    """Measure puts and gets of the Mooncake tier against those of Mooncake's library alone. Needs
    kvservice[mooncake]."""
    from kvservice.bench import tiers

    _report(lambda: tiers.run_mooncake(quick), tiers.render_mooncake, as_json)


@bench.command("disk")
@click.option("--directory", type=click.Path(exists=True, file_okay=False), default=".", show_default=True)
@click.option("--rounds", type=click.IntRange(1, 100), default=5, show_default=True, help="The median counts.")
@_quick_option
@_json_option
def bench_disk(directory: str, rounds: int, quick: bool, as_json: bool) -> None:
    """Measure the disk tier against fio on the same files, and its start with a million values.

    It needs about 6 GiB of the disk that has the directory, and removes its files afterwards.
    """
    from kvservice.bench import tiers

    options = tiers.DiskBenchOptions(Path(directory), rounds)
    if quick:
        options = tiers.DiskBenchOptions(Path(directory), 1, round_bytes=256 << 20, num_values=50_000)
    _report(lambda: tiers.run_disk(options), tiers.render_disk, as_json)


@bench.command("restart")
@_device_option
@click.option("--num-blocks", type=click.IntRange(32, 1 << 24), help="Blocks of the pool.  [default: 100000]")
@click.option("--gib", type=Number(0, 65_536, min_open=True), help="Size of the pool, instead of --num-blocks.")
@click.option("--rounds", type=click.IntRange(1, 100), default=5, show_default=True, help="The median one counts.")
@_json_option
def bench_restart(num_blocks: int | None, gib: float | None, as_json: bool, **options: Any) -> None:
    """Measure how long a client waits while its daemon is killed and starts again, and while it is upgraded.

    The pool is full of sequences and cached blocks. Its blocks are small on the CPU, 2 MiB on a CUDA device.
    """
    if num_blocks is not None and gib is not None:
        raise click.UsageError("--num-blocks and --gib exclude each other")
    reexec_with_environment()
    from kvservice.bench import restart

    settings = restart.RestartOptions(num_blocks=num_blocks or 100_000, gib=gib, **options)
    _report(lambda: restart.run_restart(settings), restart.render_restart, as_json)


@bench.command("start")
@click.option("--store-gib", type=Number(0.1, 65_536), default=4.0, show_default=True, help="Size of the block store.")
@_json_option
def bench_start(store_gib: float, as_json: bool) -> None:
    """Measure how long a daemon with a block store takes until it serves, and until all memory of the store is there.

    It takes that memory of the host.
    """
    reexec_with_environment()
    from kvservice.bench import restart

    _report(lambda: restart.run_start(restart.StartOptions(store_gib)), restart.render_start, as_json)


@bench.command("vllm")
@_device_option
@click.option("--model", metavar="PATH", help="A model instead of a Llama with 3 billion weights without a meaning.")
@click.option("--connector", "connectors", type=click.Choice(["kvservice", "offloading", "simple"]), multiple=True)
@click.option(
    "--workload", "workloads", type=click.Choice(["chat", "prompts", "found", "cycle", "beside"]), multiple=True
)
@click.option("--pool-gib", type=Number(0, 65_536, min_open=True), help="K/V on the device.  [default: 5; cpu: 0.3]")
@click.option("--store-gib", type=Number(0, 65_536, min_open=True), help="Of each store.  [default: 16; cpu: 2]")
@click.option("--length", "lengths", type=click.IntRange(1, 1_000_000), multiple=True, help="Of the prompts of found.")
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
    if no_engine:
        with needs("torch"):
            from kvservice.bench import vllm_steps
        steps = vllm_steps.StepsOptions.quick() if options["quick"] else vllm_steps.StepsOptions()
        _report(lambda: vllm_steps.run(steps), vllm_steps.render, as_json)
        return
    from kvservice.bench import vllm

    chosen = {name: value for name, value in options.items() if value != ()}
    settings = vllm.VLLMBenchOptions(engine=_json_object(engine, "--engine"), **chosen)
    _report(lambda: vllm.run(settings), vllm.render, as_json, vllm.failures)


@bench.command("sglang")
@click.option("--cache", "caches", type=click.Choice(["hicache", "kvservice"]), multiple=True)
@click.option("--workload", "workloads", type=click.Choice(["found", "prompts", "cycle"]), multiple=True)
@click.option(
    "--host-gb", type=click.IntRange(1, 65_536), default=8, show_default=True, help="Of HiCache over kvservice."
)
@click.option("--store-gb", type=click.IntRange(2, 65_536), default=24, show_default=True, help="Of each store.")
@click.option("--rounds", type=click.IntRange(1, 100), default=1, show_default=True, help="The median one counts.")
@click.option("--check", is_flag=True, help="Compare tokens instead of times.")
@click.option("--engine", metavar="JSON", help="More options of SGLang's Engine, for all engines.")
@click.option("--logs", type=click.Path(file_okay=False), metavar="DIR", help="Keep the logs of the engines here.")
@_quick_option
@_json_option
def bench_sglang(engine: str | None, as_json: bool, **options: Any) -> None:
    """Measure SGLang on a GPU without a host cache, with its own (HiCache), and with kvservice below a small host pool
    of HiCache, on the same bytes of host memory.

    It needs SGLang in the environment, and starts its own daemon. The engines live at the same time and take turns.
    Workloads: found (the first token of one prompt), prompts (nothing is found), cycle (documents that do not fit into
    the pool). Without --cache or --workload all are measured.
    """
    prepare_grpc()
    from kvservice.bench import sglang

    if options["host_gb"] >= options["store_gb"]:
        raise click.BadParameter("must be below --store-gb", param_hint="--host-gb")
    chosen = {name: value for name, value in options.items() if value != ()}
    settings = sglang.SGLangBenchOptions(engine=_json_object(engine, "--engine"), **chosen)
    _report(lambda: sglang.run(settings), sglang.render, as_json, sglang.failures)


@bench.command("limits")
@_quick_option
@_json_option
def bench_limits(quick: bool, as_json: bool) -> None:
    """Measure pings to a real daemon while another client sends the largest request of each RPC."""
    reexec_with_environment()
    from kvservice.bench import limits

    _report(lambda: limits.run_limits(quick), limits.render_limits, as_json)


@bench.command("floods")
@click.option("--kind", "kinds", multiple=True, help="Only these frames, such as PING.  [default: all]")
@click.option("--seconds", type=Number(0.1, 3600), default=4.0, show_default=True, help="Of each flood.")
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True)
@_json_option
def bench_floods(kinds: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Measure pings to a real daemon while 20 connections without a token send HTTP/2 frames that are no calls."""
    reexec_with_environment()
    from kvservice.bench import limits

    if unknown := set(kinds) - {limits.COMPUTING, *limits.FLOODS}:
        raise click.BadParameter(f"not {', '.join(unknown)}: one of {', '.join(limits.FLOODS)}", param_hint="--kind")
    _report(lambda: limits.run_floods(limits.FloodOptions(kinds=kinds, **options)), limits.render_floods, as_json)


@bench.command("soak")
@click.option("--seconds", type=Number(1, 30 * 86400), default=1800.0, show_default=True)
@_json_option
def bench_soak(seconds: float, as_json: bool) -> None:
    """Work with a real daemon for some time, and compare its memory, descriptors and latency at the end with those at
    the beginning. Fails if they have grown."""
    reexec_with_environment()
    from kvservice.bench import soak

    _report(
        lambda: soak.run(seconds), soak.render, as_json, lambda results: [f"grown: {one}" for one in results["grown"]]
    )


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
    chosen = attention_cuda.DeviceBenchOptions(quick=quick, **options)
    _report(lambda: attention_cuda.run(chosen), attention_cuda.render, as_json, attention_cuda.failures)


@bench.command("lane")
@_quick_option
@_json_option
def bench_lane(quick: bool, as_json: bool) -> None:
    """Measure a decode step of 32 layers by a daemon on a CUDA device, in units of its kernels alone."""
    reexec_with_environment()
    with needs("torch"):
        from kvservice.bench import cuda_lane

        _report(lambda: cuda_lane.run(quick), cuda_lane.render, as_json)


@bench.command("slots")
@_quick_option
@_json_option
def bench_slots(quick: bool, as_json: bool) -> None:
    """Check and measure writing new K and V into the pool of a CUDA device, in units of a plain copy."""
    with needs("torch"):
        from kvservice.bench import cuda_copies

    _report(lambda: cuda_copies.run_slots(quick), cuda_copies.render_slots, as_json)


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
        from kvservice.bench import cuda_copies

    _report(lambda: cuda_copies.run_swap(quick), cuda_copies.render_swap, as_json)
