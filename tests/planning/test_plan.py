"""Plans against figures computed by hand, mostly for Llama-3-8B."""

from __future__ import annotations

import json
import random
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from each_row import each_row

from kvservice.cli import main
from kvservice.config import ServeConfig
from kvservice.config_sources import load_config
from kvservice.errors import InvalidArgumentError
from kvservice.planning import (
    ConversationLoad,
    Gpu,
    PlanOptions,
    Trace,
    TracedRequest,
    find_gpu,
    make_plan,
    synthetic_trace,
)

GIB = 1 << 30
TIERS = ("host store", "disk")
GPUS = ("a100", "b200", "h100", "h200", "l40s")
LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16",
}  # fmt: skip
MIXTRAL = LLAMA_3_8B | {
    "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257}
OWN = Gpu("own", 100.0, 1000.0, 50.0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return tmp_path


def test_llama_3_8b(model: Path) -> None:
    plan = make_plan(PlanOptions(model, OWN, weights_gib=15.0, disk_gib=1000.0, prompt_tokens=8192), None)
    assert plan.token_bytes == 2 * 32 * 8 * 128 * 2 == 131072
    assert plan.block_bytes == 2 << 20
    pool, host, disk = plan.tiers
    assert (pool.blocks, pool.tokens) == (75 * 512, 75 * 8192)
    assert (host.tokens, host.sessions) == (64 * 8192, 64.0)
    assert disk.tokens == 1000 * 8192
    # 6.98e9 parameters in layers; 4 x 32 layers x 4096 x 4096 tokens of context on average.
    flops = 2 * 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4 * 32 * 4096 * 4096
    assert plan.prefill_tokens_per_s == pytest.approx(500e12 / flops)
    assert plan.break_even_gb_per_s == pytest.approx(131072 * 500e12 / flops / 1e9)
    assert host.load_ms == pytest.approx(131.072e6 / 50e9 * 1e3)
    assert disk.load_ms == pytest.approx(131.072e6 / 5e9 * 1e3)
    assert host.recompute_ms == pytest.approx(1e6 * flops / 500e12)
    assert disk.is_worth_loading
    assert plan.commands == (
        f"kvservice serve --model {model} --device cuda --block-size 16 --pool-gib 75 --store-gib 64 "
        "--disk DIRECTORY --disk-gib 1000 --weights NAME",
        "kvservice serve --store-gib 64 --pool-gib 0.1 --swap-space-gib 0 --disk DIRECTORY --disk-gib 1000",
    )


def test_parameters_are_those_that_models_are_known_for(tmp_path: Path) -> None:
    """The weights have all parameters, and a token meets those in layers."""
    gpu = Gpu("large", 1000.0, 1000.0, 50.0)
    models = (
        ("Llama 3 8B", LLAMA_3_8B, 6.98, 8.03, 2),
        ("Mixtral", MIXTRAL, 12.6, 46.7, 2),
        ("GPT-2", GPT2 | {"tie_word_embeddings": True}, 0.085, 0.124, 4),
    )
    with each_row() as row:
        for name, config, in_layers_b, total_b, item_bytes in models:
            (tmp_path / "config.json").write_text(json.dumps(config))
            with row(name):
                plan = make_plan(PlanOptions(tmp_path, gpu, prompt_tokens=1, efficiency=1.0), None)
                in_layers = 1000e12 / plan.prefill_tokens_per_s / 2
                assert in_layers == pytest.approx(in_layers_b * 1e9, rel=0.01)
                assert plan.weights_gib * GIB / item_bytes == pytest.approx(total_b * 1e9, rel=0.01)


def test_measured_figures_replace_estimates(model: Path) -> None:
    (model / "a.safetensors").write_bytes(bytes(1 << 20))
    plan = make_plan(PlanOptions(model, OWN, prefill_tokens_per_s=1000.0, disk_gib=1.0, disk_gb_per_s=0.1), None)
    assert plan.weights_gib == 1 / 1024
    assert plan.break_even_gb_per_s == pytest.approx(0.131072)
    assert not plan.tiers[-1].is_worth_loading
    assert "--disk" not in plan.commands[0]
    assert any(note.startswith("disk: loading takes longer") for note in plan.notes)


def test_several_gpus_have_their_part_each(model: Path) -> None:
    one, two = (make_plan(PlanOptions(model, OWN, num_gpus=n, weights_gib=10.0), None) for n in (1, 2))
    assert (one.tiers[0].gib, two.tiers[0].gib) == (80.0, 170.0)
    assert two.prefill_tokens_per_s == pytest.approx(2 * one.prefill_tokens_per_s)
    assert two.tiers[1].load_ms == one.tiers[1].load_ms / 2
    assert "--num-kv-heads 4 " in two.commands[0]
    assert "--pool-gib 85 --store-gib 32" in two.commands[0]


def test_an_fp8_cache_holds_twice_as_much(model: Path) -> None:
    plan = make_plan(PlanOptions(model, OWN, kv_cache_dtype="fp8_e4m3"), None)
    assert plan.token_bytes == 65536
    assert "--kv-cache-dtype fp8_e4m3" in plan.commands[0]


def two_prompts() -> Trace:
    """Return a trace of two prompts of a GiB each, again and again: 16 blocks of 512 tokens are a GiB."""
    prompts = [tuple(range(16)), tuple(range(16, 32))] * 10
    return Trace("t", 512, tuple(TracedRequest(n, 8192, 100, blocks, n % 2) for n, blocks in enumerate(prompts)))


def test_a_trace_says_what_each_capacity_finds(model: Path) -> None:
    options = PlanOptions(model, Gpu("own", 2.0, 1000.0, 50.0), weights_gib=0.3, store_gib=2.0, disk_gib=3.0)
    plan = make_plan(options, two_prompts())
    assert (plan.prompt_tokens, plan.session_tokens) == (8192, 8292)
    assert plan.unbounded_share == 0.9
    assert plan.needed_gib == 2.0
    assert [tier.hit_share for tier in plan.tiers] == [0.0, 0.9, 0.9]
    assert [tier.gained_share for tier in plan.tiers] == [0.0, 0.9, 0.0]


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"num_gpus": 3}, "num_gpus"),
    ({"store_gib": 0.0, "disk_gib": 1.0}, "disk_gib"),
    ({"store_gib": 0.0, "shared_gib": 1.0}, "shared_gib"),
    ({"weights_gib": 90.0}, "weights_gib"),
    ({"store_gib": 0.001}, "store_gib"),
    ({"store_gib": 0.01}, "store_gib"),
    ({"store_gib": 65537.0}, "store_gib"),
    ({"num_gpus": 8, "disk_gib": 1.0, "disk_gb_per_s": 100.0}, "disk_gib"),
    ({"shared_gib": 0.001}, "shared_gib"),
    ({"block_size": 7}, "block_size"),
    ({"kv_cache_dtype": "int3"}, "kv_cache_dtype"),
    ({"model": Path("absent")}, "model"),
]


