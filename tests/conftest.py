"""Fixtures that several packages share."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

# `python -m pytest` puts the checkout first. Without a compiled extension it must not shadow the installed package.
HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parent
if not any(CHECKOUT.glob("kvservice/_ext.*.so")):
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != CHECKOUT]

import mooncake_rig  # noqa: E402  the path comes first
import outliving  # noqa: E402  the path comes first
import ports  # noqa: E402
from small_pool import SMALL_POOL  # noqa: E402
from todays_part import ENTRIES  # noqa: E402
from waiting import PATIENCE_S  # noqa: E402

from kvservice.client import AsyncKVClient, KVClient  # noqa: E402  the path comes first
from kvservice.launch import Daemon  # noqa: E402

# On a busy machine a daemon may take longer to start than these limits are for users.
for face in (KVClient, AsyncKVClient):
    defaults: dict[str, Any] = vars(face)["__init__"].__kwdefaults__
    defaults.update(connect_timeout_s=PATIENCE_S, reconnect_wait_s=PATIENCE_S)

# It asks the collector who refers to random numbers, which it can answer until everything is frozen. Environments of
# real engines do not have it.
with contextlib.suppress(ModuleNotFoundError):
    import hypothesis  # noqa: F401

# These files wait for builds of container images.
WAITING = {"test_compose.py"}
# These have the longest tests. What starts last should be short, so that all workers end at about the same time.
LONG = (
    "server/test_failing_starts.py",
    "integrations/test_causal_lm_types.py",
    "engines/test_compiled.py",
    "server/test_state_machine.py",
    "lane/test_fuzz.py",
    "store/test_fuzz.py",
    "tiers/test_disk_fuzz.py",
    "tiers/test_mooncake_daemons.py",
    "top/test_app.py",
    "vllm/test_real_vllm.py",
    "vllm/test_real_bench.py",
    "vllm/test_real_groups.py",
    "vllm/test_real_recurrent.py",
)
# Each worker process loads torch and starts its own daemons.
MAX_WORKERS = 4
MAX_GPU_WORKERS = 16
MANY_FILES = 400
# A run may leave out these. A test counts for its first marker here; the value is how it runs.
LEFT_OUT = {
    "alone": '-m "gpu and alone" -n0',
    "gpu": '-m "gpu and not alone" --dist=worksteal',
    "third": "with TEST_PART=all",
    "slow": "-m slow",
    "brief": "-m brief",
}
NUM_LEFT_OUT = pytest.StashKey[dict[str, int]]()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run test files in parallel, two more than there are processors, because tests also wait. The threads of libraries
    in all workers share the processors."""
    num_processors = len(os.sched_getaffinity(0))
    most = MAX_GPU_WORKERS if config.option.markexpr.startswith("gpu") else MAX_WORKERS
    num_workers = min(num_processors + 2, most)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(num_processors // num_workers, 1)))
    return num_workers


def pytest_configure(config: pytest.Config) -> None:
    outliving.watch()
    config.stash[NUM_LEFT_OUT] = dict.fromkeys(LEFT_OUT, 0)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count the tests that no marker expression of this run takes."""
    for item in items:
        for marker in LEFT_OUT:
            if item.get_closest_marker(marker):
                item.config.stash[NUM_LEFT_OUT][marker] += 1
                break


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand a worker's counts to the process that prints the summary."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash[NUM_LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take a worker's counts. Every worker collects all tests, so the counts of all workers are equal."""
    node.config.stash[NUM_LEFT_OUT].update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say in one line which tests were left out, and how they run."""
    numbers = config.stash[NUM_LEFT_OUT]
    left = [f"{numbers[marker]} {marker} (pytest {how})" for marker, how in LEFT_OUT.items() if numbers[marker]]
    if left:
        terminalreporter.write_line(f"left out: {', '.join(reversed(left))}", yellow=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start with the files that mostly wait, so that others run in parallel with them; then those with long tests."""
    if "TEST_PART" in os.environ:
        thirds = [item for item in items if item.get_closest_marker("third")]
        other_days = set(thirds) - set(thirds[ENTRIES])
        config.hook.pytest_deselected(items=[item for item in items if item in other_days])
        items[:] = [item for item in items if item not in other_days]
    places = {HERE / file: place for place, file in enumerate(LONG)}
    items.sort(key=lambda item: (item.path.name not in WAITING, places.get(item.path, len(LONG))))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and tests are never garbage, so the collector goes through them neither while they are imported, which
    takes a third of the time, nor in each full collection of the run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def transfer_engine() -> None:
    """Mooncake's Transfer Engine can be started. Skips the test with the reason if it cannot."""
    mooncake_rig.programs()


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """A real daemon that tests share. Each test restores its state."""
    with Daemon(**SMALL_POOL) as running:
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[KVClient]:
    with KVClient(daemon.address) as connected:
        yield connected


@pytest.fixture(scope="module", autouse=True)
def _few_open_files() -> Iterator[None]:
    """Devices and telemetry that tests have dropped hold files until the garbage collector finds them."""
    yield
    if len(os.listdir("/proc/self/fd")) > MANY_FILES:
        gc.collect()


@pytest.fixture
def free_port() -> int:
    """A free TCP port of the loopback interface."""
    return ports.free_port()
