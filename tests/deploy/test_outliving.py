"""Nothing that a test process has started is left when it is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import outliving
from waiting import until

ENVIRONMENT = outliving.unmarked() | {"PYTHONPATH": str(Path(outliving.__file__).parent)}
# A test process. Of what it starts, one process is in another session, and one has lost its parent.
TESTS = """
import os, subprocess, sys, outliving
outliving.watch()
subprocess.Popen(["sh", "-c", "(sleep 1000 &); exec sleep 1000"], start_new_session=True, stdout=subprocess.DEVNULL)
print(os.environ[outliving.MARK], flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_has_started_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TESTS], env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as tests:
        assert tests.stdout is not None
        mark = tests.stdout.readline().strip()
        until(lambda: len(outliving.marked(mark)) == 2)
        tests.kill()
    until(lambda: not outliving.marked(mark))


def test_a_command_runs_at_the_end_unless_the_process_cleans_up_itself(tmp_path: Path) -> None:
    with outliving.at_the_end("touch", str(tmp_path / "left")):
        pass
    killed = f"""if True:
        import os, outliving
        with outliving.at_the_end("touch", {str(tmp_path / "killed")!r}):
            os.kill(os.getpid(), 9)
    """
    subprocess.run([sys.executable, "-c", killed], env=ENVIRONMENT, check=False)
    until((tmp_path / "killed").exists)
    assert not (tmp_path / "left").exists()
