"""The demo of the tiers passes, and it reports what did not come back as problems."""

from __future__ import annotations

import io
import os
import re
import shutil
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from kvservice.cli import main
from kvservice.client import KVClient, Step
from kvservice.demo import TiersResult, run_tiers
from kvservice.environment import missing_environment
from kvservice.launch import Daemon

# Five and a half blocks of 64 tokens, of which the daemons keep the full ones; and the tokens of each story.
PROMPT_TOKENS, KEPT_TOKENS, NUM_TOKENS = 352, 320, 32
# Half of the story is told before the restart. Its last token has no K/V yet.
STORY_TOKENS = PROMPT_TOKENS + NUM_TOKENS // 2 - 1


def play(console: Console | None = None) -> TiersResult:
    return run_tiers(device="cpu", console=console or Console(), quiet=console is None)


def test_all_comes_back() -> None:
    """The command prints lines where there is no terminal. It ends with an error if something is missing."""
    # Without these variables the command would start the process anew.
    environment = missing_environment(os.environ) | {"COLUMNS": "140"}
    shown = CliRunner(env=environment).invoke(main, ["demo", "--tiers"])
    assert (shown.exit_code, shown.stderr) == (0, "")
    text = shown.stdout
    assert "\x1b" not in text
    assert f"{STORY_TOKENS} tokens of the story are back, none is computed again" in text
    assert f"{KEPT_TOKENS} of {PROMPT_TOKENS} tokens of the prompt are found in the tiers" in text
    assert text.count("32 of 32") == 3
    numbers = (
        rf"{3 * NUM_TOKENS} tokens in [\d.]+ s on cpu: (\d+) blocks written to the disk, (\d+) read from it; after the "
        rf"restart {STORY_TOKENS} tokens of the story and {KEPT_TOKENS} of the prompt were not computed again"
    )
    found = re.search(numbers, " ".join(text.split()))
    assert found is not None, text
    written, read = map(int, found.groups())
    assert written >= read >= 5


def test_it_needs_daemons_of_its_own() -> None:
    refused = CliRunner().invoke(main, ["demo", "--tiers", "--address", "x:1"])
    assert refused.exit_code == 2
    assert "--tiers starts its own daemons" in refused.output


@pytest.mark.third
@pytest.mark.slow
def test_wrong_attention_outputs_after_the_restart_are_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one layer, the heads of the output are exchanged. A terminal has a live map."""
    resume, attend = KVClient.resume, Step.attend

    def spoil(step: Step, layer: int, *tensors, **options):
        output = attend(step, layer, *tensors, **options)
        if layer == 2:
            output[:] = output.flip(1)
        return output

    def resume_spoiled(client: KVClient, *arguments, **options):
        monkeypatch.setattr(Step, "attend", spoil)
        return resume(client, *arguments, **options)

    monkeypatch.setattr(KVClient, "resume", resume_spoiled)
    pause = time.sleep
    # The map pauses for 0.04 s, so that people can read it; others wait for the daemon.
    monkeypatch.setattr(time, "sleep", lambda seconds: None if seconds == 0.04 else pause(seconds))
    output = io.StringIO()
    result = play(Console(file=output, force_terminal=True, width=140, height=40, color_system=None))
    assert not result.tokens_match
    assert result.problems == ("tokens differ from the library's own: story, prompt again",)
    text = output.getvalue()
    assert re.search(r"pool +\d+ blocks █+▒+·+ ", text)
    assert re.search(r"block store +\d\d blocks ▒{10,} ", text)
    assert re.search(r"disk +\d+ blocks ◆ ▒+", text)
    # At most 96 values are shown.
    assert re.search(r"▒{96}…", text)
    assert not re.search(r"▒{97}", text)


@pytest.mark.third
@pytest.mark.slow
def test_blocks_that_are_lost_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second daemon finds the saved session, but no values."""
    made, started = Daemon.__init__, list[str]()

    def without_values(daemon: Daemon, **options: Any) -> None:
        started.append(options["disk"])
        shutil.rmtree(Path(options["disk"]) / "values", ignore_errors=True)
        made(daemon, **options)

    monkeypatch.setattr(Daemon, "__init__", without_values)
    result = play()
    assert started[0] == started[1]
    assert result.tokens_match
    assert (result.tokens, result.story_tokens, result.prompt_tokens) == (3 * NUM_TOKENS, STORY_TOKENS, 0)
    assert result.written_values > 0
    assert result.to_json().keys() == {field.name for field in fields(result)} - {"problems"}
    assert result.problems == ("0 of 320 tokens of the prompt came back", "no blocks came from the disk")
