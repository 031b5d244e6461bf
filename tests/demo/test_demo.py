"""The demo passes, and it reports errors in the daemon and skipped operations as problems."""

from __future__ import annotations

import io
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console

from kvservice.cli import main
from kvservice.client import KVClient, Session, Step
from kvservice.demo import DemoResult, run
from kvservice.environment import missing_environment
from kvservice.errors import InvalidArgumentError
from kvservice.launch import Daemon

# The pool of the demo's model, and other sizes than the private daemon.
POOL: dict[str, Any] = {"num_layers": 4, "num_kv_heads": 2, "head_size": 64, "dtype": "float32", "block_size": 16}
NUM_BLOCKS = 100


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Use one thread. The model is so small that several threads mostly wait for each other on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def demo_daemon() -> Iterator[Daemon]:
    with Daemon(**POOL, num_blocks=NUM_BLOCKS, swap_space_gib=1 / 512) as running:
        yield running


@pytest.fixture
def play(demo_daemon: Daemon) -> Callable[..., DemoResult]:
    """Run the demo. Its only output goes to `console`."""

    def call(console: Console | None = None) -> DemoResult:
        quiet = console is None
        return run(address=demo_daemon.address, device="cpu", console=console or Console(), quiet=quiet)

    return call


def leave_a_block_in_the_prefix_cache(address: str) -> None:
    with KVClient(address) as client, client.session() as kv:
        sequence = kv.allocate(range(16))
        ones = np.ones((4, 16, 2, 64), np.float32)
        kv.open_step([sequence]).write(ones, ones)
        kv.free([sequence])
        assert client.stats().cached_blocks == 1


def test_all_is_well(demo_daemon: Daemon, play, monkeypatch, capsys) -> None:
    """Lines where there is no terminal. What was cached before is no problem."""
    leave_a_block_in_the_prefix_cache(demo_daemon.address)
    append, tokens = Session.append, defaultdict(list)

    def recorded(kv: Session, sequences: Any, token_ids: Any, **options: Any) -> Step:
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            tokens[sequence.sequence_id].append(token_id)
        return append(kv, sequences, token_ids, **options)

    monkeypatch.setattr(Session, "append", recorded)
    output = io.StringIO()
    result = play(Console(file=output, width=140))
    assert result.problems == ()
    assert capsys.readouterr() == ("", "")
    elapsed_s = result.elapsed_s
    assert result.to_json() == {
        "tokens_match": True,
        "sequences": 8,
        "tokens": 8 * 32,
        "prefix_cache_hit_tokens": 3 * 16,
        "cow_copies": 2,
        # The blocks of 52 prompt tokens and 13 of 14 new tokens are swapped out and in.
        "swapped_blocks": 2 * 5,
        "num_blocks": NUM_BLOCKS,
        "num_free_blocks_after": NUM_BLOCKS,
        "elapsed_s": elapsed_s,
        "device": "cpu",
        "dtype": "float32",
        "logits_error": None,
        "library_logits_error": None,
    }
    assert 0 < elapsed_s < 60
    # The samples of one prompt differ by their seeds.
    assert len({tuple(row) for row in tokens.values()}) == len(tokens) == 8
    text = output.getvalue()
    assert "\x1b" not in text
    assert "same prefix: prompt of 62 tokens, 48 of them from the prefix cache" in text
    assert "2 blocks copied on write" in text
    assert "0 active, 0 shared, 0 cached, 100 free" in text
    assert text.count("32 of 32") == 8


def test_what_did_not_happen_is_a_problem(play, monkeypatch) -> None:
    """Truncated tokens stay, so that others are generated after them, and the daemon counts nothing."""
    stats = KVClient.stats
    uncounted = {"prefix_cache_hit_tokens": 0, "cow_copies": 0, "swapped_out_blocks": 0}
    monkeypatch.setattr(KVClient, "stats", lambda client: replace(stats(client), **uncounted))
    monkeypatch.setattr(Session, "truncate", lambda *_: None)
    result = play()
    assert result.problems == (
        "tokens differ from the library's own: rewound",
        "tokens generated again differ",
        "the prefix cache was not hit",
        "nothing was copied on write",
        "nothing was swapped out and in",
    )


