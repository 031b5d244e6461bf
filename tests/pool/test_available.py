"""Available memory within the limits of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest
from constants import set_constants

from kvservice.pool import available_bytes

MIB = 1 << 20
# Per version: the content of /proc/self/cgroup, the path of the groups, and the names of the files.
VERSIONS = {
    2: ("0::/service/engine\n", "", ("memory.max", "memory.current", "inactive_file")),
    1: (
        "5:cpu,memory:/service/engine\n4:cpuset:/\n0::/\n",
        "memory",
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ),
}


class Groups:
    def __init__(self, path: Path, version: int) -> None:
        self.own, where, self._names = VERSIONS[version]
        self._root = path / where
        self._root.mkdir(exist_ok=True)

    def limit(self, group: str, limit: str, used: int, cached: int = 0) -> None:
        path = self._root / group
        path.mkdir(parents=True, exist_ok=True)
        for name, value in zip(self._names, (f"{limit}\n", f"{used}\n", ""), strict=True):
            if value:
                (path / name).write_text(value)
        (path / "memory.stat").write_text(f"anon 5\n{self._names[2]} {cached}\nfile 7\n")


@pytest.fixture(params=VERSIONS)
def groups(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    """Return the groups of a process on a host with 1000 MiB of available memory."""
    made = Groups(tmp_path, request.param)
    own, memory = tmp_path / "own", tmp_path / "meminfo"
    own.write_text(made.own)
    memory.write_text(f"MemTotal: 1 kB\nMemAvailable:   {1000 << 10} kB\nBuffers: 2 kB\n")
    set_constants(monkeypatch, "kvservice.pool", CGROUPS=tmp_path, OWN_CGROUPS=own, MEMORY_INFO=memory)
    return made


def test_without_a_limit_it_is_the_hosts(groups: Groups) -> None:
    assert available_bytes() == 1000 * MIB
    groups.limit("service/engine", "max", 3 * MIB)
    assert available_bytes() == 1000 * MIB


def test_the_tightest_of_its_groups_counts(groups: Groups) -> None:
    groups.limit("", str(150 * MIB), 50 * MIB)
    assert available_bytes() == 100 * MIB
    groups.limit("service", str(90 * MIB), 40 * MIB)
    assert available_bytes() == 50 * MIB
    groups.limit("service/engine", str(30 * MIB), 10 * MIB)
    assert available_bytes() == 20 * MIB
    groups.limit("service/another", str(1 * MIB), 1 * MIB)
    assert available_bytes() == 20 * MIB


def test_files_that_can_be_dropped_are_not_in_the_way(groups: Groups) -> None:
    groups.limit("service/engine", str(100 * MIB), 90 * MIB, cached=60 * MIB)
    assert available_bytes() == 70 * MIB


def test_a_group_outside_of_what_is_seen(groups: Groups, tmp_path: Path) -> None:
    """A container sees only its own groups, under their outside names."""
    (tmp_path / "own").write_text(groups.own.replace("/service", "/../elsewhere"))
    groups.limit("", str(150 * MIB), 50 * MIB)
    assert available_bytes() == 100 * MIB
