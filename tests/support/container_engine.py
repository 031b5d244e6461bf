"""A container engine for tests: a running one, or a private one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import debian_packages
import outliving
import pytest

PACKAGES = {
    "docker": "docker.io",
    "dockerd": "docker.io",
    "docker-compose": "docker-compose",
    "iptables": "iptables",
    "debootstrap": "debootstrap",
}
# What an engine does as root, and what it needs of the kernel.
KERNEL = {
    "namespaces": ["unshare", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "true"],
    "address translation": ["iptables", "--wait", "--table=nat", "--list-rules"],
}
# The kernel kills what is in the process namespace when the first process in it ends, or unshare does.
NAMESPACES = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
# A private engine keeps its images here for the next run.
DATA = debian_packages.CACHE / "engine"
# The prefix of the name of a run's directory.
PREFIX = "engine-"


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
        time.sleep(0.2)
    pytest.fail(f"{what}: not within {timeout_s} s")


def answers() -> bool:
    return succeeds("docker", "version", timeout_s=20)


@contextlib.contextmanager
def engine() -> Iterator[None]:
    """Provide an engine for `docker` and `docker-compose`. A private engine needs root. It ends with the context, and
    with its containers also by any other end of the test process."""
    if answers():
        yield
        return
    if os.environ.get("DOCKER_HOST"):
        pytest.fail(f"no container engine answers at {os.environ['DOCKER_HOST']}")
    if os.geteuid() != 0:
        pytest.skip("no container engine runs, and only root can start one")
    debian_packages.require(PACKAGES)
    for what, command in KERNEL.items():
        tried = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if tried.returncode:
            pytest.skip(f"the kernel gives a container engine no {what}: {tried.stderr.strip()}")
    outliving.watch()
    DATA.mkdir(parents=True, exist_ok=True)
    # Tests in other processes have the same images, and an engine uses them alone.
    with DATA.with_suffix(".lock").open("a+") as lock, pytest.MonkeyPatch.context() as environment:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with _directory(lock) as directory:
            environment.setenv("DOCKER_HOST", f"unix://{directory}/socket")
            with _private(directory, lock):
                _remove_remains()
                yield


@contextlib.contextmanager
def _directory(lock: TextIO) -> Iterator[Path]:
    """Make a directory for this run. The lock file names it, so that the next run removes it if this one is killed."""
    lock.seek(0)
    before = Path(lock.read().strip())
    if before.name.startswith(PREFIX):
        shutil.rmtree(before, ignore_errors=True)
    # The path is short, because the length of socket paths is limited.
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock.truncate(0)
    lock.write(str(directory))
    lock.flush()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _private(directory: Path, lock: TextIO) -> Iterator[None]:
    """Run an engine in namespaces of its own, so that its containers and their mounts end with it. It has the lock file
    open, so the lock is held until its last process has ended."""
    places = {"data-root": DATA, "exec-root": directory / "exec", "pidfile": directory / "pid"}
    options = [f"--{name}={path}" for name, path in places.items()]
    log = directory / "log"
    with log.open("wb") as stream:
        # It runs in its own session, so that an interrupt at the terminal does not end it before the tests.
        process = subprocess.Popen(
            [*NAMESPACES, "dockerd", f"--host=unix://{directory}/socket", *options],
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            pass_fds=[lock.fileno()],
        )
    try:
        wait_for("the container engine starts or ends", lambda: answers() or process.poll() is not None)
        if process.poll() is not None:
            pytest.fail(f"the container engine ended:\n{log.read_text()[-3000:]}")
        yield
    finally:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()


def _remove_remains() -> None:
    """Remove what a run that was killed has left in the engine's data, and with it the bridges of its networks."""
    if containers := output("docker", "ps", "--all", "--quiet").split():
        output("docker", "rm", "--force", "--volumes", *containers)
    for kind in ("network", "volume"):
        output("docker", kind, "prune", "--force")
