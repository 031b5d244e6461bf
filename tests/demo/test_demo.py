"""The demo passes, and it reports errors in the daemon and skipped operations as problems."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from rich.console import Console

from kvservice.client import Session, Step
from kvservice.demo import DemoResult, run, runner
from kvservice.demo.model import Picker, build_model, generate_alone
from kvservice.demo.script import BLOCK_SIZE, parts
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.transformers import pool_options
from kvservice.launch import Daemon


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Use one thread. The model is so small that several threads mostly wait for each other on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def demo_daemon() -> Iterator[Daemon]:
    """A daemon with the pool of the demo's model, and other sizes than the private daemon."""
    options = pool_options(build_model().config)
    with Daemon(**options, block_size=BLOCK_SIZE, num_blocks=100, swap_space_gib=1 / 512) as running:
        yield running


@pytest.fixture
def play(demo_daemon: Daemon) -> Callable[..., DemoResult]:
    """Run the demo. Its only output goes to `console`."""

    def call(console: Console | None = None) -> DemoResult:
        quiet = console is None
        return run(address=demo_daemon.address, device="cpu", console=console or Console(), quiet=quiet)

    return call


def test_all_is_well(play, capsys) -> None:
    result = play()
    assert result.problems == ()
    assert capsys.readouterr() == ("", "")
    elapsed_s = result.elapsed_s
    assert result.to_json() == {
        "tokens_match": True,
        "sequences": 8,
        "tokens": 8 * 32,
        "prefix_cache_hit_tokens": 3 * BLOCK_SIZE,
        "cow_copies": 2,
        # The blocks of 52 prompt tokens and 13 of 14 new tokens are swapped out and in.
        "swapped_blocks": 2 * 5,
        "num_blocks": 100,
        "num_free_blocks_after": 100,
        "elapsed_s": elapsed_s,
        "device": "cpu",
        "dtype": "float32",
        "logits_error": None,
        "library_logits_error": None,
    }
    assert 0 < elapsed_s < 60


def test_in_bfloat16_the_logits_are_as_good_as_the_librarys_own() -> None:
    result = run(address=None, device="cpu", dtype="bfloat16", console=Console(), quiet=True)
    assert result.problems == ()
    assert result.logits_error is not None
    assert result.library_logits_error is not None
    assert 0 < result.logits_error < 2 * result.library_logits_error
    assert (result.dtype, result.tokens) == ("bfloat16", 8 * 32)


def test_in_bfloat16_one_wrong_attention_output_is_a_wrong_logit(monkeypatch) -> None:
    def attend(original, step, tensors, options):
        output = original(step, 2, *tensors, **options)
        output[[0, 1]] = output[[1, 0]]
        return output

    spoil_once(monkeypatch, 2, attend)
    result = run(address=None, device="cpu", dtype="bfloat16", console=Console(), quiet=True)
    assert result.problems[0].startswith("logits err by ")


@pytest.mark.parametrize("layer", range(4))
def test_one_wrong_attention_output_is_a_mismatch(play, monkeypatch, layer) -> None:
    """In one layer, two sequences of a step get each other's output."""

    def attend(original, step, tensors, options):
        output = original(step, layer, *tensors, **options)
        output[[0, 1]] = output[[1, 0]]
        return output

    spoil_once(monkeypatch, layer, attend)
    assert_mismatch(play())


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("which", [1, 2], ids=["key", "value"])
def test_one_wrong_key_or_value_is_a_mismatch(play, monkeypatch, layer, which) -> None:
    """In one layer, one token of a sequence gets the key or value of another."""

    def attend(original, step, tensors, options):
        tensors[which][0] = tensors[which][1]
        return original(step, layer, *tensors, **options)

    spoil_once(monkeypatch, layer, attend)
    assert_mismatch(play())


