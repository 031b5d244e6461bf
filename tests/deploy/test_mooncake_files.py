"""The files with which a Mooncake Store is deployed are consistent with the daemon and with each other."""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path
from typing import Any

import debian_packages
import kubernetes_validate
import pytest
import yaml
from each_row import each_row

from kvservice.config import ENV_PREFIX, ServeConfig
from kvservice.config_sources import load_config

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
DAEMONS = ("daemon-a", "daemon-b")
VERSIONS = ("1.29", kubernetes_validate.latest_version())


@pytest.fixture
def services() -> Any:
    """Return the services of the compose file, with every variable replaced by its default."""
    text = (DEPLOY / "docker-compose.mooncake.yml").read_text()
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))["services"]


def option(words: list[str], name: str) -> str:
    """Return the value of an option of a command line."""
    (value,) = [word.partition("=")[2] for word in words if word.startswith(f"--{name}=")]
    return value


def config_of(service: Any) -> ServeConfig:
    return load_config({}, service["environment"])


def test_daemons_are_equal_but_for_their_ports(services: Any) -> None:
    first, second = (services[name] | {"ports": None} for name in DAEMONS)
    assert first == second
    published = [port for name in DAEMONS for port in services[name]["ports"]]
    assert len({port.split(":")[1] for port in published}) == 4
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in published)


def test_only_the_daemons_can_be_reached(services: Any) -> None:
    assert {name for name, service in services.items() if "ports" in service} == set(DAEMONS)
    for name in ("master", "node"):
        assert services[name]["networks"] == ["store"]
    text = yaml.safe_load((DEPLOY / "docker-compose.mooncake.yml").read_text())
    assert text["networks"]["store"]["internal"]


def test_all_find_the_master(services: Any) -> None:
    address = f"master:{option(services['master']['entrypoint'], 'rpc_port')}"
    assert option(services["node"]["entrypoint"], "master") == address
    for name in DAEMONS:
        assert config_of(services[name]).mooncake == address


def test_a_daemon_gives_no_memory_and_opens_no_port(services: Any) -> None:
    for name in DAEMONS:
        config = config_of(services[name])
        assert config.store_gib
        assert not config.mooncake_segment_gib
        assert services[name]["mem_limit"] == "3g"
        assert config.store_gib + config.pool_gib + 0.5 < 3
        assert config.drain_timeout_s < int(services[name]["stop_grace_period"].removesuffix("s"))


def test_nothing_may_gain_privileges(services: Any) -> None:
    for service in services.values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["read_only"]
        assert "user" not in service, "the image's is nobody"


def test_compose_takes_the_file() -> None:
    debian_packages.require({"docker-compose": "docker-compose"})
    command = ["docker-compose", "--file=docker-compose.mooncake.yml", "config", "--quiet"]
    done = subprocess.run(command, cwd=DEPLOY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def manifests(file: str) -> list[Any]:
    return list(yaml.safe_load_all((KUBERNETES / "mooncake" / file).read_text()))


WORKLOADS = {"master": "master.yaml", "node": "nodes.yaml"}


def pod_of(component: str) -> Any:
    (found,) = [each for each in manifests(WORKLOADS[component]) if each["kind"] == "Deployment"]
    return found["spec"]["template"]


def container_of(component: str) -> Any:
    (found,) = pod_of(component)["spec"]["containers"]
    return found


def test_manifests_follow_the_schemas() -> None:
    """`validate` raises if a field is unknown or has the wrong type."""
    with each_row() as row:
        for file, version in itertools.product(("master.yaml", "nodes.yaml", "network.yaml"), VERSIONS):
            with row(f"{file} {version}"):
                for each in manifests(file):
                    kubernetes_validate.validate(each, version, strict=True)


def test_the_kustomization_names_all_files() -> None:
    folder = KUBERNETES / "mooncake"
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    named = {*kustomization["resources"][1:], *(patch["path"] for patch in kustomization["patches"])}
    assert named == {path.name for path in folder.iterdir()} - {"kustomization.yaml"}
    assert kustomization["resources"][0] == "../base"
    assert kustomization["images"] == [{"name": "kvservice", "newTag": "mooncake"}]


@pytest.fixture
def config() -> ServeConfig:
    """Return the configuration of the daemons in Kubernetes."""
    (base,) = list(yaml.safe_load_all((KUBERNETES / "base" / "config.yaml").read_text()))
    (patch,) = manifests("config.yaml")
    return load_config({}, base["data"] | patch["data"])


def test_the_daemons_find_the_master(config: ServeConfig) -> None:
    (service,) = [each for each in manifests("master.yaml") if each["kind"] == "Service"]
    ports = {each["name"]: each["port"] for each in service["spec"]["ports"]}
    address = f"{service['metadata']['name']}:{ports['rpc']}"
    command = container_of("master")["command"]
    assert option(command, "rpc_port") == str(ports["rpc"])
    assert option(command, "metrics_port") == str(ports["metrics"])
    assert config.mooncake == address
    assert option(container_of("node")["command"], "master") == address
    assert service["spec"]["selector"] == pod_of("master")["metadata"]["labels"]


def test_the_daemons_fit_into_their_limits(config: ServeConfig) -> None:
    (patch,) = manifests("statefulset.yaml")
    assert patch["spec"]["replicas"] == 2
    (daemon,) = patch["spec"]["template"]["spec"]["containers"]
    assert daemon["resources"]["requests"] == daemon["resources"]["limits"]
    memory = float(daemon["resources"]["limits"]["memory"].removesuffix("Gi"))
    assert memory >= config.pool_gib + config.swap_space_gib + config.store_gib + 0.5
    (name,) = [each["name"] for each in daemon["env"]]
    assert name.removeprefix(ENV_PREFIX).lower() in ServeConfig.model_fields


def test_a_node_fits_into_its_limit_and_its_ports_are_open() -> None:
    node = container_of("node")
    memory = float(node["resources"]["limits"]["memory"].removesuffix("Gi"))
    assert memory >= float(option(node["command"], "segment-gib")) + 0.5
    environment = {each["name"]: each.get("value") for each in node["env"]}
    policies = {each["metadata"]["name"]: each["spec"] for each in manifests("network.yaml")}
    (rule,) = policies["mooncake-node"]["ingress"]
    (ports,) = rule["ports"]
    assert environment["MC_MIN_RPC_PORT"] == str(ports["port"])
    assert environment["MC_MAX_RPC_PORT"] == str(ports["endPort"])
    for component in WORKLOADS:
        selected = policies[f"mooncake-{component}"]["podSelector"]["matchLabels"]
        assert selected == pod_of(component)["metadata"]["labels"]


def test_pods_meet_the_restricted_standard() -> None:
    for component in WORKLOADS:
        pod, container = pod_of(component)["spec"], container_of(component)
        assert pod["securityContext"]["runAsNonRoot"], component
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert not pod["automountServiceAccountToken"]


def test_the_image_has_the_library_and_what_it_needs() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert "'kvservice[mooncake]'" in dockerfile
    assert "libcurl4 libibverbs1 libnuma1" in dockerfile
