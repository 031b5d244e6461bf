"""The demo of the tiers passes, and it reports what did not come back as problems."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvservice.client import Step
from kvservice.demo import TiersResult, run_tiers
from kvservice.demo.acts import Act
from kvservice.demo.story import LARGE_BLOCK_SIZE, NUM_TOKENS
from kvservice.demo.tiers_view import tiers_map
from kvservice.demo.watch import Levels
from kvservice.launch import Daemon

PROMPT_TOKENS = 5 * LARGE_BLOCK_SIZE + LARGE_BLOCK_SIZE // 2
LEVELS = Levels(3, 4, 5, 0, 0, 6, True, 200, 1, 0, 0, 0, 0)


def play(console: Console | None = None) -> TiersResult:
    return run_tiers(device="cpu", console=console or Console(), quiet=console is None)


def test_all_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    result = play()
    assert result.problems == ()
    assert capsys.readouterr() == ("", "")
    assert result.tokens_match
    assert result.tokens == 3 * NUM_TOKENS
    assert result.story_tokens == PROMPT_TOKENS + NUM_TOKENS // 2 - 1
    assert result.prompt_tokens == 5 * LARGE_BLOCK_SIZE
    assert result.read_values >= 5
    assert result.written_values >= result.read_values


def test_lines_where_there_is_no_terminal() -> None:
    output = io.StringIO()
    result = play(Console(file=output, width=140))
    assert result.problems == ()
    text = output.getvalue()
    assert "\x1b" not in text
    assert f"{result.story_tokens} tokens of the story are back, none is computed again" in text
    assert f"{result.prompt_tokens} of {PROMPT_TOKENS} tokens of the prompt are found in the tiers" in text
    assert text.count("32 of 32") == 3


def test_wrong_attention_outputs_after_the_restart_are_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one layer, the heads of the output are exchanged."""
    come_back, attend = Act.come_back, Step.attend

    def spoil(step: Step, layer: int, *tensors, **options):
        output = attend(step, layer, *tensors, **options)
        if layer == 2:
            output[:] = output.flip(1)
        return output

    def come_back_spoiled(*arguments) -> None:
        monkeypatch.setattr(Step, "attend", spoil)
        come_back(*arguments)

    monkeypatch.setattr(Act, "come_back", come_back_spoiled)
    result = play()
    assert not result.tokens_match
    assert result.problems == ("tokens differ from the library's own: story, prompt again",)


def test_blocks_that_are_lost_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second daemon finds the saved session, but no values."""
    started: list[str] = []

    def without_values(**options: Any) -> Daemon:
        started.append(options["disk"])
        shutil.rmtree(Path(options["disk"]) / "values", ignore_errors=True)
        return Daemon(**options)

    monkeypatch.setattr("kvservice.demo.tiers.Daemon", without_values)
    result = play()
    assert started[0] == started[1]
    assert result.tokens_match
    assert result.problems == ("0 of 320 tokens of the prompt came back", "no blocks came from the disk")


def test_a_map_of_the_tiers() -> None:
    output = io.StringIO()
    Console(file=output, width=140, color_system=None).print(tiers_map(LEVELS))
    assert [line.rstrip() for line in output.getvalue().splitlines()] == [
        "pool          7 blocks ███▒▒▒▒·····",
        "block store   6 blocks ▒▒▒▒▒▒",
        "disk        200 blocks ◆ " + "▒" * 96 + "…",
        " " * 23 + "█ active ▒ cached · free   ◆ saved session",
    ]


def test_the_command() -> None:
    command = [sys.executable, "-P", "-m", "kvservice", "demo", "--tiers"]
    finished = subprocess.run([*command, "--json"], check=True, capture_output=True, text=True, timeout=180)
    assert json.loads(finished.stdout)["tokens_match"] is True
    refused = subprocess.run([*command, "--address", "x:1"], capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert "--tiers starts its own daemons" in refused.stderr
