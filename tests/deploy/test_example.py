"""The example client without containers: the traffic that it causes, and that it survives a restart of the daemon."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

from small_pool import SMALL_POOL

from kvservice.client import KVClient
from kvservice.launch import Daemon

EXAMPLE = Path(__file__).parents[2] / "deploy" / "example_client.py"


def test_it_shares_forks_swaps_and_ends_its_sequences() -> None:
    specification = importlib.util.spec_from_file_location("example_client", EXAMPLE)
    assert specification is not None
    assert specification.loader is not None
    example = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    with Daemon(**SMALL_POOL) as daemon, KVClient(daemon.address) as client:
        with client.session() as first, client.session() as second:
            engines = [example.Engine(kv, seed) for seed, kv in enumerate((first, second))]
            for _ in range(150):
                for engine in engines:
                    engine.step()
        stats = client.stats()
    assert stats.prefix_cache_hit_tokens > 0
    assert stats.cow_copies > 0
    assert stats.evicted_blocks > 0
    assert stats.swapped_out_blocks >= stats.swapped_in_blocks > 0
    assert stats.sequences == 0


def test_it_tells_its_arguments_and_refuses_others() -> None:
    told, refused = (
        subprocess.run([sys.executable, "-P", str(EXAMPLE), *words], capture_output=True, text=True)
        for words in (["--help"], ["--adress", "unix:/absent"])
    )
    assert told.returncode == 0
    assert "ADDRESS" in told.stdout
    assert refused.returncode == 2
    assert "unrecognized arguments: --adress" in refused.stderr


def test_it_comes_back_to_a_daemon_that_was_started_anew(tmp_path: Path) -> None:
    socket = tmp_path / "kvservice.sock"
    command = [sys.executable, "-P", str(EXAMPLE), f"unix:{socket}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as example:
        assert example.stdout is not None
        try:
            for _ in range(2):
                with Daemon(**SMALL_POOL, unix_socket=socket):
                    # The client prints a line for each error until its sessions are open.
                    while "sessions over" not in (line := example.stdout.readline()):
                        assert line.startswith("starting anew: ")
                    assert line == "2 sessions over lane\n"
            example.send_signal(signal.SIGTERM)
            assert example.wait(60) == 0
        finally:
            example.kill()