def spoil_once(monkeypatch, layer, spoiled) -> None:
    """Replace one call of Step.attend, for the layer, in a step with several sequences."""
    attend = Step.attend
    num_calls = 0

    def attend_or_spoil(step: Step, of_layer: int, *tensors, **options):
        nonlocal num_calls
        num_calls += of_layer == layer and len(step.sequences) > 1
        if of_layer == layer and num_calls == 6:
            num_calls += 1
            return spoiled(attend, step, tensors, options)
        return attend(step, of_layer, *tensors, **options)

    monkeypatch.setattr(Step, "attend", attend_or_spoil)


def assert_mismatch(result: DemoResult) -> None:
    assert not result.tokens_match
    assert result.problems[0].startswith("tokens differ from the library's own: ")


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ("same prefix", "the prefix cache was not hit"),
        ("samples", "nothing was copied on write"),
        ("swapped", "nothing was swapped out and in"),
        ("rewound", "tokens generated again differ"),
    ],
)
def test_what_did_not_happen_is_a_problem(play, monkeypatch, part, problem) -> None:
    monkeypatch.setattr(runner, "parts", lambda: [one for one in parts() if one.name != part])
    result = play()
    assert result.tokens_match
    assert result.problems == (problem,)


@pytest.mark.parametrize("left_out", ["free", "reset_prefix_cache"])
def test_blocks_that_stay_behind_are_a_problem(play, monkeypatch, left_out) -> None:
    monkeypatch.setattr(Session, left_out, lambda *_: None)
    result = play()
    assert result.num_free_blocks_after < 100
    assert result.problems == (f"{result.num_free_blocks_after} blocks are free of 100",)
    monkeypatch.undo()
    assert play().problems == (), "what was cached before is no problem of a later run"


def test_the_tokens_are_far_from_ties() -> None:
    """Rounding changes logits by about 1e-5. The picked token leads by much more in every step of the demo."""
    model = build_model()
    leads: list[float] = []

    class Watched(Picker):
        def scores(self, logits: torch.Tensor) -> torch.Tensor:
            scores = super().scores(logits)
            first, second = scores.topk(2).values
            leads.append(float(first - second))
            return scores

    with torch.inference_mode():
        for part in parts():
            for seed in part.seeds:
                generate_alone(model, part.prompt, Watched(seed), part.num_tokens)
    assert len(leads) == 8 * 32
    assert min(leads) > 1e-2


def test_samples_differ_by_their_seeds() -> None:
    model = build_model()
    (part,) = (one for one in parts() if one.name == "samples")
    with torch.inference_mode():
        samples = [generate_alone(model, part.prompt, Picker(seed), 8) for seed in part.seeds]
    assert len(set(map(tuple, samples))) == 3


def test_lines_where_there_is_no_terminal(play) -> None:
    output = io.StringIO()
    play(Console(file=output, width=140))
    text = output.getvalue()
    assert "\x1b" not in text
    assert "same prefix: prompt of 62 tokens, 48 of them from the prefix cache" in text
    assert "2 blocks copied on write" in text
    assert "0 active, 0 shared, 0 cached, 100 free" in text
    assert text.count("32 of 32") == 8


def test_a_live_map_on_a_terminal(play, monkeypatch) -> None:
    monkeypatch.setattr("kvservice.demo.view._LIVE_PAUSE_S", 0)
    output = io.StringIO()
    play(Console(file=output, force_terminal=True, width=140, height=40, color_system=None))
    text = output.getvalue()
    assert "█" * 14 + "▓" * 5 in text
    assert "·" * 100 in text
    assert "swap tier: 5 of" in text
    assert text.count("32 of 32") == 8


def test_a_daemon_with_another_pool_is_refused(daemon: Daemon) -> None:
    with pytest.raises(InvalidArgumentError, match="num_layers = 4") as refused:
        run(address=daemon.address, device="cpu", console=Console(), quiet=True)
    assert refused.value.field == "address"


def test_the_command_starts_a_daemon_of_its_own() -> None:
    command = [sys.executable, "-P", "-m", "kvservice", "demo", "--json"]
    finished = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    result = json.loads(finished.stdout)
    assert result["tokens_match"] is True
    assert result["num_free_blocks_after"] == result["num_blocks"] == runner.NUM_BLOCKS
