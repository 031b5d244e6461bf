"""The daemon and its monitoring in containers, as the compose file starts them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from container_engine import output, wait_for
from container_stack import DAEMON_IMAGE, OPTIONS, Stack

from kvservice.client import KVClient
from kvservice.config import ServeConfig
from kvservice.errors import ConnectionLostError, DrainingError
from kvservice.health import check

# Building the images takes minutes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

NUM_BLOCKS = int(OPTIONS["num_blocks"])
NUM_LAYERS, NUM_HEADS, HEAD_SIZE = (int(OPTIONS[name]) for name in ("num_layers", "num_kv_heads", "head_size"))

# An engine in another container. Attention over one token returns the token's value.
ENGINE = f"""
import logging, sys, numpy as np
logging.basicConfig(stream=sys.stdout)
from kvservice.client import KVClient
with KVClient(sys.argv[1], connect_timeout_s=float(sys.argv[2])) as client, client.session() as kv:
    step = kv.open_step([kv.allocate([7])])
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, {NUM_HEADS}, {HEAD_SIZE})).astype(np.float32)
    for layer in range({NUM_LAYERS}):
        np.testing.assert_allclose(step.extend(layer, q, k, v), v, rtol=1e-5)
    print("attention over", client.info.num_blocks, "blocks by", kv.transport)