def test_impossible_plans_name_the_option(model: Path) -> None:
    with each_row() as row:
        for changes, field in IMPOSSIBLE:
            with row(changes):
                with pytest.raises(InvalidArgumentError) as caught:
                    make_plan(replace(PlanOptions(model, OWN), **changes), None)
                assert caught.value.field == field


def test_models_without_a_pool_are_refused_with_the_reason(model: Path) -> None:
    refused: dict[str, dict[str, Any]] = {
        "latent attention": {"kv_lora_rank": 512},
        "int8": {"torch_dtype": "int8"},
        "head_size": {"head_dim": 16},
        "num_layers": {"num_hidden_layers": 10**400},
        "hidden_size": {"hidden_size": 0},
        "mamba": {"layer_types": ["mamba"] * 32},
    }
    with each_row() as row:
        for said, changes in refused.items():
            (model / "config.json").write_text(json.dumps(LLAMA_3_8B | changes))
            with row(said):
                with pytest.raises(InvalidArgumentError, match=said) as caught:
                    make_plan(PlanOptions(model, OWN), None)
                assert caught.value.field == "model"


def test_numbers_beyond_all_models_are_not_used(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(LLAMA_3_8B | {"intermediate_size": 10**400}))
    with pytest.raises(InvalidArgumentError, match="intermediate_size"):
        make_plan(PlanOptions(model, OWN), None)


def test_more_gpus_than_kv_heads_have_copies(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B | {"num_key_value_heads": 1}))
    plan = make_plan(PlanOptions(tmp_path, OWN, num_gpus=4), None)
    assert "--num-kv-heads 1 " in plan.commands[0]
    assert plan.token_bytes == 4 * 2 * 32 * 128 * 2


def test_a_pool_of_one_block_is_enough(model: Path) -> None:
    block = (2 << 20) / GIB
    plan = make_plan(PlanOptions(model, OWN, weights_gib=90.0 - block, store_gib=0.0), None)
    assert [(tier.name, tier.blocks) for tier in plan.tiers] == [("GPU pool", 1)]
    assert daemon_of(plan.commands[0]).pool_blocks == 1


def test_a_model_without_a_feed_forward_width_needs_its_parameters(tmp_path: Path) -> None:
    config = {name: value for name, value in LLAMA_3_8B.items() if name != "intermediate_size"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArgumentError, match="parameters_b"):
        make_plan(PlanOptions(tmp_path, OWN), None)
    assert make_plan(PlanOptions(tmp_path, OWN, parameters=8e9), None).weights_gib == pytest.approx(16e9 / GIB)


