"""A daemon on a GPU: its start, and its end after a device fault."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from kv_model import POOL

from kvservice.client import KVClient
from kvservice.errors import KVServiceError
from kvservice.launch import Daemon


def serve(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    sockets = ("--unix-socket", str(tmp_path / "k.sock"), "--tcp-address", "", "--http-address", "")
    return subprocess.run(
        [sys.executable, "-P", "-m", "kvservice", "serve", "--device", "cuda", *sockets, *arguments],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--num-blocks", "16777216"),
            r"num_blocks: 16777216 blocks of 2097152 bytes take \d+ bytes, the GPU has \d+ free of \d+",
        ),
        (("--pool-gib", "60000"), r"pool_gib: \d+ blocks of 2097152 bytes take \d+ bytes, the GPU has \d+ free of \d+"),
        (("--gpu-memory-utilization", "0.000001"), r"gpu_memory_utilization: no block of 2097152 bytes fits"),
        (("--device", "cuda:99"), r"device: cuda:99: CUDA devices there are: \d+"),
    ],
)
def test_what_cannot_be_served_is_one_clear_line(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    refused = serve(tmp_path, *arguments)
    assert refused.returncode == 1, refused.stderr
    assert re.match(rf"Error: {message}", refused.stderr.splitlines()[-1]), refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.alone
def test_the_pool_takes_its_share_of_the_memory() -> None:
    with (
        Daemon(device="cuda:0", gpu_memory_utilization=0.25, log_level="info") as daemon,
        KVClient(daemon.address) as client,
    ):
        info = client.info
        total = importlib.import_module("kvservice._cuda").memory_info(0)[1]
        # The fraction applies to free memory, which is nearly all memory on a GPU without other users.
        assert 0.5 * 0.25 * total < info.num_blocks * info.block_bytes < 0.25 * total
        assert f"serving {info.num_blocks} blocks of {info.block_bytes} bytes" in daemon.log.read_text()


FAULTY = """
import sys
from kvservice.config_sources import load_config
from kvservice.devices.kernels import CudaPoolKernels
from kvservice.server.daemon import run

right = CudaPoolKernels.attention_over

def broken(self, *arguments):
    call = right(self, *arguments)
    call.block_tables = 4096  # nobody's memory
    return call

CudaPoolKernels.attention_over = broken
sys.exit(run(load_config({options!r} | {{"unix_socket": sys.argv[1]}}, {{}})))
"""


def test_a_kernel_that_faults_ends_the_daemon_with_one_clear_line(tmp_path: Path) -> None:
    """After a fault the contents of the pool are unreliable, so the daemon must not continue."""
    options = POOL | {"device": "cuda", "tcp_address": "", "http_address": ""}
    script, path = tmp_path / "faulty.py", tmp_path / "k.sock"
    script.write_text(FAULTY.format(options=options))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, str(script), str(path)], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not path.exists():
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()  # noqa: PT018
            time.sleep(0.05)
        with KVClient(f"unix://{path}", transport="inline") as client, client.session() as kv:
            step = kv.open_step([kv.allocate([1, 2])])
            query, key = np.ones((2, 4, 32), np.float32), np.ones((2, 2, 32), np.float32)
            with pytest.raises(KVServiceError, match=r"the device failed|UNAVAILABLE|connect"):
                step.extend(0, query, key, key)
        assert process.wait(30) == 70, (tmp_path / "log").read_text()
        said = (tmp_path / "log").read_text()
        assert len(re.findall(r"CRITICAL .*work on the pool failed, its content is lost: .*", said)) == 1, said
        assert "Traceback" not in said
    finally:
        process.kill()
        process.wait()
