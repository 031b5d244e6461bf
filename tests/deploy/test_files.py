"""The files of deploy/ are consistent with each other and with the daemon. These tests need no container engine."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import ssl
import subprocess
from pathlib import Path
from typing import Any

import debian_packages
import pytest
import yaml
from each_row import each_row

from kvservice.auth import CertificateFiles, Certificates
from kvservice.cli import main
from kvservice.config import ENV_PREFIX, GIB, ServeConfig
from kvservice.config_sources import load_config
from kvservice.environment import missing_environment
from kvservice.observer.web_api import FRESH_S
from kvservice.server.rpc.listening import check_addresses

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
# The instructions of the Dockerfile, with continued lines joined.
INSTRUCTIONS = [
    line.split(maxsplit=1)
    for line in re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", DOCKERFILE)).splitlines()
    if line
]
IMAGES = ("cpu", "mooncake", "cuda")
DAEMONS = ("daemon", "daemon-gpu")
DEFAULTS = ServeConfig()


def instructions(name: str, stage: str | None = None) -> list[str]:
    """Return the arguments of an instruction: of all stages, or of one stage and its base stages."""
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


def image_config(image: str) -> ServeConfig:
    """Return the daemon's configuration inside an image. Raises if the image sets an unknown option."""
    environment = image_environment(image)
    return load_config({}, {name: value for name, value in environment.items() if name.startswith(ENV_PREFIX)})


@pytest.fixture
def compose() -> Any:
    """Return the compose file, with every variable replaced by its default."""
    text = (DEPLOY / "docker-compose.yml").read_text()
    assert "${" in text
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))


@pytest.fixture
def dotenv() -> dict[str, str]:
    lines = (DEPLOY / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def port_of(address: str) -> str:
    return address.rpartition(":")[2]


def test_images_set_what_processes_need_before_they_start() -> None:
    ours = (ENV_PREFIX, "PATH", "NVIDIA_")
    for image in IMAGES:
        others = {name: value for name, value in image_environment(image).items() if not name.startswith(ours)}
        assert others == missing_environment({}), image


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
    (default,) = re.findall(r"set\(CMAKE_CUDA_ARCHITECTURES (\d.*)\)", cmake)
    assert arguments()["CUDAARCHS"].split(";") == default.split()


def test_the_daemon_is_reached_from_outside_its_container(compose: Any) -> None:
    for config in map(image_config, IMAGES):
        assert config.tcp_address.startswith("0.0.0.0:")
        assert config.http_address.startswith("0.0.0.0:")
        ports = [port_of(config.tcp_address), port_of(config.http_address)]
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


def test_the_socket_lies_in_the_shared_volume(compose: Any) -> None:
    assert "socket" in compose["volumes"]
    for config in map(image_config, IMAGES):
        directory = str(Path(config.unix_socket).parent)
        assert instructions("VOLUME") == [directory]
        for name in (*DAEMONS, "example"):
            assert f"socket:{directory}" in compose["services"][name]["volumes"]
        assert compose["services"]["example"]["command"] == [f"unix:{config.unix_socket}"]


def test_one_of_the_daemons_is_started_and_found_under_one_name(compose: Any, dotenv: dict[str, str]) -> None:
    profiles = {name: service.get("profiles") for name, service in compose["services"].items()}
    assert [profiles[name] for name in DAEMONS] == [["cpu"], ["gpu"]]
    assert dotenv["COMPOSE_PROFILES"].split(",") == ["cpu", *profiles["example"]]
    assert compose["services"]["daemon-gpu"]["networks"]["default"]["aliases"] == ["daemon"]
    (device,) = compose["services"]["daemon-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "device_ids": ["0"], "capabilities": ["gpu"]}
    targets = [compose["services"][name]["build"]["target"] for name in DAEMONS]
    assert targets == ["cpu", "cuda"]


def test_what_is_set_beside_the_compose_file_is_used_there(compose: Any, dotenv: dict[str, str]) -> None:
    options = {name for name in dotenv if name.startswith(ENV_PREFIX)}
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
    for image in IMAGES:
        user, _, group = instructions("USER", image)[-1].partition(":")
        assert int(user) > 0
        assert int(group) > 0


def test_the_health_check_is_a_command() -> None:
    _, _, command = instructions("HEALTHCHECK")[0].partition(" CMD ")
    program, subcommand, *options = json.loads(command)
    assert program == "kvservice"
    main.commands[subcommand].make_context(subcommand, options)


def test_prometheus_scrapes_the_daemon(compose: Any) -> None:
    configuration = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in configuration["scrape_configs"]}
    (target,) = jobs["kvservice"]["static_configs"][0]["targets"]
    assert {target} == {f"daemon:{port_of(image_config(image).http_address)}" for image in IMAGES}
    source, directory, _ = compose["services"]["prometheus"]["volumes"][0].split(":")
    assert (DEPLOY / source / "prometheus.yml").exists()
    assert f"--config.file={directory}/prometheus.yml" in compose["services"]["prometheus"]["command"]
    timeout = configuration["global"]["scrape_timeout"]
    assert float(timeout.removesuffix("s")) >= 2 * FRESH_S, "it learns of a daemon that does not answer"


@pytest.fixture
def compose_tls() -> Any:
    text = (DEPLOY / "docker-compose.tls.yml").read_text()
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))


