"""A container engine for tests: a running one, or a private one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import debian_packages
import pytest

PACKAGES = {
    "docker": "docker.io",
    "dockerd": "docker.io",
    "docker-compose": "docker-compose",
    "iptables": "iptables",
    "debootstrap": "debootstrap",
}
# A private engine keeps its images here for the next run.
DATA = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvservice-test" / "engine"


def output(*command: str, timeout_s: float = 60, **options: Any) -> str:
    """Return the standard output of a command. If it fails, fail the test with its whole output."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, **options)
    if done.returncode:
        pytest.fail(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout.strip()


def succeeds(*command: str, timeout_s: float = 60) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=timeout_s, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def wait_for(what: str, ready: Callable[[], Any], timeout_s: float = 90) -> Any:
    """Poll `ready` and return its first true value."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := ready():
            return value
        time.sleep(0.5)
    pytest.fail(f"{what}: not within {timeout_s} s")


def answers() -> bool:
    return succeeds("docker", "version", timeout_s=20)


@contextlib.contextmanager
def engine() -> Iterator[None]:
    """Provide an engine for `docker` and `docker-compose`. A private engine needs root and ends with the context."""
    if answers():
        yield
        return
    if os.environ.get("DOCKER_HOST"):
        pytest.skip(f"no container engine answers at {os.environ['DOCKER_HOST']}")
    if os.geteuid() != 0:
        pytest.skip("no container engine answers, and starting one takes root")
    debian_packages.require(PACKAGES)
    # The path is short, because the length of socket paths is limited.
    directory = Path(tempfile.mkdtemp(prefix="engine-"))
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as environment:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        # Tests in other processes have the same images, and an engine uses them alone.
        DATA.mkdir(parents=True, exist_ok=True)
        alone = stack.enter_context(DATA.with_suffix(".lock").open("w"))
        fcntl.flock(alone, fcntl.LOCK_EX)
        environment.setenv("DOCKER_HOST", f"unix://{directory}/socket")
        stack.enter_context(_private(directory))
        yield


@contextlib.contextmanager
def _private(directory: Path) -> Iterator[None]:
    places = {"data-root": DATA, "exec-root": directory / "exec", "pidfile": directory / "pid"}
    options = [f"--{name}={path}" for name, path in places.items()]
    log = directory / "log"
    with log.open("wb") as stream:
        # It runs in its own session, so that an interrupt at the terminal does not end it before the tests.
        process = subprocess.Popen(
            ["dockerd", f"--host=unix://{directory}/socket", *options],
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        wait_for("the container engine starts or ends", lambda: answers() or process.poll() is not None)
        if process.poll() is not None:
            pytest.skip(f"no container engine can run here: {log.read_text()[-500:]}")
        yield
    finally:
        process.terminate()
        process.wait(60)
