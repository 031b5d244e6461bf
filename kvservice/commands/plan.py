"""`kvservice plan`: what tiers hold for a model, and whether loading from them is faster than computing again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from kvservice import plain_json
from kvservice.errors import InvalidArgumentError


class _Number(click.FloatRange):
    """A range of finite numbers. click's own accepts nan, and infinity where there is no maximum."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


_GIB, _SPEED = _Number(0, 1 << 30), _Number(0, 1e6, min_open=True)


@click.command()
@click.option("--model", required=True, type=click.Path(exists=True, path_type=Path), help="Directory or config.json.")
@click.option("--gpu", help="a100, b200, h100, h200 or l40s. Without it, give the three figures below.")
@click.option("--gpu-memory-gib", type=_Number(0, 65_536, min_open=True), help="Memory of a GPU, instead of --gpu's.")
@click.option("--gpu-tflops", type=_Number(0, 1e6, min_open=True), help="Peak in bfloat16, without sparsity.")
@click.option("--host-gbps", type=_SPEED, help="Link between host and a GPU, one direction, in 1e9 bytes a second.")
@click.option("--num-gpus", type=click.IntRange(1, 64), default=1, show_default=True, help="Tensor parallel ranks.")
@click.option(
    "--gpu-memory-utilization", type=_Number(0, 1, min_open=True), default=0.9, show_default=True, help="As for serve."
)
@click.option(
    "--kv-cache-dtype", type=click.Choice(["auto", "fp8_e4m3", "fp8_e5m2"]), default="auto", show_default=True
)
@click.option("--block-size", type=click.Choice(["8", "16", "32", "64", "128"]), default="16", show_default=True)
@click.option("--weights-gib", type=_GIB, help="Of all GPUs.  [default: the safetensors files, or an estimate]")
@click.option("--parameters-b", type=_Number(0, 1e6, min_open=True), help="Billions that a token meets.")
@click.option("--store-gib", type=_GIB, default=64.0, show_default=True, help="The block store, host memory.")
@click.option("--disk-gib", type=_GIB, default=0.0, show_default=True)
@click.option("--shared-gib", type=_GIB, default=0.0, show_default=True, help="A store that many hosts share.")
@click.option("--disk-gbps", type=_SPEED, default=5.0, show_default=True, help="Reads, in 1e9 bytes a second.")
@click.option("--shared-gbps", type=_SPEED, default=10.0, show_default=True, help="Reads, in 1e9 bytes a second.")
@click.option("--efficiency", type=_Number(0, 1, min_open=True), default=0.5, show_default=True, help="Of the peak.")
@click.option("--prefill-tokens-per-s", type=_Number(0, 1e9, min_open=True), help="Measured, instead of an estimate.")
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