def test_with_tls_the_daemon_may_be_published(compose_tls: Any) -> None:
    with each_row() as row:
        for name, image in itertools.product(DAEMONS, IMAGES):
            with row(f"{name} of {image}"):
                daemon = compose_tls["services"][name]
                options = dict(line.split("=") for line in daemon["environment"] if "=" in line)
                config = load_config({"tcp_address": image_config(image).tcp_address}, options)
                check_addresses(config)
                assert not config.insecure, "which .env says"
                (volume,) = daemon["volumes"]
                _, directory, mode = volume.split(":")
                assert mode == "ro"
                files = (config.tls_cert, config.tls_key, config.auth_tokens)
                assert {str(Path(file).parent) for file in files} == {directory}, "one directory: new files are seen"


def test_with_tls_prometheus_asks_by_https(compose: Any, compose_tls: Any) -> None:
    prometheus = compose_tls["services"]["prometheus"]
    plain, encrypted = (
        yaml.safe_load((DEPLOY / "prometheus" / name).read_text()) for name in ("prometheus.yml", "prometheus.tls.yml")
    )
    job = encrypted["scrape_configs"][0]
    assert job.pop("scheme") == "https"
    (mounted,) = prometheus["volumes"]
    assert job.pop("tls_config") == {"ca_file": mounted.split(":")[1]}
    assert encrypted == plain, "else they are the same"
    command = [line.replace("prometheus.tls.yml", "prometheus.yml") for line in prometheus["command"]]
    assert command == compose["services"]["prometheus"]["command"]


def test_compose_takes_both_files() -> None:
    debian_packages.require({"docker-compose": "docker-compose"})
    files = ("--file=docker-compose.yml", "--file=docker-compose.tls.yml")
    done = subprocess.run(["docker-compose", *files, "config"], cwd=DEPLOY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    merged = yaml.safe_load(done.stdout)["services"]["daemon"]
    assert merged["environment"]["KVSERVICE_INSECURE"] == "false"
    assert len(merged["volumes"]) == 2


def test_certificates_are_made_that_clients_accept(tmp_path: Path) -> None:
    debian_packages.require({"openssl": "openssl"})

    def make(*names: str) -> Certificates:
        subprocess.run([DEPLOY / "make-certificates.sh", tmp_path, *names], capture_output=True, check=True)
        return Certificates.read(CertificateFiles(tmp_path / "tls.crt", tmp_path / "tls.key", tmp_path / "ca.crt"))

    first = make("daemon", "kv1.example.a2.b3.c4", "192.0.2.7", "::1")
    for name in ("daemon", "kv1.example.a2.b3.c4", "192.0.2.7", "::1"):
        shake_hands(first, name)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(first, "other")
    assert {file.name: file.stat().st_mode & 0o077 for file in tmp_path.glob("*.key")} == {"ca.key": 0, "tls.key": 0}
    again = make("other")
    assert again.client_ca == first.client_ca, "the authority stays"
    shake_hands(again, "other")


def test_an_authority_is_never_replaced(tmp_path: Path) -> None:
    debian_packages.require({"openssl": "openssl"})
    command: list[str | Path] = [DEPLOY / "make-certificates.sh", tmp_path, "daemon"]
    subprocess.run(command, capture_output=True, check=True)
    (tmp_path / "ca.key").unlink()
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "put ca.key back" in refused.stderr
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before, "nothing changes"


def shake_hands(certificates: Certificates, name: str) -> None:
    """Run a TLS handshake in memory, as a client that trusts the authority and expects this name."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    certificates.load_into(server)
    client.load_verify_locations(cadata=certificates.client_ca.decode())
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for end in ends * 2:
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    assert ends[0].version() == "TLSv1.3"


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