"""


def values(seed: int) -> np.ndarray:
    """Return query, key and value of one token."""
    return np.random.default_rng(seed).normal(size=(3, 1, NUM_HEADS, HEAD_SIZE)).astype(np.float32)


def daemon_log(stack: Stack) -> str:
    return stack.compose("logs", "--no-color", "daemon")


def run_engine(address: str, *docker_options: str, connect_timeout_s: float = 30) -> str:
    options = ["--rm", "--interactive", "--entrypoint=python", *docker_options]
    return output("docker", "run", *options, DAEMON_IMAGE, "-", address, str(connect_timeout_s), input=ENGINE)


def test_prometheus_sees_the_daemon(stack: Stack) -> None:
    def target_is_up() -> bool:
        targets = stack.query("targets", state="active")["activeTargets"]
        return {"kvservice", "prometheus"} == {each["labels"]["job"] for each in targets if each["health"] == "up"}

    wait_for("both targets are up", target_is_up)
    found = stack.query("query", query='kvservice_blocks{state="free"}')["result"]
    assert [series["value"][1] for series in found] == [str(NUM_BLOCKS)]


def test_prometheus_evaluates_the_rules(stack: Stack) -> None:
    def rules() -> set[tuple[str, str]]:
        return {(group["name"], rule["health"]) for group in stack.query("rules")["groups"] for rule in group["rules"]}

    wait_for("all rules were evaluated", lambda: {health for _, health in rules()} == {"ok"})
    assert {name for name, _ in rules()} > {"kvservice-recording", "kvservice-memory"}


def test_the_example_makes_traffic_of_every_kind(stack: Stack) -> None:
    """The example service causes traffic of every kind, and leaves nothing behind when it stops."""
    increases = (
        "kvservice_tenant_computed_tokens_total{tenant='chat'}",
        "kvservice_tenant_computed_tokens_total{tenant='search'}",
        "kvservice_prefix_cache_hit_tokens_total",
        "kvservice_cow_copies_total",
        "kvservice_evictions_total",
        "kvservice_swap_blocks_total{direction='out'}",
        "kvservice_swap_blocks_total{direction='in'}",
        "kvservice_lane_call_duration_seconds_count",
    )
    stack.compose("up", "--detach", "--no-build", "example")
    try:
        for increase in increases:
            wait_for(increase, functools.partial(stack.rises, increase))
    finally:
        stack.compose("stop", "example")
    assert stack.state("example")["ExitCode"] == 0
    with KVClient(stack.address) as client:
        wait_for("its sessions are closed", lambda: client.stats().sessions == 0)
        with client.session() as kv:
            kv.reset_prefix_cache()


def test_grafana_has_the_dashboard(stack: Stack) -> None:
    if "grafana" not in stack.services:
        pytest.skip("this machine reaches no registry that has Grafana's image, and Debian has no package of it")
    url = f"http://127.0.0.1:{stack.grafana_port}/api/dashboards/uid/kvservice"
    with urllib.request.urlopen(url, timeout=10) as answer:
        found = json.load(answer)
    assert found["dashboard"]["title"] == "kvservice"
    assert not found["meta"]["canSave"]


def test_the_page_wants_its_token_and_metrics_do_not(stack: Stack) -> None:
    url = f"http://127.0.0.1:{stack.http_port}"
    with pytest.raises(urllib.error.HTTPError) as refused, urllib.request.urlopen(f"{url}/", timeout=10):
        pass
    refused.value.close()
    assert refused.value.code in (401, 403)
    page = urllib.request.Request(f"{url}/", headers={"Authorization": f"Bearer {OPTIONS['http_token']}"})
    with urllib.request.urlopen(page, timeout=10) as answer:
        assert "text/html" in answer.headers["Content-Type"]
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        assert b"kvservice_blocks" in answer.read()


def test_the_host_reaches_the_daemon_over_tcp(stack: Stack) -> None:
    command = [sys.executable, "-P", "-c", ENGINE, stack.address, "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"attention over {NUM_BLOCKS} blocks by inline"


def test_the_host_reaches_the_daemon_over_the_shared_socket(stack: Stack) -> None:
    directory = Path(output("docker", "volume", "inspect", "--format", "{{.Mountpoint}}", stack.socket_volume))
    if not os.access(directory, os.X_OK):
        pytest.skip(f"{directory} is not open to this user")
    with KVClient(f"unix:{directory}/kvservice.sock") as client:
        assert client.info.num_blocks == NUM_BLOCKS


def test_an_engine_in_a_container_reaches_it_over_tcp(stack: Stack) -> None:
    assert "blocks by inline" in run_engine("daemon:50051", f"--network={stack.project}_default")


def test_an_engine_in_a_container_reaches_it_over_the_shared_socket(stack: Stack) -> None:
    options = ("--network=none", f"--volume={stack.socket_volume}:/run/kvservice")
    address = "unix:/run/kvservice/kvservice.sock"
    assert "blocks by inline" in run_engine(address, *options, "--user=20000:10001")
    assert "blocks by lane" in run_engine(address, *options)  # runs as the daemon's user
    with pytest.raises(pytest.fail.Exception, match=r"CONNECTION_LOST|UNAVAILABLE|DEADLINE"):
        run_engine(address, *options, "--user=20000:20000", connect_timeout_s=3)


def test_the_demo_on_the_host_passes_over_tcp(stack: Stack) -> None:
    command = [sys.executable, "-P", "-m", "kvservice", "demo", "--json", f"--address={stack.address}"]
    result = json.loads(output(*command, timeout_s=300))
    assert result["tokens_match"]
    assert result["tokens"] > 100


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
    assert ServeConfig.model_fields["drain_stall_s"].default <= time.monotonic() - begin
    assert "no layer for 5 s" in daemon_log(stack)
    assert stack.state("daemon")["ExitCode"] == 0
    restart(stack)


def test_a_daemon_that_is_killed_is_back_with_its_sequences_in_the_same_container(stack: Stack) -> None:
    before = stack.state("daemon")["StartedAt"]
    with KVClient(stack.address) as client, client.session() as session:
        sequence = session.allocate([7])
        step = session.open_step([sequence])
        q, k, v = values(1)
        for layer in range(NUM_LAYERS):
            step.extend(layer, q, k, v)
        output("docker", "exec", stack.container("daemon"), "sh", "-c", "kill -KILL $(cat /proc/1/task/1/children)")
        session.append([sequence], [8])
        (info,) = session.describe()
        assert (info.length, info.num_computed_tokens) == (2, 1)
    assert stack.state("daemon")["StartedAt"] == before
    assert "after signal 9: took over 1 session, 1 sequence" in daemon_log(stack)


def restart(stack: Stack) -> None:
    stack.compose("start", "daemon")
    # The container's health is checked only every 15 seconds.
    wait_for("the daemon answers", lambda: check(stack.address, timeout_s=1))
    with KVClient(stack.address) as client:
        stats = client.stats()
    assert (stats.free_blocks, stats.sessions) == (NUM_BLOCKS, 0)
