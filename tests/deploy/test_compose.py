"""The daemon and Prometheus in containers, as the compose file starts them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from container_stack import DAEMON_IMAGE, OPTIONS, Stack, output, wait_for

from kvservice.client import KVClient
from kvservice.errors import ConnectionLostError, DrainingError

# Building the images takes minutes.
pytestmark = pytest.mark.timeout(2400)

NUM_BLOCKS = int(OPTIONS["num_blocks"])
NUM_LAYERS, NUM_HEADS, HEAD_SIZE = (int(OPTIONS[name]) for name in ("num_layers", "num_kv_heads", "head_size"))

# An engine in another container: attention over one token gives its value back.
ENGINE = f"""
import sys, numpy as np
from kvservice.client import KVClient
with KVClient(sys.argv[1]) as client, client.session() as kv:
    step = kv.open_step([kv.allocate([7])])
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, {NUM_HEADS}, {HEAD_SIZE})).astype(np.float32)
    for layer in range({NUM_LAYERS}):
        np.testing.assert_allclose(step.extend(layer, q, k, v), v, rtol=1e-5)
print("attention over", client.info.num_blocks, "blocks")
"""


def values(seed: int) -> np.ndarray:
    """Query, key, value of one token."""
    return np.random.default_rng(seed).normal(size=(3, 1, NUM_HEADS, HEAD_SIZE)).astype(np.float32)


def daemon_log(stack: Stack) -> str:
    return stack.compose("logs", "--no-color", "daemon")


def run_engine(address: str, *docker_options: str) -> str:
    options = ["--rm", "--interactive", "--entrypoint=python", *docker_options]
    return output("docker", "run", *options, DAEMON_IMAGE, "-", address, input=ENGINE)


def test_prometheus_sees_the_daemon(stack: Stack) -> None:
    def target_is_up() -> bool:
        targets = stack.query("targets", state="active")["activeTargets"]
        return {"kvservice", "prometheus"} == {each["labels"]["job"] for each in targets if each["health"] == "up"}

    wait_for("both targets are up", target_is_up)
    found = stack.query("query", query='kvservice_blocks{state="free"}')["result"]
    assert [series["value"][1] for series in found] == [str(NUM_BLOCKS)]


def test_the_host_reaches_the_daemon_over_tcp(stack: Stack) -> None:
    command = [sys.executable, "-P", "-c", ENGINE, stack.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"attention over {NUM_BLOCKS} blocks"


def test_the_host_reaches_the_daemon_over_the_shared_socket(stack: Stack) -> None:
    directory = Path(output("docker", "volume", "inspect", "--format", "{{.Mountpoint}}", stack.socket_volume))
    if not os.access(directory, os.X_OK):
        pytest.skip(f"{directory} is not open to this user")
    with KVClient(f"unix:{directory}/kvservice.sock") as client:
        assert client.info.num_blocks == NUM_BLOCKS


def test_an_engine_in_a_container_reaches_it_over_tcp(stack: Stack) -> None:
    assert "attention over" in run_engine("daemon:50051", f"--network={stack.project}_default")


def test_an_engine_in_a_container_reaches_it_over_the_shared_socket(stack: Stack) -> None:
    options = ("--network=none", f"--volume={stack.socket_volume}:/run/kvservice")
    address = "unix:/run/kvservice/kvservice.sock"
    assert "attention over" in run_engine(address, *options, "--user=20000:10001")
    with pytest.raises(pytest.fail.Exception, match=r"CONNECTION_LOST|UNAVAILABLE|DEADLINE"):
        run_engine(address, *options, "--user=20000:20000")


def test_the_container_is_nobody_has_no_compiler_and_is_published_on_loopback(stack: Stack) -> None:
    daemon = stack.container("daemon")
    assert output("docker", "exec", daemon, "id", "-u") == "10001"
    assert output("docker", "exec", daemon, "sh", "-c", "command -v c++ gcc pip || echo none") == "none"
    published = output("docker", "port", daemon).splitlines()
    assert len(published) == 2
    assert all(" -> 127.0.0.1:" in line for line in published)


def test_stop_lets_a_begun_step_finish_and_ends_with_0(stack: Stack) -> None:
    drains_before = daemon_log(stack).count("draining")
    q, k, v = values(1)
    begin = time.monotonic()
    with KVClient(stack.address) as client:
        session = client.session()
        step = session.open_step([session.allocate([7])])
        step.extend(0, q, k, v)
        stopping = subprocess.Popen(["docker", "stop", "--time=40", stack.container("daemon")], stdout=subprocess.PIPE)
        wait_for("draining", lambda: daemon_log(stack).count("draining") > drains_before)
        with pytest.raises(DrainingError):
            session.allocate([8])
        assert stopping.poll() is None, "it waits for the step"
        for layer in range(1, NUM_LAYERS):
            np.testing.assert_allclose(step.extend(layer, q, k, v), v, rtol=1e-5)
        stopping.communicate(timeout=40)
        with pytest.raises(ConnectionLostError):
            client.stats()
    assert stack.state("daemon")["ExitCode"] == 0
    assert time.monotonic() - begin < float(OPTIONS["drain_timeout_s"]), "it does not wait longer than the step"
    assert "still busy" not in daemon_log(stack)
    restart(stack)


def test_stop_does_not_wait_for_a_step_for_ever(stack: Stack) -> None:
    with KVClient(stack.address) as client:
        session = client.session()
        session.open_step([session.allocate([7])]).extend(0, *values(1))
        begin = time.monotonic()
        stack.compose("stop", "daemon")
    assert float(OPTIONS["drain_timeout_s"]) <= time.monotonic() - begin < 40
    assert stack.state("daemon")["ExitCode"] == 0
    restart(stack)


def test_a_crash_is_followed_by_a_new_start_on_the_same_socket(stack: Stack) -> None:
    before = stack.state("daemon")["StartedAt"]
    output("docker", "exec", stack.container("daemon"), "sh", "-c", "kill -KILL $(cat /proc/1/task/1/children)")
    wait_for("a new start", lambda: stack.state("daemon")["StartedAt"] != before)
    stack.await_healthy()
    options = ("--network=none", f"--volume={stack.socket_volume}:/run/kvservice")
    assert "attention over" in run_engine("unix:/run/kvservice/kvservice.sock", *options)


def restart(stack: Stack) -> None:
    stack.compose("start", "daemon")
    stack.await_healthy()
    with KVClient(stack.address) as client:
        stats = client.stats()
    assert (stats.free_blocks, stats.sessions) == (NUM_BLOCKS, 0)
