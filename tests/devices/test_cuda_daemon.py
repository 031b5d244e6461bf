"""A daemon whose device fails, over `fake_cuda` in a separate process."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_model import POOL

from kvservice.client import KVClient
from kvservice.errors import InternalError

SUPPORT = Path(__file__).parents[1] / "support"
SCRIPT = """
import sys
sys.path.append({support!r})
from fake_cuda import FakeCuda
from kvservice.config_sources import load_config
from kvservice.server.daemon import run

class Failing(FakeCuda):
    \"\"\"Its kernels fail, once there is a client.\"\"\"
    def write_kv(self, *arguments):
        super().write_kv(*arguments)
        if len(self.launched) == 4:  # two warmed up, then the layers of a step
            self.error = "an illegal memory access was encountered"

sys.modules["kvservice._cuda"] = Failing(total_bytes=1 << 30)
sys.exit(run(load_config({options!r} | {{"unix_socket": sys.argv[1]}}, {{}})))
"""


def test_it_ends_with_its_own_status_and_one_line(tmp_path: Path) -> None:
    options: dict[str, Any] = POOL | {"device": "cuda", "tcp_address": "", "http_address": "", "max_message_mib": 1}
    options["allow_client_shm"] = "off"
    script, path, said = tmp_path / "failing.py", tmp_path / "k.sock", tmp_path / "log"
    script.write_text(SCRIPT.format(support=str(SUPPORT), options=options))
    with said.open("wb") as log:
        process = subprocess.Popen([sys.executable, str(script), str(path)], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while not path.exists():
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.02)
        query, kv_tensor = np.ones((2, 4, 32), np.float32), np.ones((2, 2, 32), np.float32)
        with KVClient(f"unix://{path}") as client, client.session() as kv:
            step = kv.open_step([kv.allocate([1, 2])])
            for layer in (0, 1):
                np.testing.assert_allclose(step.extend(layer, query, kv_tensor, kv_tensor), 1.0)
            step = kv.open_step([kv.allocate([3, 4])])
            with pytest.raises(InternalError, match="the device failed: an illegal memory access"):
                step.extend(0, query, kv_tensor, kv_tensor)
        assert process.wait(20) == 70
    finally:
        process.kill()
        process.wait()
    text = said.read_text()
    lost = "CRITICAL .*work on the pool failed, its content is lost: an illegal memory access was encountered\n"
    assert len(re.findall(lost, text)) == 1
    assert "Traceback" not in text
