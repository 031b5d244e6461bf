"""Programs of other projects that tests run. Missing programs are installed if possible."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

import pytest


def require(packages: Mapping[str, str]) -> None:
    """Make programs available. `packages` maps their names to Debian packages. Skips the test with the reason if that
    fails."""
    missing = [program for program in packages if shutil.which(program) is None]
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip(f"{', '.join(missing)}: not installed; only root can, on Debian and its kin")
    names = sorted({packages[program] for program in missing})
    # The installation waits for another one to end, and starts no services.
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for command in (["update"], ["install", "--yes", "--no-install-recommends", *names]):
        apt = ["apt-get", "--option=DPkg::Lock::Timeout=300", *command]
        done = subprocess.run(apt, env=environment, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            pytest.skip(f"{' '.join(apt)} failed: {done.stderr[-500:]}")
