"""The systemd unit: it is valid, and agrees with the daemon."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import debian_packages
import pytest

from kvservice.config import ENV_PREFIX, ServeConfig
from kvservice.config_sources import load_config
from kvservice.environment import missing_environment
from kvservice.keeper.keeper import MAX_DESCRIPTORS, USAGE_ERROR
from kvservice.server.rpc.listening import needed_files

UNIT = Path(__file__).parents[2] / "deploy/systemd/kvservice.service"


@pytest.fixture(scope="module")
def settings() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for line in UNIT.read_text().splitlines():
        if line and not line.startswith(("#", "[")):
            name, _, value = line.partition("=")
            found[name].append(value)
    return found


def one(settings: dict[str, list[str]], name: str) -> str:
    (value,) = settings[name]
    return value


def test_systemd_keeps_what_the_keeper_would(settings: dict[str, list[str]]) -> None:
    assert one(settings, "FileDescriptorStoreMax") == str(MAX_DESCRIPTORS)
    assert (one(settings, "Type"), one(settings, "NotifyAccess")) == ("notify", "main")
    # The daemon ends with status 0 when it hands over.
    assert one(settings, "Restart") == "always"
    assert one(settings, "RestartPreventExitStatus") == str(USAGE_ERROR)


def test_it_sets_what_grpc_and_malloc_read(settings: dict[str, list[str]]) -> None:
    assert missing_environment(dict(line.split("=", 1) for line in settings["Environment"])) == {}


def test_its_options_are_options_and_fit_its_limits(settings: dict[str, list[str]]) -> None:
    environ = dict(line.split("=", 1) for line in settings["Environment"])
    config = load_config({}, {name: value for name, value in environ.items() if name.startswith(ENV_PREFIX)})
    assert config.unix_socket == "%t/kvservice/kvservice.sock"
    assert one(settings, "RuntimeDirectory") == "kvservice"
    assert int(one(settings, "TimeoutStopSec")) > ServeConfig().drain_timeout_s
    assert int(one(settings, "LimitNOFILE")) >= sum(needed_files(config).values())


def test_systemd_accepts_it(tmp_path: Path) -> None:
    debian_packages.require({"systemd-analyze": "systemd"})
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/kvservice/bin/kvservice", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    unit.write_text(unit.read_text().replace("Restart=always", "Restart=sometimes"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "restart specifier" in done.stderr
