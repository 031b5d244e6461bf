"""Programs and libraries of other projects that tests use. What is missing is installed if possible."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest


def require(packages: Mapping[str, str]) -> None:
    """Make programs available. `packages` maps their names to Debian packages. Skips the test with the reason if that
    fails."""
    _install([program for program in packages if shutil.which(program) is None], packages)


def require_libraries(packages: Mapping[str, str]) -> None:
    """Make shared libraries available. `packages` maps their names to Debian packages. Skips the test with the reason
    if that fails."""
    _install([library for library in packages if not _has_library(library)], packages)


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
