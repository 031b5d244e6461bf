"""Programs and libraries of other projects that tests use. What is missing is installed if possible."""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest


def require(packages: Mapping[str, str]) -> None:
    """Make programs available. `packages` maps their names to Debian packages. Skips the test with the reason if that
    fails."""
    _install([program for program in packages if shutil.which(program) is None], packages)


def require_libraries(packages: Mapping[str, Sequence[str]]) -> None:
    """Make shared libraries available to this process and to those that it starts from now on. `packages` maps their
    names to Debian packages, with those that they depend on; they are unpacked in a temporary folder. Skips the test
    with the reason if that fails."""
    missing = [library for library in packages if not _has_library(library)]
    if not missing:
        return
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        pytest.skip(f"{', '.join(missing)}: not installed; packages can be fetched on Debian and its kin only")
    folder = Path(tempfile.mkdtemp(prefix="libraries-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    names = sorted({name for library in missing for name in packages[library]})
    done = subprocess.run(
        ["apt-get", "download", *names], cwd=folder, capture_output=True, text=True, timeout=900, check=False
    )
    if done.returncode:
        pytest.skip(f"{', '.join(missing)}: not installed, and cannot be fetched: {done.stderr[-500:]}")
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", package, folder / "root"], timeout=900, check=True)
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


def _install(missing: Sequence[str], packages: Mapping[str, str]) -> None:
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip(f"{', '.join(missing)}: not installed; only root can, on Debian and its kin")
    names = sorted({packages[name] for name in missing})
    # The installation waits for another one to end, and starts no services.
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for command in (["update"], ["install", "--yes", "--no-install-recommends", *names]):
        apt = ["apt-get", "--option=DPkg::Lock::Timeout=300", *command]
        done = subprocess.run(apt, env=environment, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            pytest.skip(f"{' '.join(apt)} failed: {done.stderr[-500:]}")