def test_blocks_that_stay_cached_are_a_problem_and_seen_on_a_live_map(play, monkeypatch) -> None:
    monkeypatch.setattr(Session, "reset_prefix_cache", lambda *_: None)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    output = io.StringIO()
    result = play(Console(file=output, force_terminal=True, width=140, height=40, color_system=None))
    assert result.num_free_blocks_after < NUM_BLOCKS
    assert result.problems == (f"{result.num_free_blocks_after} blocks are free of {NUM_BLOCKS}",)
    text = output.getvalue()
    assert "█" * 14 + "▓" * 5 in text
    assert "▒" * (NUM_BLOCKS - result.num_free_blocks_after) + "·" * result.num_free_blocks_after in text
    assert "swap tier: 5 of" in text
    assert text.count("32 of 32") == 8


@pytest.mark.third
@pytest.mark.slow
def test_blocks_that_are_not_freed_are_a_problem(play, monkeypatch) -> None:
    monkeypatch.setattr(Session, "free", lambda *_: None)
    result = play()
    assert result.num_free_blocks_after < NUM_BLOCKS
    assert result.problems == (f"{result.num_free_blocks_after} blocks are free of {NUM_BLOCKS}",)


def spoil_once(monkeypatch, layer: int, spoiled: Callable[..., Any]) -> None:
    """Replace one call of Step.attend, for the layer, in a step with several sequences."""
    attend = Step.attend
    num_calls = 0

    def attend_or_spoil(step: Step, of_layer: int, *tensors, **options):
        nonlocal num_calls
        num_calls += of_layer == layer and len(step.sequences) > 1
        if of_layer == layer and num_calls == 6:
            num_calls += 1
            return spoiled(attend, step, of_layer, tensors, options)
        return attend(step, of_layer, *tensors, **options)

    monkeypatch.setattr(Step, "attend", attend_or_spoil)


def exchange_outputs(attend, step, layer, tensors, options):
    """Let two sequences of a step get each other's output."""
    output = attend(step, layer, *tensors, **options)
    output[[0, 1]] = output[[1, 0]]
    return output


def repeat_key(attend, step, layer, tensors, options):
    """Let one token of a sequence get the key of another."""
    tensors[1][0] = tensors[1][1]
    return attend(step, layer, *tensors, **options)


def repeat_value(attend, step, layer, tensors, options):
    tensors[2][0] = tensors[2][1]
    return attend(step, layer, *tensors, **options)


def assert_mismatch(play, monkeypatch, layer: int, spoiled: Callable[..., Any]) -> None:
    with monkeypatch.context() as patched:
        spoil_once(patched, layer, spoiled)
        result = play()
    assert not result.tokens_match
    assert result.problems[0].startswith("tokens differ from the library's own: ")


def test_one_wrong_value_is_a_mismatch(play, monkeypatch) -> None:
    assert_mismatch(play, monkeypatch, 1, repeat_value)


@pytest.mark.third
@pytest.mark.slow
def test_one_wrong_tensor_of_any_layer_is_a_mismatch(play, monkeypatch) -> None:
    for layer, key_or_value in enumerate((repeat_key, repeat_value, repeat_key, repeat_value)):
        for spoiled in (exchange_outputs, key_or_value):
            assert_mismatch(play, monkeypatch, layer, spoiled)


@pytest.mark.third
@pytest.mark.slow
def test_in_bfloat16_one_wrong_attention_output_is_a_wrong_logit(monkeypatch) -> None:
    spoil_once(monkeypatch, 2, exchange_outputs)
    result = run(address=None, device="cpu", dtype="bfloat16", console=Console(), quiet=True)
    assert result.problems[0].startswith("logits err by ")


def test_a_daemon_with_another_pool_is_refused(daemon: Daemon) -> None:
    with pytest.raises(InvalidArgumentError, match="num_layers = 4") as refused:
        run(address=daemon.address, device="cpu", console=Console(), quiet=True)
    assert refused.value.field == "address"


def demo(*arguments: str) -> Result:
    """Run the command in this process. Without these variables it would start the process anew."""
    return CliRunner(env=missing_environment(os.environ)).invoke(main, ["demo", *arguments])


def test_the_command_in_bfloat16_starts_a_daemon_of_its_own() -> None:
    """The logits are as good as the library's own."""
    finished = demo("--dtype", "bfloat16", "--json")
    assert finished.exit_code == 0, finished.stderr
    result = json.loads(finished.stdout)
    assert 0 < result["logits_error"] < 2 * result["library_logits_error"]
    assert (result["dtype"], result["tokens"]) == ("bfloat16", 8 * 32)
    assert result["num_free_blocks_after"] == result["num_blocks"] == 72


@pytest.mark.slow
def test_a_device_that_there_is_not_is_one_clear_line() -> None:
    refused = demo("--device", "cuda:900")
    assert refused.exit_code == 1
    assert refused.stderr.splitlines()[-1].startswith("Error: the daemon did not start: Error: device")
