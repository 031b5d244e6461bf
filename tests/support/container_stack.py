"""The services of deploy/ in a container engine. Skips the test, and says why, where they cannot be had.

Images that cannot be pulled are made from Debian packages, which takes minutes; those stay for the next run.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvservice.config import ENV_PREFIX

DEPLOY = Path(__file__).parents[2] / "deploy"
HOST_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
DEBIAN_BASE = "kvservice-test:debian"
DEBIAN_PROMETHEUS = "kvservice-test:prometheus"
DAEMON_IMAGE = "kvservice-test:cpu"
BASE_PACKAGES = "python3,python3-venv,python3-dev,ca-certificates"
PROMETHEUS_RECIPE = f"""
FROM {DEBIAN_BASE}
RUN apt-get update && apt-get install --yes --no-install-recommends prometheus
RUN install --directory --owner=65534 --group=65534 /prometheus
USER 65534:65534
ENTRYPOINT ["prometheus"]
"""
# A small pool; a drain time that a test can see the end of.
OPTIONS = {
    "num_layers": "2",
    "num_kv_heads": "2",
    "head_size": "64",
    "dtype": "float32",
    "num_blocks": "256",
    "swap_space_gib": "0.01",
    "drain_timeout_s": "25",
}


def output(*command: str, timeout_s: float = 60, **options: Any) -> str:
    """What a command says on its standard output. If it fails, so does the test, with all that it said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, **options)
    if done.returncode:
        pytest.fail(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout.strip()


def succeeds(*command: str, timeout_s: float = 60) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=timeout_s, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def wait_for(what: str, ready: Callable[[], Any], timeout_s: float = 90) -> Any:
    """The first true value of `ready`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := ready():
            return value
        time.sleep(0.5)
    pytest.fail(f"{what}: not within {timeout_s} s")


def available(image: str) -> bool:
    return succeeds("docker", "image", "inspect", image) or succeeds("docker", "pull", "--quiet", image, timeout_s=300)


def make_debian_base() -> None:
    """A Debian with Python, imported as an image. It trusts whom this machine trusts, as the build fetches packages."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "root"
        output("debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", str(root), timeout_s=900)
        if HOST_CERTIFICATES.exists():
            shutil.copy(HOST_CERTIFICATES, root / HOST_CERTIFICATES.relative_to("/"))
            (root / "etc/pip.conf").write_text(f"[global]\ncert = {HOST_CERTIFICATES}\n")
        output("sh", "-c", f"tar -C {root} -c . | docker import - {DEBIAN_BASE}", timeout_s=300)


def debian_base() -> str:
    if not succeeds("docker", "image", "inspect", DEBIAN_BASE):
        if shutil.which("debootstrap") is None or os.geteuid() != 0:
            pytest.skip("base images can neither be pulled nor made: making one takes debootstrap and root")
        make_debian_base()
    return DEBIAN_BASE


def debian_prometheus() -> str:
    debian_base()
    if not succeeds("docker", "image", "inspect", DEBIAN_PROMETHEUS):
        output("docker", "build", "--tag", DEBIAN_PROMETHEUS, "-", input=PROMETHEUS_RECIPE, timeout_s=900)
    return DEBIAN_PROMETHEUS


def compose_command() -> list[str]:
    """docker-compose or docker compose; skips without an engine that answers."""
    if shutil.which("docker") is None:
        pytest.skip("docker is not installed")
    if not succeeds("docker", "version", timeout_s=20):
        pytest.skip(f"no container engine answers at {os.environ.get('DOCKER_HOST', 'its default address')}")
    for command in (["docker-compose"], ["docker", "compose"]):
        if succeeds(*command, "version"):
            return command
    pytest.skip("neither docker-compose nor docker compose is installed")


def default_images() -> tuple[str, str]:
    services = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]
    values = services["daemon"]["build"]["args"]["BASE_IMAGE"], services["prometheus"]["image"]
    base, prometheus = (value.partition(":-")[2].removesuffix("}") for value in values)
    return base, prometheus


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Stack:
    """The compose file's services under a project name of their own, so that a stack in use here is left alone."""

    def __init__(self) -> None:
        self._compose = compose_command()
        base, prometheus = default_images()
        base = base if available(base) else debian_base()
        prometheus = prometheus if available(prometheus) else debian_prometheus()
        self.project = f"kvservice-test-{os.getpid()}"
        self.rpc_port, self.metrics_port, self.prometheus_port = free_ports(3)
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)} | {
            "BASE_IMAGE": base,
            "DAEMON_IMAGE": DAEMON_IMAGE,
            "PROMETHEUS_IMAGE": prometheus,
            "DAEMON_PORT": str(self.rpc_port),
            "METRICS_PORT": str(self.metrics_port),
            "PROMETHEUS_PORT": str(self.prometheus_port),
            **{ENV_PREFIX + name.upper(): value for name, value in OPTIONS.items()},
        }

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.rpc_port}"

    @property
    def socket_volume(self) -> str:
        return f"{self.project}_socket"

    def compose(self, *arguments: str, timeout_s: float = 120) -> str:
        file = str(DEPLOY / "docker-compose.yml")
        command = [*self._compose, "--project-name", self.project, "--file", file, *arguments]
        return output(*command, timeout_s=timeout_s, env=self._environment)

    def container(self, service: str) -> str:
        # A stopped container has an id as well.
        labels = (f"com.docker.compose.project={self.project}", f"com.docker.compose.service={service}")
        return output("docker", "ps", "--all", "--quiet", *(f"--filter=label={label}" for label in labels))

    def state(self, service: str) -> Any:
        return json.loads(output("docker", "inspect", "--format", "{{json .State}}", self.container(service)))

    def await_healthy(self) -> None:
        for service in ("daemon", "prometheus"):
            wait_for(f"{service} is healthy", lambda name=service: self.state(name)["Health"]["Status"] == "healthy")

    def query(self, path: str, **parameters: str) -> Any:
        """`data` of Prometheus' answer."""
        url = f"http://127.0.0.1:{self.prometheus_port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]
