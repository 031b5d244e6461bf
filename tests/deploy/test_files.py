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
IMAGES = ("cpu", "cuda")
DAEMONS = ("daemon", "daemon-gpu")
DEFAULTS = ServeConfig()


def instructions(name: str, stage: str | None = None) -> list[str]:
    """What stands behind an instruction: anywhere, or in a stage and those that it is made from."""
    stages: dict[str, list[list[str]]] = {"": []}
    current = ""
    for instruction, rest in INSTRUCTIONS:
        if instruction == "FROM":
            base, _, current = rest.partition(" AS ")
            stages[current] = [*stages.get(base, [])]
        stages[current].append([instruction, rest])
    found = INSTRUCTIONS if stage is None else stages[stage]
    return [rest for instruction, rest in found if instruction == name]


def arguments() -> dict[str, str]:
    return {name: value.strip('"') for name, _, value in (line.partition("=") for line in instructions("ARG"))}


def image_environment(image: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for line in instructions("ENV", image) for pair in line.split())


@pytest.fixture(params=IMAGES)
def image(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def image_config(image: str) -> ServeConfig:
    """What the daemon is configured to be inside an image. Raises if the image sets what is no option."""
    environment = image_environment(image)
    return load_config({}, {name: value for name, value in environment.items() if name.startswith(ENV_PREFIX)})


@pytest.fixture
def compose() -> Any:
    """The compose file with the default of every variable put in."""
    text = (DEPLOY / "docker-compose.yml").read_text()
    assert "${" in text
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))


@pytest.fixture
def dotenv() -> dict[str, str]:
    lines = (DEPLOY / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def port_of(address: str) -> str:
    return address.rpartition(":")[2]


def test_images_set_what_processes_need_before_they_start(image: str) -> None:
    ours = (ENV_PREFIX, "PATH", "NVIDIA_")
    others = {name: value for name, value in image_environment(image).items() if not name.startswith(ours)}
    assert others == missing_environment({})


def test_the_image_with_cuda_is_the_other_one_on_a_gpu() -> None:
    more = image_environment("cuda").items() - image_environment("cpu").items()
    assert dict(more) == {
        "KVSERVICE_DEVICE": "cuda",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
    }
    runtime = [rest for instruction, rest in INSTRUCTIONS if instruction == "FROM" and rest.startswith("runtime")]
    assert runtime == [f"runtime AS {image}" for image in IMAGES]


def test_cuda_is_built_for_the_same_architectures_as_elsewhere() -> None:
    cmake = (ROOT / "csrc" / "CMakeLists.txt").read_text()
    (default,) = re.findall(r"set\(CMAKE_CUDA_ARCHITECTURES (.*)\)", cmake)
    assert arguments()["CUDAARCHS"].split(";") == default.split()


def test_the_daemon_is_reached_from_outside_its_container(image_config: ServeConfig, compose: Any) -> None:
    assert image_config.tcp_address.startswith("0.0.0.0:")
    assert image_config.http_address.startswith("0.0.0.0:")
    ports = [port_of(image_config.tcp_address), port_of(image_config.http_address)]
    assert instructions("EXPOSE") == [" ".join(ports)]
    for name in DAEMONS:
        assert [port_of(published) for published in compose["services"][name]["ports"]] == ports


def test_ports_are_published_on_loopback_only(compose: Any) -> None:
    services = compose["services"]
    assert {name for name, service in services.items() if "ports" not in service} == {"example"}
    for port in (port for service in services.values() for port in service.get("ports", [])):
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)


def test_nothing_may_gain_privileges(compose: Any) -> None:
    for service in compose["services"].values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_the_socket_lies_in_the_shared_volume(image_config: ServeConfig, compose: Any) -> None:
    directory = str(Path(image_config.unix_socket).parent)
    assert instructions("VOLUME") == [directory]
    for name in (*DAEMONS, "example"):
        assert f"socket:{directory}" in compose["services"][name]["volumes"]
    assert "socket" in compose["volumes"]
    assert compose["services"]["example"]["command"] == [f"unix:{image_config.unix_socket}"]


def test_one_of_the_daemons_is_started_and_found_under_one_name(compose: Any, dotenv: dict[str, str]) -> None:
    profiles = {name: service.get("profiles") for name, service in compose["services"].items()}
    assert [profiles[name] for name in DAEMONS] == [["cpu"], ["gpu"]]
    assert dotenv["COMPOSE_PROFILES"].split(",") == ["cpu", *profiles["example"]]
    assert compose["services"]["daemon-gpu"]["networks"]["default"]["aliases"] == ["daemon"]
    (device,) = compose["services"]["daemon-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "device_ids": ["0"], "capabilities": ["gpu"]}
    targets = [compose["services"][name]["build"]["target"] for name in DAEMONS]
    assert targets == list(IMAGES)


def test_what_is_set_beside_the_compose_file_is_used_there(compose: Any, dotenv: dict[str, str]) -> None:
    options = {name for name in dotenv if name.startswith(ENV_PREFIX)}
    assert options
    assert options <= set(compose["services"]["daemon"]["environment"])
    assert dotenv.keys() - options == {"COMPOSE_PROJECT_NAME", "COMPOSE_PROFILES"}


def test_what_compose_passes_on_are_options(compose: Any) -> None:
    names = compose["services"]["daemon"]["environment"]
    assert names == compose["services"]["daemon-gpu"]["environment"]
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
    (user_and_group,) = instructions("USER")
    user, _, group = user_and_group.partition(":")
    assert int(user) > 0
    assert int(group) > 0


def test_the_health_check_is_a_command() -> None:
    _, _, command = instructions("HEALTHCHECK")[0].partition(" CMD ")
    program, subcommand, *options = json.loads(command)
    assert program == "kvservice"
    main.commands[subcommand].make_context(subcommand, options)


def test_prometheus_scrapes_the_daemon(image_config: ServeConfig, compose: Any) -> None:
    configuration = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in configuration["scrape_configs"]}
    (target,) = jobs["kvservice"]["static_configs"][0]["targets"]
    assert target == f"daemon:{port_of(image_config.http_address)}"
    source, directory, _ = compose["services"]["prometheus"]["volumes"][0].split(":")
    assert (DEPLOY / source / "prometheus.yml").exists()
    assert f"--config.file={directory}/prometheus.yml" in compose["services"]["prometheus"]["command"]


def test_images_are_pinned_and_bases_are_said_once(compose: Any) -> None:
    services = compose["services"]
    bases = {name: value for name, value in arguments().items() if name.endswith("_IMAGE")}
    assert services["daemon-gpu"]["build"]["args"] == bases
    assert services["daemon"]["build"]["args"] == {"BASE_IMAGE": bases["BASE_IMAGE"]}
    for pinned in (*bases.values(), services["prometheus"]["image"], services["grafana"]["image"]):
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+[\w.-]*", pinned), f"{pinned} names no version"
    assert services["example"]["build"] == services["daemon"]["build"]
    built = [services[name]["image"] for name in (*DAEMONS, "example")]
    assert len(set(built)) == len(built), "two builds at a time must not write one image"


def test_the_build_context_has_what_is_copied_and_no_more() -> None:
    allowed = {
        line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    copied = {source for line in instructions("COPY") if not line.startswith("--from") for source in line.split()[:-1]}
    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)
