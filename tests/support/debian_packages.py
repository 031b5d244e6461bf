"""Programs and libraries of other projects that tests use. What is missing is installed.

A test is skipped only where nothing can be installed: without root, or on another system than Debian and its kin. An
installation that fails is a failure of the test.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import outliving
import pytest

# What runs leave to the next one.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvservice-test"


def require(packages: Mapping[str, str]) -> None:
    """Make programs available. `packages` maps their names to Debian packages."""
    if not _missing(packages):
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip(f"{', '.join(_missing(packages))}: not installed; only root can, on Debian and its kin")
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "packages.lock").open("w") as alone:
        fcntl.flock(alone, fcntl.LOCK_EX)
        if missing := _missing(packages):
            _install(sorted({packages[name] for name in missing}))


def _missing(packages: Mapping[str, str]) -> list[str]:
    return [program for program in packages if shutil.which(program) is None]


def _install(names: Sequence[str]) -> None:
    # The installation starts no services. It ends by itself, because half of one is worse than none.
    environment = outliving.unmarked() | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for command in (["update"], ["install", "--yes", "--no-install-recommends", *names]):
        _run("apt-get", "--option=DPkg::Lock::Timeout=300", *command, env=environment)


def _run(*command: str, **options: Any) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, **options)
    if done.returncode:
        pytest.fail(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def require_libraries(packages: Mapping[str, Sequence[str]]) -> None:
    """Make shared libraries available to this process and to those that it starts from now on. `packages` maps their
    names to Debian packages, with those that they depend on; they are unpacked in a temporary folder."""
    missing = [library for library in packages if not _has_library(library)]
    if not missing:
        return
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        pytest.skip(f"{', '.join(missing)}: not installed; packages can be fetched on Debian and its kin only")
    folder = Path(tempfile.mkdtemp(prefix="libraries-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    names = sorted({name for library in missing for name in packages[library]})
    _run("apt-get", "download", *names, cwd=folder)
    for package in folder.glob("*.deb"):
        _run("dpkg-deb", "--extract", str(package), str(folder / "root"))
    libraries = [path for path in (folder / "root").rglob("*.so.*") if not path.is_symlink()]
    found = {str(path.parent) for path in libraries}
    _load(libraries)
    os.environ["LD_LIBRARY_PATH"] = ":".join([*sorted(found), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])


def _load(libraries: Sequence[Path]) -> None:
    """Load libraries into this process, which does not look at its environment any more: each after those that it
    needs."""
    while libraries:
        failed = [path for path in libraries if not _loads(path)]
        if len(failed) == len(libraries):
            return
        libraries = failed


def _loads(path: Path) -> bool:
    try:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


def _has_library(name: str) -> bool:
    # In another process, so that this one loads nothing.
    command = [sys.executable, "-c", f"import ctypes; ctypes.CDLL({name!r})"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
