"""The services of deploy/ in a container engine. Their tests run where TEST_CONTAINERS is set: the images take minutes.

They skip a test only where no engine can run.

Images that cannot be pulled are built from Debian packages, which takes minutes, and are kept for the next run. Debian
has no Grafana: if its image cannot be pulled, the other services run without it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import debian_packages
import outliving
import pytest
import yaml
from container_engine import engine, output, succeeds, wait_for
from ports import free_ports

from kvservice.config import ENV_PREFIX

DEPLOY = Path(__file__).parents[2] / "deploy"
HOST_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
DEBIAN_BASE = "kvservice-test:debian"
DEBIAN_PROMETHEUS = "kvservice-test:prometheus"
DAEMON_IMAGE = "kvservice-test:cpu"
MOONCAKE_IMAGE = "kvservice-test:mooncake"
BASE_PACKAGES = "python3,python3-venv,python3-dev,ca-certificates"
PROMETHEUS_RECIPE = f"""
FROM {DEBIAN_BASE}
RUN apt-get update && apt-get install --yes --no-install-recommends prometheus
RUN install --directory --owner=65534 --group=65534 /prometheus
USER 65534:65534
ENTRYPOINT ["prometheus"]
"""
# A small pool with the demo's shape, and a drain time short enough for a test.
OPTIONS = {
    "num_layers": "4",
    "num_kv_heads": "2",
    "head_size": "64",
    "dtype": "float32",
    "num_blocks": "256",
    "swap_space_gib": "0.01",
    "drain_timeout_s": "120",
    "allow_client_shm": "on",
    "http_token": "token-of-these-tests",
}

DOWN = ("down", "--volumes", "--timeout", "5")
MOONCAKE_OPTIONS = {"num_layers": "2", "num_kv_heads": "2", "head_size": "32", "pool_gib": "0.05", "store_gib": "0.125"}


def available(image: str) -> bool:
    return succeeds("docker", "image", "inspect", image) or succeeds("docker", "pull", "--quiet", image, timeout_s=300)


def make_debian_base() -> None:
    """Import a Debian with Python as an image. It has this machine's CA certificates, because the build fetches
    packages."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "root"
        output("debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", str(root), timeout_s=900)
        if HOST_CERTIFICATES.exists():
            shutil.copy(HOST_CERTIFICATES, root / HOST_CERTIFICATES.relative_to("/"))
            (root / "etc/pip.conf").write_text(f"[global]\ncert = {HOST_CERTIFICATES}\n")
        output("sh", "-c", f"tar -C {root} -c . | docker import - {DEBIAN_BASE}", timeout_s=300)


def debian_base() -> str:
    if not succeeds("docker", "image", "inspect", DEBIAN_BASE):
        if os.geteuid() != 0:
            pytest.skip("this machine reaches no registry of images, and only root can make one")
        debian_packages.require({"debootstrap": "debootstrap"})
        make_debian_base()
    return DEBIAN_BASE


def debian_prometheus() -> str:
    debian_base()
    if not succeeds("docker", "image", "inspect", DEBIAN_PROMETHEUS):
        output("docker", "build", "--tag", DEBIAN_PROMETHEUS, "-", input=PROMETHEUS_RECIPE, timeout_s=900)
    return DEBIAN_PROMETHEUS


def compose_command() -> list[str]:
    for command in (["docker-compose"], ["docker", "compose"]):
        if succeeds(*command, "version"):
            return command
    debian_packages.require({"docker-compose": "docker-compose"})
    return ["docker-compose"]


def default_image(service: str) -> str:
    """Return the image in the compose file; for the daemon, its base image."""
    found = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"][service]
    value: str = found["build"]["args"]["BASE_IMAGE"] if "build" in found else found["image"]
    return default(value)


def default(value: str) -> str:
    """Return the default of a variable in a compose file."""
    return value.partition(":-")[2].removesuffix("}")


