"""The command line, as a user sees it."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvservice.bench import store, store_peers
from kvservice.bench.largest import WITHOUT_MEANING
from kvservice.bench.sending import rpc_name
from kvservice.bench.transports import LABELS, SIZES
from kvservice.config import ServeConfig
from kvservice.launch import Daemon
from kvservice.server.contract import SERVICES

TINY_POOL = {"KVSERVICE_NUM_LAYERS": "1", "KVSERVICE_NUM_BLOCKS": "8", "KVSERVICE_SWAP_SPACE_GIB": "0"}


def kvservice(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "kvservice", *arguments],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=280,  # a benchmark on a busy machine takes minutes
        check=False,
    )


def test_serve_help_explains_every_option() -> None:
    shown = kvservice("serve", "--help")
    assert shown.returncode == 0
    # Lines are also broken at hyphens.
    text = re.sub(r"\s+", "", shown.stdout)
    for name, field in ServeConfig.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert field.description is not None
        assert re.sub(r"\s+", "", field.description) in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("serve", "--blok-size", "4"), "--block-size"),
        (("serve", "--dtype", "int8"), "int8"),
        (("bench", "everything"), "everything"),
        (("health", "--timeout-s", "nan"), "nan is not a number"),
        (("health", "--timeout-s", "0"), "0.0 is not in the range"),
        (("health", "--timeout-s", "-1"), "-1.0 is not in the range"),
        (("top", "--interval", "nan"), "nan is not a number"),
    ],
)
def test_a_wrong_word_is_a_usage_error(arguments: tuple[str, ...], named: str) -> None:
    refused = kvservice(*arguments)
    assert refused.returncode == 2
    assert named in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "environ", "named"),
    [
        (("serve", "--block-size", "12"), {}, "block_size"),
        (("serve",), {"KVSERVICE_BLOK_SIZE": "4"}, "blok_size"),
        (("serve", "--config", "/absent.toml"), {}, "/absent.toml"),
        (("serve", "--unix-socket", "", "--tcp-address", ""), TINY_POOL, "unix_socket, tcp_address"),
        (("serve", "--unix-socket", "/absent/directory/k.sock"), TINY_POOL, "unix_socket"),
        (("serve", "--unix-socket", f"/tmp/{'k' * 103}"), TINY_POOL, "has 108 bytes: the path of a socket has at most"),
        (("serve", "--tcp-address", "192.0.2.1:1", "--insecure"), TINY_POOL, "tcp_address: cannot listen"),
        (("serve", "--tcp-address", "0.0.0.0:1"), TINY_POOL, "tcp_address: other hosts reach 0.0.0.0:1"),
        (("serve", "--tls-cert", "/absent.crt", "--tls-key", "/absent.key"), TINY_POOL, "tls_cert: /absent.crt"),
        (("serve", "--tls-key", "/absent.key"), TINY_POOL, "tls_cert: a certificate and its key go together"),
        (("serve", "--http-token", "short"), TINY_POOL, "http_token: must be 16 to 256 printable characters"),
        (("serve", "--auth-tokens", "/absent"), TINY_POOL, "auth_tokens: /absent"),
        (("serve",), TINY_POOL | {"KVSERVICE_CPU_ISA": "sse9"}, "KVSERVICE_CPU_ISA: unknown instruction set 'sse9'"),
        (("serve", "--device", "cuda:900"), TINY_POOL, "device"),
        (("serve", "--device", "gpu"), TINY_POOL, "device"),
        (("demo", "--device", "gpu"), {}, "device"),
        (("demo", "--device", "cuda:900"), {}, "the daemon did not start: Error: device"),
        (("serve", "--kv-cache-dtype", "fp8"), TINY_POOL, "kv_cache_dtype"),
    ],
)
def test_what_cannot_be_served_is_one_clear_line(
    tmp_path: Path, arguments: tuple[str, ...], environ: dict[str, str], named: str
) -> None:
    private = {"KVSERVICE_UNIX_SOCKET": str(tmp_path / "k.sock"), "KVSERVICE_HTTP_ADDRESS": ""}
    refused = kvservice(*arguments, **(private | environ))
    assert refused.returncode == 1
    assert re.fullmatch(rf"Error: .*{re.escape(named)}.*\n", refused.stderr.splitlines(keepends=True)[-1])
    for foreign in ("Traceback", "Value error", "(default)"):
        assert foreign not in refused.stderr


def test_a_taken_port_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)  # a client in this process has set this variable
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        private = {"KVSERVICE_UNIX_SOCKET": str(tmp_path / "k.sock"), "KVSERVICE_HTTP_ADDRESS": ""}
        refused = kvservice("serve", "--tcp-address", address, "--log-level", "warning", **private, **TINY_POOL)
    assert refused.stderr == f"Error: tcp_address: cannot listen on {address}: Address already in use\n"


def test_a_pool_larger_than_the_memory_is_refused_with_the_numbers(tmp_path: Path) -> None:
    refused = kvservice("serve", "--pool-gib", "60000", "--unix-socket", str(tmp_path / "k.sock"))
    assert refused.returncode == 1
    assert re.search(r"pool_gib: \d+ blocks of 2097152 bytes take \d+ bytes, \d+ are available", refused.stderr)


def test_block_tables_larger_than_the_memory_are_refused(tmp_path: Path) -> None:
    sizes = ("--max-sequences", "1048576", "--max-sequence-tokens", "16777216", "--block-size", "1")
    refused = kvservice("serve", *sizes, "--unix-socket", str(tmp_path / "k.sock"), **TINY_POOL)
    assert refused.returncode == 1
    assert re.search(r"max_sequences: no memory for the block tables of 1048576 sequences", refused.stderr)
    assert "Traceback" not in refused.stderr


def test_health_tells_a_daemon_that_serves_from_none(daemon: Daemon, tmp_path: Path) -> None:
    assert kvservice("health", "--address", daemon.address).returncode == 0
    assert kvservice("health", "--address", f"unix://{tmp_path}/none.sock", "--timeout-s", "1").returncode == 1


def test_bench_blocks_prints_one_json_object() -> None:
    done = kvservice("bench", "blocks", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert {"calibration_s", "append_step_256_s", "allocate_1024_s", "allocate_1024_hit_s", "fork_s"} <= set(results)
    assert all(results[name] > 0 for name in ("append_step_256_s", "allocate_1024_s", "fork_s", "free_s"))


def test_bench_limits_sends_large_requests_of_every_rpc_of_the_contract() -> None:
    done = kvservice("bench", "limits", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert 0 < results["idle"]["ping_p50_s"] <= results["idle"]["ping_max_s"]
    rpcs = {rpc_name(method) for service in SERVICES for method in service.methods}
    rows = results["rows"]
    assert {row["rpc"] for row in rows if row["content"] != WITHOUT_MEANING} == rpcs
    assert {row["rpc"] for row in rows if row["content"] == WITHOUT_MEANING} == rpcs - {"Connect", "Subscribe"}
    # At least one request of every RPC succeeds, except for the registrations of shared memory and of remote memory.
    done_rpcs = {row["rpc"] for row in rows if "OK" in row["statuses"] and row["content"] != WITHOUT_MEANING}
    assert rpcs - done_rpcs == {"SystemSharedMemoryRegister", "CudaSharedMemoryRegister", "CreateRemoteRegion"}


def test_bench_store_prints_one_json_object_with_every_way() -> None:
    done = kvservice("bench", "store", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    ways = [*store.LABELS, *(name for name in store_peers.PEERS if name not in results["missing"])]
    for way, call, size in itertools.product(ways, ("put", "get"), store.SIZES):
        assert results[f"{way}_{call}_{size}_s"] > 0
    for call, count in itertools.product(store.CALLS, store.COUNTS):
        assert results[f"{call}_{count}_s"] > 0
    assert results["echo_s"] > 0


def test_bench_rpc_prints_one_json_object_with_every_call() -> None:
    done = kvservice("bench", "rpc", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    calls = [
        "echo",
        "allocate_1024",
        "append_64",
        "fork",
        "free",
        "decode_16k",
        "decode_256k",
        "decode_2m",
    ]
    for call in calls:
        for way in ("unary", "stream"):
            assert 0 < results[f"{call}_{way}_p50_s"] <= results[f"{call}_{way}_p99_s"]
            assert results[f"{call}_{way}_per_s"] > 0
    by_transport = results["transports"]
    assert by_transport["refused"] == {}
    ways = [f"{way}_{size}" for way in LABELS for size in SIZES]
    for name in ("echo_unary", "echo_stream", "ring", *ways):
        assert 0 < by_transport[f"{name}_p50_s"] <= by_transport[f"{name}_p99_s"]
    watched = results["observers"]
    for name in ("nobody", "scraped", "pages", "events"):
        for call in ("echo", "fork", "append_64"):
            assert 0 < watched[f"{name}_{call}_p50_s"] <= watched[f"{name}_{call}_p99_s"]
