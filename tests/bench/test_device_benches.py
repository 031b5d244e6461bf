"""The device's benchmarks without a device: what they refuse, and how they print what they found."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from typing import Any

import click
from click.testing import CliRunner
from each_row import each_row
from rich.console import Console

from kvservice.bench import attention_cuda, cuda_copies
from kvservice.cli import main
from kvservice.environment import missing_environment

DECODE: dict[str, Any] = {
    "name": "decode bf16 32/8x128 64x4096",
    "kind": "decode",
    "us": 262.14,
    "relative_error": 0.0021,
    "gb_per_s": 4096.0,
    "tflop_per_s": None,
    "share_of_copy": 0.963,
    "batch_invariant_us": 271.5,
    "peers": {
        "CUDA cores": {"plan_us": 40.2, "us": 381.0, "relative_error": 0.002},
        "tensor cores": {"plan_us": 61.7, "us": 265.0, "relative_error": 0.002},
    },
    "peer_us": 265.0,
    "speedup": 1.011,
}
EXTEND: dict[str, Any] = DECODE | {
    "name": "extend bf16 32/8x128 1x8192 on 0",
    "kind": "extend",
    "gb_per_s": None,
    "tflop_per_s": 512.0,
    "share_of_copy": None,
    "batch_invariant_us": None,
    "peers": {
        "fa2": {"plan_us": 88.0, "us": 600.0, "relative_error": 0.002},
        "fa3": {"failed": "RuntimeError: not here"},
    },
    "speedup": 0.9,
}
FAILED = {"name": "decode e4m3 32/4x64 1x1024", "failed": "wrong result: relative error 1.41"}
CEILINGS = {"device_copy_gb_per_s": 4255.0, "host_to_device_gb_per_s": 55.4, "device_to_host_gb_per_s": 55.2}
ATTENTION = {
    "device": "NVIDIA H200",
    "torch": "2.11.0",
    "cuda": "13.0",
    "flashinfer": "0.7.2",
    "kernel": "auto",
    "ceilings": CEILINGS,
    "shapes": [DECODE, EXTEND, FAILED],
}
SWAP: dict[str, Any] = {
    "device": "NVIDIA H200",
    "block_bytes": 2 << 20,
    "decode_shape": "decode bf16 32/8x128 64x4096",
    "ceilings": CEILINGS | {"both_gb_per_s": 48.0},
    "gb_per_s": {"swap_out": 52.0, "swap_in": 51.0, "both": 45.6},
    "decode": {
        "alone_us": 262.1,
        "beside_us": 268.4,
        "loss": 0.024,
        "relative_error": 0.002,
        "out_gb_per_s": 44.0,
        "in_gb_per_s": 43.0,
    },
}


# Runs commands one after the other in a process that sees no device, and prints the status and the errors of each.
RUN = """
import json, sys
import click
from click.testing import CliRunner
from kvservice.cli import main
done = [CliRunner().invoke(main, ["bench", *words]) for words in json.loads(sys.argv[1])]
print(json.dumps([(one.exit_code, one.stderr) for one in done]))
"""


def benches(*commands: list[str]) -> list[tuple[int, str]]:
    # Commands would start a process anew without these variables.
    environment = os.environ | missing_environment(os.environ) | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", "-c", RUN, json.dumps(commands)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return [tuple(one) for one in json.loads(done.stdout)]


def test_without_a_device_the_error_says_so() -> None:
    bench = main.commands["bench"]
    assert isinstance(bench, click.Group)
    either = [name for name, one in bench.commands.items() if any(given.name == "device" for given in one.params)]
    commands = [["lane"], ["swap"], ["slots"], *([name, "--device", "cuda"] for name in either if name != "vllm")]
    of_shapes = ["attention", "--device", "cuda", "--shapes", "extend,13x7"]
    *refused, (status, said) = benches(*commands, of_shapes)
    for words, (code, error) in zip(commands, refused, strict=True):
        assert (code, error.count("\n")) == (1, 1), (words, error)
        assert error.startswith("Error: "), words
        assert "no CUDA device" in error or "built without CUDA; `KVSERVICE_CUDA=on" in error, words
    # A shape that does not exist is named before the device is asked.
    assert status == 1
    assert "13x7" in said
    assert "short-prompts" in said


def test_the_cpu_refuses_what_is_the_devices() -> None:
    options = {
        "--vs": "flashinfer", "--shapes": "64x4096", "--random": "3", "--seed": "1", "--kernel": "decode",
        "--batch-invariant": None,
    }  # fmt: skip
    with each_row() as row:
        for option, value in options.items():
            with row(option):
                words = [option] if value is None else [option, value]
                refused = CliRunner().invoke(main, ["bench", "attention", *words])
                assert refused.exit_code == 2
                assert f"{option} needs --device cuda" in refused.stderr


def printed(results: dict[str, Any], render: Any) -> str:
    console = Console(file=io.StringIO(), width=240)
    render(json.loads(json.dumps(results)), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def line_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if start in line)


def test_the_table_of_attention_shows_what_was_found() -> None:
    text = printed(ATTENTION, attention_cuda.render)
    assert "FlashInfer 0.7.2" in text
    decode = line_of(text, DECODE["name"])
    for shown in ("262.1", "4096", "96%", "271.5", "CUDA cores 381.0", "40", "1.01", "2.1e-03"):
        assert shown in decode
    assert "tensor cores 265.0" in text
    assert "512" in line_of(text, EXTEND["name"])
    assert "fa3 RuntimeError: not here" in text
    assert "wrong result" in line_of(text, FAILED["name"])
    assert "2 shapes: speedup 0.95 (geometric mean), 0.90 at least, 1 below 1" in text


def test_a_failed_shape_fails_the_run() -> None:
    assert attention_cuda.failures(ATTENTION) == [f"{FAILED['name']}: {FAILED['failed']}"]


def test_progress_is_one_line_for_each_shape() -> None:
    lines = [attention_cuda.progress_line(shape) for shape in (DECODE, EXTEND, FAILED)]
    assert all("\n" not in line for line in lines)
    assert "262.1 us, 4096 GB/s" in lines[0]
    assert "512 TFLOP/s" in lines[1]
    assert "fa3 failed" in lines[1]
    assert "wrong result" in lines[2]


def test_the_table_of_swapping_shows_what_was_found() -> None:
    text = printed(SWAP, cuda_copies.render_swap)
    assert "52.0" in line_of(text, "swap out")
    assert "94%" in line_of(text, "swap out")
    assert "95%" in line_of(text, "both at once")
    assert "44.0" in line_of(text, "out, beside")
    assert "262.1 us alone, 268.4 us beside swaps both ways: 2.4% lost" in text