class ComposeProject:
    """A compose file's services under a separate project name, so that a stack in use here is not affected."""

    def __init__(self, file: str, project: str, services: list[str], environment: dict[str, str]) -> None:
        self._compose, self._file = compose_command(), str(DEPLOY / file)
        self.project, self.services = project, services
        foreign = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        self._environment = foreign | environment

    def up(self) -> None:
        self.compose("up", "--detach", "--no-build", *self.services)
        self.await_healthy()

    def down(self) -> None:
        self.compose(*DOWN)

    def ending_with_the_tests(self) -> AbstractContextManager[None]:
        """Remove the services if the test process ends within the context. A private engine takes them along."""
        return outliving.at_the_end(*self._command(*DOWN))

    def compose(self, *arguments: str, timeout_s: float = 120) -> str:
        return output(*self._command(*arguments), timeout_s=timeout_s, env=self._environment)

    def _command(self, *arguments: str) -> list[str]:
        return [*self._compose, "--project-name", self.project, "--file", self._file, *arguments]

    def container(self, service: str) -> str:
        # Stopped containers have an id, too.
        labels = (f"com.docker.compose.project={self.project}", f"com.docker.compose.service={service}")
        return output("docker", "ps", "--all", "--quiet", *(f"--filter=label={label}" for label in labels))

    def state(self, service: str) -> Any:
        return json.loads(output("docker", "inspect", "--format", "{{json .State}}", self.container(service)))

    def await_healthy(self) -> None:
        for service in self.services:
            wait_for(f"{service} is healthy", functools.partial(self.is_healthy, service))

    def is_healthy(self, service: str) -> bool:
        return bool(self.state(service)["Health"]["Status"] == "healthy")


class MooncakeStack(ComposeProject):
    """The services of docker-compose.mooncake.yml."""

    def __init__(self) -> None:
        ports = free_ports(4)
        self.addresses = [f"127.0.0.1:{port}" for port in ports[:2]]
        text = (DEPLOY / "docker-compose.mooncake.yml").read_text()
        base = default(yaml.safe_load(text)["services"]["master"]["build"]["args"]["BASE_IMAGE"])
        environment = {
            "BASE_IMAGE": base if available(base) else debian_base(),
            "MOONCAKE_IMAGE": MOONCAKE_IMAGE,
            "NODE_GIB": "0.25",
            "DAEMON_MEMORY": "2g",
            **{ENV_PREFIX + name.upper(): value for name, value in MOONCAKE_OPTIONS.items()},
        }
        names = ("DAEMON_A_PORT", "DAEMON_B_PORT", "METRICS_A_PORT", "METRICS_B_PORT")
        environment |= dict(zip(names, map(str, ports), strict=True))
        services = ["master", "node", "daemon-a", "daemon-b"]
        super().__init__("docker-compose.mooncake.yml", f"kvservice-test-mooncake-{os.getpid()}", services, environment)

    def build(self) -> None:
        self.compose("build", "master", timeout_s=1500)


class Stack(ComposeProject):
    """The services of docker-compose.yml."""

    def __init__(self) -> None:
        base, prometheus = default_image("daemon"), default_image("prometheus")
        services = ["daemon", "prometheus"]
        if available(default_image("grafana")):
            services.append("grafana")
        self.rpc_port, self.http_port, self.prometheus_port, self.grafana_port = free_ports(4)
        environment = {
            "COMPOSE_PROFILES": "cpu",
            "BASE_IMAGE": base if available(base) else debian_base(),
            "DAEMON_IMAGE": DAEMON_IMAGE,
            "CLIENT_IMAGE": DAEMON_IMAGE,
            "PROMETHEUS_IMAGE": prometheus if available(prometheus) else debian_prometheus(),
            "DAEMON_PORT": str(self.rpc_port),
            "METRICS_PORT": str(self.http_port),
            "PROMETHEUS_PORT": str(self.prometheus_port),
            "GRAFANA_PORT": str(self.grafana_port),
            **{ENV_PREFIX + name.upper(): value for name, value in OPTIONS.items()},
        }
        super().__init__("docker-compose.yml", f"kvservice-test-{os.getpid()}", services, environment)

    def build(self) -> None:
        self.compose("build", "daemon", timeout_s=1500)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.rpc_port}"

    @property
    def socket_volume(self) -> str:
        return f"{self.project}_socket"

    def rises(self, counter: str) -> bool:
        return any(self.values(f"rate({counter}[1m]) > 0"))

    def query(self, path: str, **parameters: str) -> Any:
        """Return `data` of Prometheus's answer."""
        url = f"http://127.0.0.1:{self.prometheus_port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def values(self, query: str) -> list[float]:
        """Return the current value of each series that a query finds."""
        return [float(series["value"][1]) for series in self.query("query", query=query)["result"]]


StackT = TypeVar("StackT", Stack, MooncakeStack)


@contextlib.contextmanager
def running(kind: type[StackT]) -> Iterator[StackT]:
    """Build and start a stack for the tests of a file. The engine ends with it, so that others can have it."""
    if not os.environ.get("TEST_CONTAINERS"):
        pytest.skip("images take minutes: TEST_CONTAINERS=1 pytest -m slow tests/deploy tests/mooncake")
    with engine():
        stack = kind()
        stack.build()
        with stack.ending_with_the_tests():
            try:
                stack.up()
                yield stack
            finally:
                stack.down()
