"""The files of deploy/ agree with each other and with the daemon, as far as that shows without a container engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvservice.cli import main
from kvservice.config import ENV_PREFIX, GIB, ServeConfig, load_config
from kvservice.environment import missing_environment

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
# Instructions, with continued lines joined.
INSTRUCTIONS = [
    line.split(maxsplit=1)
    for line in re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", DOCKERFILE)).splitlines()
    if line
]
DEFAULTS = ServeConfig()


def instructions(name: str) -> list[str]:
    return [rest for instruction, rest in INSTRUCTIONS if instruction == name]


def image_environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for line in instructions("ENV") for pair in line.split())


@pytest.fixture
def image_config() -> ServeConfig:
    """What the daemon is configured to be inside the image. Raises if the image sets what is no option."""
    return load_config({}, {name: value for name, value in image_environment().items() if name.startswith(ENV_PREFIX)})


@pytest.fixture
def compose() -> Any:
    """The compose file with the default of every variable put in."""
    text = (DEPLOY / "docker-compose.yml").read_text()
    assert "${" in text
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))


def port_of(address: str) -> str:
    return address.rpartition(":")[2]


def test_the_image_sets_what_processes_need_before_they_start() -> None:
    environment = image_environment()
    others = {name: value for name, value in environment.items() if not name.startswith((ENV_PREFIX, "PATH"))}
    assert others == missing_environment({})


def test_the_daemon_is_reached_from_outside_its_container(image_config: ServeConfig, compose: Any) -> None:
    assert image_config.tcp_address.startswith("0.0.0.0:")
    assert image_config.http_address.startswith("0.0.0.0:")
    ports = [port_of(image_config.tcp_address), port_of(image_config.http_address)]
    assert instructions("EXPOSE") == [" ".join(ports)]
    assert [port_of(published) for published in compose["services"]["daemon"]["ports"]] == ports


def test_ports_are_published_on_loopback_only(compose: Any) -> None:
    published = [port for service in compose["services"].values() for port in service["ports"]]
    assert len(published) == 3
    for port in published:
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)


def test_the_socket_lies_in_the_shared_volume(image_config: ServeConfig, compose: Any) -> None:
    directory = str(Path(image_config.unix_socket).parent)
    assert instructions("VOLUME") == [directory]
    assert f"socket:{directory}" in compose["services"]["daemon"]["volumes"]
    assert "socket" in compose["volumes"]


def test_what_compose_passes_on_are_options(compose: Any) -> None:
    names = compose["services"]["daemon"]["environment"]
    assert names
    assert {name.removeprefix(ENV_PREFIX).lower() for name in names} <= ServeConfig.model_fields.keys()
    assert all(name.startswith(ENV_PREFIX) for name in names), "values stand in the image, or are the user's"


def test_the_daemon_may_drain_and_has_room_for_its_pool(compose: Any) -> None:
    daemon = compose["services"]["daemon"]
    assert int(daemon["stop_grace_period"].removesuffix("s")) > DEFAULTS.drain_timeout_s
    memory_bytes = int(daemon["mem_limit"].removesuffix("g")) * GIB
    assert memory_bytes > 1.25 * (DEFAULTS.pool_gib + DEFAULTS.swap_space_gib) * GIB


def test_signals_reach_the_daemon_and_it_is_nobody() -> None:
    assert json.loads(instructions("ENTRYPOINT")[0])[0] == "kvservice"
    assert json.loads(instructions("CMD")[-1]) == ["serve"]
    user, _, group = instructions("USER")[0].partition(":")
    assert int(user) > 0
    assert int(group) > 0


def test_the_health_check_is_a_command() -> None:
    _, _, command = instructions("HEALTHCHECK")[0].partition(" CMD ")
    program, subcommand, *options = json.loads(command)
    assert program == "kvservice"
    main.commands[subcommand].make_context(subcommand, options)


def test_prometheus_scrapes_the_daemon(image_config: ServeConfig, compose: Any) -> None:
    jobs = {job["job_name"]: job for job in yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]}
    (target,) = jobs["kvservice"]["static_configs"][0]["targets"]
    assert target == f"daemon:{port_of(image_config.http_address)}"
    mounted = compose["services"]["prometheus"]["volumes"][0].split(":")[1]
    assert f"--config.file={mounted}" in compose["services"]["prometheus"]["command"]


def test_images_are_pinned_and_the_base_is_said_once(compose: Any) -> None:
    (base,) = [line.removeprefix("BASE_IMAGE=") for line in instructions("ARG")]
    assert compose["services"]["daemon"]["build"]["args"] == {"BASE_IMAGE": base}
    for image in (base, compose["services"]["prometheus"]["image"]):
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+[\w.-]*", image), f"{image} names no version"


def test_the_build_context_has_what_is_copied_and_no_more() -> None:
    allowed = {
        line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    copied = {source for line in instructions("COPY") if not line.startswith("--from") for source in line.split()[:-1]}
    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)