def test_gpus_of_the_table_and_others() -> None:
    assert find_gpu("h200") == find_gpu("H200") == Gpu("h200", 140.4, 989.0, 55.0)
    assert find_gpu("h200", tflops=700.0).tflops == 700.0
    assert find_gpu(None, 24.0, 100.0, 20.0) == Gpu("own", 24.0, 100.0, 20.0)
    for arguments, field in [(("h300",), "gpu"), ((None, 24.0, 100.0), "host_gbps"), ((None,), "gpu_memory_gib")]:
        with pytest.raises(InvalidArgumentError) as caught:
            find_gpu(*arguments)  # type: ignore[arg-type]
        assert caught.value.field == field


# ---- the command


def invoke(*arguments: Any) -> tuple[int, str]:
    done = CliRunner(env={"COLUMNS": "160"}).invoke(main, ["plan", *map(str, arguments)])
    return done.exit_code, done.output


def test_the_command_prints_tables(model: Path) -> None:
    code, output = invoke("--model", model, "--gpu", "h200", "--disk-gib", 2000)
    assert code == 0
    for part in ("131,072 bytes", "GPU pool", "host store", "disk", "break-even", "kvservice serve --model"):
        assert part in output
    assert "a daemon beside an engine that has its own pool:\nkvservice serve --store-gib 64 --pool-gib 0.1 " in output


def test_numbers_are_short(model: Path) -> None:
    _, output = invoke("--model", model, "--gpu", "h200", "--store-gib", 0.5, "--disk-gib", 250_000)
    store, disk = (
        next(line.split() for line in output.splitlines() if line.strip().startswith(name)) for name in TIERS
    )
    assert store[2:5] == ["0.5", "256", "4096"]
    assert disk[1:4] == ["250k", "128M", "2.05G"]


def test_the_command_prints_json(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n' * 2)
    code, output = invoke("--model", model, "--gpu", "h200", "--json", "--trace", trace)
    assert code == 0
    plan = json.loads(output)
    assert plan["unbounded_share"] == 0.5
    assert [tier["hit_share"] for tier in plan["tiers"]] == [0.5, 0.5]


def test_both_ends_of_options(model: Path) -> None:
    ends = {
        "--efficiency": (0.001, 1),
        "--gpu-memory-utilization": (0.2, 1),
        "--num-gpus": (1, 8),
        "--store-gib": (0, 1 << 16),
        "--disk-gbps": (0.001, 1e6),
        "--prompt-tokens": (1, 1 << 24),
    }
    with each_row() as row:
        for option, values in ends.items():
            for value in values:
                with row((option, value)):
                    assert invoke("--model", model, "--gpu", "h200", option, value)[0] == 0


def test_wrong_options_are_named(model: Path) -> None:
    wrong: dict[str, tuple[Any, ...]] = {
        "--efficiency": (0, 1.1, "nan"), "--gpu-memory-utilization": (1.1,), "--num-gpus": (0, 65, 3),
        "--store-gib": (-1, 65537), "--disk-gib": (0.1,), "--disk-gbps": (0,), "--prompt-tokens": (0,),
        "--gpu": ("h300",), "--trace": ("absent",), "--model": ("absent",), "--block-size": (7,),
        "--weights-gib": (1000,), "--parameters-b": (0,), "--kv-cache-dtype": ("int3",),
    }  # fmt: skip
    with each_row() as row:
        for option, values in wrong.items():
            for value in values:
                with row((option, value)):
                    code, output = invoke("--model", model, "--gpu", "h200", option, value)
                    assert code == 2
                    assert option in output


def daemon_of(command: str) -> ServeConfig:
    """Return the configuration of the daemon that a command starts, as the shell and the daemon read it."""
    words = shlex.split(command)
    assert words[:2] == ["kvservice", "serve"]
    given = {name[2:].replace("-", "_"): value for name, value in zip(words[2::2], words[3::2], strict=True)}
    return load_config(given, {}, None)


def test_a_tier_that_is_not_worth_it_is_not_in_the_command(model: Path) -> None:
    options = PlanOptions(model, OWN, prefill_tokens_per_s=1e6, disk_gib=500.0, shared_gib=500.0)
    plan = make_plan(options, None)
    assert sum("left out" in note for note in plan.notes) == 3
    daemon = daemon_of(plan.commands[0])
    assert (daemon.store_gib, daemon.disk, daemon.mooncake) == (0.0, "", "")


@pytest.mark.parametrize(
    ("gpu_gib", "store_gib", "nothing_in", "in_command"),
    [
        (2.0, 2.0, ["disk", "shared"], (2.0, "", "")),
        (20.0, 2.0, ["host store", "disk", "shared"], (0.0, "", "")),
        # The disk finds something, and it needs the store.
        (2.0, 1.0, ["host store", "shared"], (1.0, "DIRECTORY", "")),
    ],
)
def test_a_tier_that_finds_nothing_is_not_in_the_command(
    model: Path, gpu_gib: float, store_gib: float, nothing_in: list[str], in_command: tuple[float, str, str]
) -> None:
    gpu = Gpu("own", gpu_gib, 1000.0, 50.0)
    options = PlanOptions(model, gpu, weights_gib=0.3, store_gib=store_gib, disk_gib=3.0, shared_gib=8.0)
    plan = make_plan(options, two_prompts())
    assert [note.partition(":")[0] for note in plan.notes if "next to nothing" in note] == nothing_in
    daemon = daemon_of(plan.commands[0])
    assert (daemon.store_gib, daemon.disk, daemon.mooncake) == in_command
    assert daemon.weights == ("NAME" if daemon.disk else "")


def test_weights_of_a_snapshot_have_its_name(tmp_path: Path) -> None:
    directory = tmp_path / "models--meta-llama--Llama-3-8B" / "snapshots" / "abc"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(LLAMA_3_8B))
    for num_gpus in (1, 2):
        plan = make_plan(PlanOptions(directory, OWN, num_gpus=num_gpus, disk_gib=500.0, disk_gb_per_s=50.0), None)
        assert ("--weights" in plan.commands[0]) == (num_gpus == 2)
        assert daemon_of(plan.commands[0]).weights == "meta-llama/Llama-3-8B@abc"


