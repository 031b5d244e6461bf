"""The manifests of deploy/kubernetes are valid for Kubernetes, the Prometheus operator and the daemon."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import kubernetes_validate
import pytest
import yaml
from each_row import each_row

from kvservice.config import ENV_PREFIX, ServeConfig
from kvservice.config_sources import load_config
from kvservice.server.rpc.listening import check_addresses

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = ("base", "gpu", "sidecar")
VERSIONS = ("1.29", kubernetes_validate.latest_version())
RULES = sorted((DEPLOY / "prometheus" / "rules").glob("*.yml"))


@functools.cache
def built(overlay: str) -> str:
    commands = {"kubectl": ["kubectl", "kustomize"], "kustomize": ["kustomize", "build"]}
    for program, command in commands.items():
        if shutil.which(program):
            done = subprocess.run([*command, KUBERNETES / overlay], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            return done.stdout
    # The kubectl of Debian 12 does not know inline patches.
    pytest.skip("neither kubectl nor kustomize is installed, and Debian has none that is new enough")


def objects(overlay: str) -> list[Any]:
    return list(yaml.safe_load_all(built(overlay)))


def the(overlay: str, kind: str) -> Any:
    (found,) = [each for each in objects(overlay) if each["kind"] == kind]
    return found


def pod(overlay: str) -> Any:
    return the(overlay, "StatefulSet")["spec"]["template"]


def container(overlay: str, name: str = "daemon") -> Any:
    (found,) = [each for each in pod(overlay)["spec"]["containers"] if each["name"] == name]
    return found


def config(overlay: str) -> ServeConfig:
    """Return the configuration that the daemon reads in this overlay. Raises if it has an unknown option."""
    return load_config({}, the(overlay, "ConfigMap")["data"])


def gib(quantity: str) -> float:
    assert quantity.endswith("Gi")
    return float(quantity.removesuffix("Gi"))


def test_objects_follow_the_schemas() -> None:
    """The validator raises for an unknown or missing field."""
    with each_row() as row:
        for overlay in OVERLAYS:
            with row(overlay):
                for each, version in itertools.product(objects(overlay), VERSIONS):
                    kubernetes_validate.validate(each, version, strict=True)


def test_the_schemas_notice_what_does_not_exist() -> None:
    stateful_set = the("base", "StatefulSet")
    stateful_set["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(jsonschema.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(stateful_set, VERSIONS[0], strict=True)


@pytest.fixture
def pod_monitor() -> Any:
    return yaml.safe_load((KUBERNETES / "monitoring" / "podmonitor.yaml").read_text())


def as_understood(kind: Literal["PodMonitor", "PrometheusRule"], content: Any) -> Any:
    """Return the object as the operator's types parse it, without unknown fields."""
    # Their import takes seconds, which not every process that collects this file should spend.
    from cloudcoil.models.prometheus_operator import v1

    types: dict[str, type[v1.PodMonitor | v1.PrometheusRule]] = {
        "PodMonitor": v1.PodMonitor,
        "PrometheusRule": v1.PrometheusRule,
    }
    return json.loads(types[kind].model_validate(content).model_dump_json(by_alias=True, exclude_none=True))


def test_the_operator_understands_the_pod_monitor(pod_monitor: Any) -> None:
    # The operator's types add the default action of a relabeling.
    for endpoint in pod_monitor["spec"]["podMetricsEndpoints"]:
        for relabeling in endpoint["relabelings"]:
            relabeling.setdefault("action", "replace")
    assert as_understood("PodMonitor", pod_monitor) == pod_monitor


def test_the_operator_understands_the_rules() -> None:
    """Build the rules objects as deploy/README.md does."""
    assert RULES
    for path in RULES:
        head = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": {"name": path.stem}}
        rule = head | {"spec": yaml.safe_load(path.read_text())}
        assert as_understood("PrometheusRule", rule) == rule, path.name


