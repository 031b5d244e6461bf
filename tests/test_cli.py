"""The command line, as a user sees it."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from each_row import each_row
from waiting import until

from kvservice.cli import main
from kvservice.config import ServeConfig
from kvservice.keeper import why_unusable
from kvservice.launch import Daemon

TINY_POOL = {"KVSERVICE_NUM_LAYERS": "1", "KVSERVICE_NUM_BLOCKS": "8", "KVSERVICE_SWAP_SPACE_GIB": "0"}


def kvservice(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "kvservice", *arguments],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_serve_help_explains_every_option() -> None:
    shown = CliRunner().invoke(main, ["serve", "--help"])
    assert shown.exit_code == 0
    # Lines are also broken at hyphens.
    text = re.sub(r"\s+", "", shown.stdout)
    for name, field in ServeConfig.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert field.description is not None
        assert re.sub(r"\s+", "", field.description) in text


def test_an_interrupt_while_the_command_is_imported_ends_it_without_a_word(tmp_path: Path) -> None:
    """Also where the tests were started with the signal ignored."""
    (tmp_path / "click.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(1000)\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "kvservice", "health"],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        signal.signal(signal.SIGINT, former)
        assert command.stdout is not None
        assert command.stdout.readline() == "importing\n"
        command.send_signal(signal.SIGINT)
        assert command.communicate(timeout=60) == ("", "")
    assert command.returncode == -signal.SIGINT


def test_a_private_daemon_has_short_paths_in_a_deep_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as TMPDIR on the machines of a cluster: the path of a socket has at most 107 bytes."""
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = Daemon(num_blocks=8).log.parent
    assert folder.parent == Path("/tmp")
    assert len(f"{folder}/kvservice.sock.keeper") <= 107
    until(lambda: not folder.exists())


def test_a_wrong_word_is_a_usage_error() -> None:
    wrong = {
        ("serve", "--blok-size", "4"): "--block-size",
        ("serve", "--dtype", "int8"): "int8",
        ("bench", "everything"): "everything",
        ("health", "--timeout-s", "nan"): "nan is not a finite number",
        ("health", "--timeout-s", "0"): "0.0 is not in the range",
        ("health", "--timeout-s", "-1"): "-1.0 is not in the range",
        ("top", "--interval", "nan"): "nan is not a finite number",
    }
    with each_row() as row:
        for arguments, named in wrong.items():
            with row(arguments):
                refused = CliRunner().invoke(main, arguments)
                assert refused.exit_code == 2
                assert named in refused.stderr


def test_a_socket_in_the_home_directory_has_a_private_folder(tmp_path: Path) -> None:
    folder = tmp_path / ".kvservice"
    serve = ("serve", "--unix-socket", f"{folder}/kvservice.sock", "--auth-tokens", "/absent")
    refused = kvservice(*serve, HOME=str(tmp_path))
    assert "auth_tokens: /absent: No such file or directory" in refused.stderr
    assert refused.stderr.count("/absent") == 1
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    refused = kvservice(*serve, HOME=str(tmp_path))
    assert f"unix_socket: {folder}/kvservice.sock: other users can write to it" in refused.stderr


def test_a_folder_that_cannot_be_used_is_named_with_what_to_do() -> None:
    for number, said in ((errno.EROFS, f"user {os.geteuid()}, the daemon's, must own it"), (errno.ENOSPC, "make room")):
        text = why_unusable(OSError(number, os.strerror(number)), Path("/mnt/kv/values"))
        assert text.startswith(f"/mnt/kv/values cannot be used: {os.strerror(number)}; {said}")


# What test_config.py does not show: that an error of the configuration is one line, and what the daemon finds wrong.
NOT_SERVED: list[tuple[tuple[str, ...], dict[str, str], str]] = [
    (("--block-size", "12"), {}, "block_size"),
    (("--config", "/absent.toml"), {}, "/absent.toml"),
    (("--unix-socket", "", "--tcp-address", ""), {}, "unix_socket, tcp_address"),
    (("--unix-socket", "/absent/directory/k.sock"), {}, "unix_socket"),
    (("--unix-socket", f"/tmp/{'k' * 103}"), {}, "has 108 bytes: the path of a socket has at most"),
    (("--tcp-address", "192.0.2.1:1", "--insecure"), {}, "tcp_address: cannot listen"),
    (("--tcp-address", "0.0.0.0:1"), {}, "tcp_address: other hosts reach 0.0.0.0:1"),
    (
        ("--disk", "/dev/null"),
        {},
        "disk: /dev/null cannot be used: there is no directory at this path, but a file: name",
    ),
    (("--tls-cert", "/absent.crt", "--tls-key", "/absent.key"), {}, "tls_cert: /absent.crt"),
    (("--auth-tokens", "/absent"), {}, "auth_tokens: /absent"),
    ((), {"KVSERVICE_CPU_ISA": "sse9"}, "KVSERVICE_CPU_ISA: unknown instruction set 'sse9'"),
    (("--device", "cuda:900"), {}, "device"),
    (("--kv-cache-dtype", "fp8"), {}, "kv_cache_dtype"),
]


def test_what_cannot_be_served_is_one_clear_line(tmp_path: Path) -> None:
    private = TINY_POOL | {"KVSERVICE_UNIX_SOCKET": str(tmp_path / "k.sock"), "KVSERVICE_HTTP_ADDRESS": ""}
    with each_row() as row:
        for arguments, environ, named in NOT_SERVED:
            with row((arguments, environ)):
                refused = kvservice("serve", *arguments, **(private | environ))
                assert refused.returncode == 1
                assert re.fullmatch(rf"Error: .*{re.escape(named)}.*\n", refused.stderr.splitlines(keepends=True)[-1])
                # No path is named twice.
                assert all(refused.stderr.count(word) <= 1 for word in arguments if word.startswith("/"))
                for foreign in ("Traceback", "Value error", "(default)"):
                    assert foreign not in refused.stderr


def test_a_demo_on_a_device_of_no_kind_is_one_clear_line() -> None:
    refused = CliRunner().invoke(main, ["demo", "--device", "gpu"])
    assert refused.exit_code == 1
    assert re.fullmatch(r"Error: .*device.*\n", refused.stderr)


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