def test_the_path_of_a_model_may_have_spaces(tmp_path: Path) -> None:
    directory = tmp_path / "my model's"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA_3_8B))
    assert daemon_of(make_plan(PlanOptions(directory, OWN), None).commands[0]).model == str(directory)


def random_model(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([1, 2, 8, 32, 71])
    return LLAMA_3_8B | {
        "num_hidden_layers": rng.choice([1, 2, 32, 126, 5000]),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([1, heads]),
        "head_dim": rng.choice([16, 32, 80, 128, 136, 256, 576]),
        "sliding_window": rng.choice([None, 4096]),
        "torch_dtype": rng.choice(["bfloat16", "float16", "float32", "int8", None]),
    }


def random_options(rng: random.Random, model: Path) -> PlanOptions:
    def sizes() -> float:
        return rng.choice([0.0, 10 ** rng.uniform(-4, 7), rng.randint(1, 4000) / 10])

    return PlanOptions(
        model,
        find_gpu(rng.choice(GPUS), memory_gib=rng.choice([None, 10 ** rng.uniform(-3, 4.8)])),
        num_gpus=rng.choice([1, 2, 3, 8, 64]),
        gpu_memory_utilization=rng.uniform(0.01, 1.0),
        kv_cache_dtype=rng.choice(["auto", "fp8_e4m3", "fp8_e5m2"]),
        block_size=rng.choice([8, 16, 32, 64, 128]),
        weights_gib=rng.choice([None, 0.0, 1e-3]),
        store_gib=sizes(),
        disk_gib=sizes(),
        shared_gib=sizes(),
        disk_gb_per_s=10 ** rng.uniform(-3, 3),
        prefill_tokens_per_s=rng.choice([None, 10 ** rng.uniform(0, 7)]),
    )


def random_trace(rng: random.Random) -> Trace | None:
    if rng.random() < 0.5:
        return None
    load = ConversationLoad(rng.randint(1, 20), 10 ** rng.uniform(-2, 2), block_size=rng.choice([16, 512]))
    return synthetic_trace(load, rng.getrandbits(32))


def test_every_command_is_one_that_the_daemon_takes(model: Path) -> None:
    rng, tiers_of_commands, refused = random.Random(5), set(), set()
    for _ in range(500):
        (model / "config.json").write_text(json.dumps(random_model(rng)))
        options = random_options(rng, model)
        try:
            plan = make_plan(options, random_trace(rng))
        except InvalidArgumentError as error:
            refused.add(error.field)
            continue
        daemon = daemon_of(plan.commands[0])
        worth = {tier.name for tier in plan.tiers[1:] if tier.is_worth_loading and tier.finds_something}
        if worth:
            worth.add("host store")
        assert bool(daemon.weights) == bool(worth & {"disk", "shared"})
        assert (daemon.store_gib > 0, bool(daemon.disk), bool(daemon.mooncake)) == (
            "host store" in worth, "disk" in worth, "shared" in worth,
        )  # fmt: skip
        assert daemon.pool_blocks
        assert daemon.pool_blocks <= plan.tiers[0].blocks
        assert daemon.layout == plan.layout
        tiers_of_commands.add(frozenset(worth))
    assert refused == {"disk_gib", "kv_cache_dtype", "model", "num_gpus", "shared_gib", "store_gib", "weights_gib"}
    assert len(tiers_of_commands) == 5, "no tier, the store, and one or both below it"