def test_prometheus_finds_the_pod_and_the_alerts_its_job(pod_monitor: Any) -> None:
    spec = pod_monitor["spec"]
    labels = pod("base")["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    assert labels[spec["jobLabel"]] == "kvservice"
    (endpoint,) = spec["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["scheme"]) == ("http", "https")
    volumes = {each["name"]: each for each in pod("base")["spec"]["volumes"]}
    assert endpoint["tlsConfig"]["ca"]["secret"]["name"] == volumes["tls"]["secret"]["secretName"]


def test_ports_are_those_of_the_image() -> None:
    with each_row() as row:
        for overlay in OVERLAYS:
            with row(overlay):
                image = dict(
                    line.split("=", 1) for line in (DEPLOY / "Dockerfile").read_text().split() if "_ADDRESS=" in line
                )
                ports = {each["name"]: each["containerPort"] for each in container(overlay)["ports"]}
                assert image[f"{ENV_PREFIX}TCP_ADDRESS"] == f"0.0.0.0:{ports['grpc']}"
                assert image[f"{ENV_PREFIX}HTTP_ADDRESS"] == f"0.0.0.0:{ports['http']}"
                assert {each["name"]: each["port"] for each in the(overlay, "Service")["spec"]["ports"]} == ports
                admitted = [
                    port["port"] for rule in the(overlay, "NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]
                ]
                assert admitted == ["grpc", "http"]


def test_probes_are_the_images_health_check() -> None:
    with each_row() as row:
        for overlay in OVERLAYS:
            with row(overlay):
                _, _, check = (DEPLOY / "Dockerfile").read_text().partition("HEALTHCHECK")
                command = json.loads(check.partition(" CMD ")[2].partition("\n")[0])
                for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                    assert container(overlay)[probe]["exec"]["command"] == command
                assert config(overlay).unix_socket, "where it asks, and needs no token"


def test_tls_and_tokens_come_from_secrets() -> None:
    with each_row() as row:
        for overlay in OVERLAYS:
            with row(overlay):
                options = config(overlay)
                check_addresses(options.model_copy(update={"tcp_address": "0.0.0.0:50051"}))
                assert not options.insecure
                mounts = {each["name"]: each for each in container(overlay)["volumeMounts"]}
                volumes = {each["name"]: each for each in pod(overlay)["spec"]["volumes"]}
                for volume, files in (("tls", (options.tls_cert, options.tls_key)), ("tokens", (options.auth_tokens,))):
                    assert {str(Path(file).parent) for file in files} == {mounts[volume]["mountPath"]}
                    assert mounts[volume]["readOnly"]
                    assert "subPath" not in mounts[volume], "such a file does not follow its secret"
                    assert volumes[volume]["secret"]["secretName"] == f"kvservice-{volume}"
                    # With fsGroup the pod's group needs read permission. The daemon refuses wider permissions.
                    assert volumes[volume]["secret"]["defaultMode"] == 0o440
                assert pod(overlay)["spec"]["securityContext"]["fsGroup"]


def test_everything_is_about_the_same_pods() -> None:
    with each_row() as row:
        for overlay in OVERLAYS:
            with row(overlay):
                labels = pod(overlay)["metadata"]["labels"]
                assert the(overlay, "Service")["spec"]["selector"] == labels
                for kind, field in (
                    ("StatefulSet", "selector"),
                    ("PodDisruptionBudget", "selector"),
                    ("NetworkPolicy", "podSelector"),
                ):
                    assert the(overlay, kind)["spec"][field]["matchLabels"] == labels
                assert {each["metadata"].get("namespace", "kvservice") for each in objects(overlay)} == {"kvservice"}


def test_the_daemon_may_drain_and_fits_into_its_limits() -> None:
    with each_row() as row:
        for overlay in OVERLAYS:
            with row(overlay):
                options = config(overlay)
                assert pod(overlay)["spec"]["terminationGracePeriodSeconds"] > options.drain_timeout_s
                resources = container(overlay)["resources"]
                assert resources["requests"] == resources["limits"]
                in_host_memory = options.swap_space_gib + (options.pool_gib if options.device == "cpu" else 0)
                assert gib(resources["limits"]["memory"]) >= in_host_memory + 0.5
                assert int(resources["limits"]["cpu"]) == options.num_threads


def test_the_gpu_is_asked_for_where_the_pool_is_on_it() -> None:
    assert config("base").device == "cpu"
    assert "nvidia.com/gpu" not in container("base")["resources"]["limits"]
    assert config("gpu").device == "cuda:0"
    assert config("gpu").pool_blocks is None, "the pool takes what is free"
    assert container("gpu")["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert container("gpu")["image"] == "kvservice:cuda"


def test_an_engine_in_the_pod_gets_a_lane() -> None:
    assert config("sidecar").shares_memory
    (mount,) = [each for each in container("sidecar", "engine")["volumeMounts"] if each["name"] == "socket"]
    assert mount in container("sidecar")["volumeMounts"]


def security_contexts(overlay: str) -> Iterator[tuple[Any, Any]]:
    spec = pod(overlay)["spec"]
    for each in spec["containers"]:
        yield spec["securityContext"], each["securityContext"]


def test_pods_meet_the_restricted_standard_that_their_namespace_enforces() -> None:
    with each_row() as row:
        for overlay in OVERLAYS:
            with row(overlay):
                assert (
                    the(overlay, "Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
                    == "restricted"
                )
                for of_pod, of_container in security_contexts(overlay):
                    assert of_pod["runAsNonRoot"]
                    assert of_pod["runAsUser"] > 0
                    assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}
                    assert of_container["allowPrivilegeEscalation"] is False
                    assert of_container["capabilities"] == {"drop": ["ALL"]}
                    assert of_container["readOnlyRootFilesystem"]
                assert all("hostPath" not in volume for volume in pod(overlay)["spec"]["volumes"])
                assert not pod(overlay)["spec"].keys() & {"hostNetwork", "hostPID", "hostIPC"}


def test_tokens_of_http_come_from_secrets_that_are_not_here() -> None:
    with each_row() as row:
        for overlay in OVERLAYS:
            with row(overlay):
                tokens = container(overlay)["env"]
                assert [token["name"] for token in tokens] == [f"{ENV_PREFIX}HTTP_TOKEN", f"{ENV_PREFIX}METRICS_TOKEN"]
                for token in tokens:
                    assert token["valueFrom"]["secretKeyRef"]["optional"]
                assert not [each for each in objects(overlay) if each["kind"] == "Secret"]
