"""The pool's shape from config.json files of published models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from each_row import each_row

from kvservice.config_sources import load_config
from kvservice.errors import InvalidArgumentError
from kvservice.model_shape import PoolOptions, pool_options, read_pool_options

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
MULTI_HEAD = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
KNOWN: list[tuple[str, dict[str, Any], PoolOptions]] = [
    ("llama 3", LLAMA, PoolOptions(32, 8, 128, "bfloat16")),
    ("llama 2", MULTI_HEAD, PoolOptions(32, 32, 128, "bfloat16")),
    ("null is absent", LLAMA | {"num_key_value_heads": None, "head_dim": None}, PoolOptions(32, 32, 128, "bfloat16")),
    ("newer files", {**MULTI_HEAD, "dtype": "float16"}, PoolOptions(32, 32, 128, "float16")),
    ("a type that is not said", LLAMA | {"torch_dtype": None}, PoolOptions(32, 8, 128, "float32")),
    ("torch's own name", LLAMA | {"torch_dtype": "torch.float16"}, PoolOptions(32, 8, 128, "float16")),
    ("a head_dim of its own", LLAMA | {"model_type": "qwen3", "head_dim": 64}, PoolOptions(32, 8, 64, "bfloat16")),
    ("an unknown type", LLAMA | {"model_type": "internlm2"}, PoolOptions(32, 8, 128, "bfloat16")),
    (
        "sliding windows",
        LLAMA | {"layer_types": ["sliding_attention", "full_attention"] * 16, "sliding_window": 512},
        PoolOptions(32, 8, 128, "bfloat16"),
    ),
    (
        "several kinds of input",
        {"model_type": "llava", "vision_config": {}, "text_config": MULTI_HEAD, "torch_dtype": "float16"},
        PoolOptions(32, 32, 128, "bfloat16"),
    ),
    (
        "several kinds of input, the type outside",
        {"torch_dtype": "float16", "text_config": LLAMA | {"torch_dtype": None}},
        PoolOptions(32, 8, 128, "float16"),
    ),
    (
        "gpt2",
        {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768},
        PoolOptions(12, 12, 64, "float32"),
    ),
    (
        "starcoder",
        {"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144, "multi_query": True},
        PoolOptions(40, 1, 128, "float32"),
    ),
    (
        "falcon 7b",
        {
            "model_type": "falcon", "num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544,
            "multi_query": True, "new_decoder_architecture": False, "torch_dtype": "bfloat16",
        },
        PoolOptions(32, 1, 64, "bfloat16"),
    ),
    (
        "falcon 40b",
        {
            "model_type": "falcon", "num_hidden_layers": 60, "num_attention_heads": 128, "hidden_size": 8192,
            "num_kv_heads": 8, "new_decoder_architecture": True,
        },
        PoolOptions(60, 8, 64, "float32"),
    ),
    (
        "dbrx",
        {
            "model_type": "dbrx", "n_layers": 40, "n_heads": 48, "d_model": 6144,
            "attn_config": {"kv_n_heads": 8, "clip_qkv": 8},
        },
        PoolOptions(40, 8, 128, "float32"),
    ),
    (
        "bloom",
        {"model_type": "bloom", "n_layer": 70, "num_attention_heads": 112, "hidden_size": 14336},
        PoolOptions(70, 112, 128, "float32"),
    ),
    (
        "layers that say the same",
        LLAMA | {"per_layer_config": {"3": {"head_dim": 128}, "4": {"sliding_window": 7}}},
        PoolOptions(32, 8, 128, "bfloat16"),
    ),
    (
        "every layer says another",
        LLAMA | {"num_hidden_layers": 2, "per_layer_config": {"0": {"head_dim": 64}, "1": {"head_dim": 64}}},
        PoolOptions(2, 8, 64, "bfloat16"),
    ),
]  # fmt: skip
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("deepseek v3", {"kv_lora_rank": 512, "q_lora_rank": 1536}, "latent attention"),
    ("t5", {"is_encoder_decoder": True}, "cross-attention"),
    ("mllama", {"cross_attention_layers": [3, 8]}, "cross-attention"),
    ("jamba", {"model_type": "jamba", "attn_layer_period": 8, "mamba_d_state": 16}, "layers without attention"),
    ("qwen3 next", {"full_attention_interval": 4, "linear_num_key_heads": 16}, "linear attention"),
    ("layers of other types", {"layer_types": ["linear_attention", "full_attention"]}, "layers of type linear_att"),
    ("llama 4", {"attention_chunk_size": 8192}, "chunked attention"),
    ("minimax", {"attn_type_list": [0, 0, 1]}, "linear attention"),
    ("gemma 3n", {"num_kv_shared_layers": 15}, "share K/V"),
    ("gemma 4", {"head_dim": 256, "global_head_dim": 512}, "head_dim is 256, global_head_dim 512"),
    ("mimo", {"swa_num_key_value_heads": 16}, "num_key_value_heads is 8, swa_num_key_value_heads 16"),
    ("values of another size", {"head_dim": 192, "v_head_dim": 128}, "head_dim is 192, v_head_dim 128"),
    ("some layers", {"per_layer_config": {"05": {"head_dim": 512}}}, "differ between layers"),
    ("searched architectures", {"block_configs": [{}]}, "differ between layers"),
    ("bidirectional", {"use_bidirectional_attention": True}, "causal"),
    ("falcon rw", {"model_type": "falcon", "alibi": True}, "ALiBi"),
    ("no heads", {"num_attention_heads": None}, "num_attention_heads"),
    ("a list", {"num_key_value_heads": [8, 4]}, "num_key_value_heads is"),
    ("nought", {"num_attention_heads": 0}, "num_attention_heads is 0"),
    ("a truth", {"num_hidden_layers": True}, "num_hidden_layers is True"),
    ("a text", {"head_dim": "128"}, "head_dim is '128'"),
]


def test_known_files() -> None:
    with each_row() as row:
        for name, config, wanted in KNOWN:
            with row(name):
                assert pool_options(config) == wanted


def test_what_does_not_fit_into_one_pool_is_refused() -> None:
    with each_row() as row:
        for name, changes, reason in REFUSED:
            for config in (LLAMA | changes, {"text_config": LLAMA | changes}):
                with row(name):
                    with pytest.raises(InvalidArgumentError, match=reason) as caught:
                        pool_options(config)
                    assert caught.value.field == "config"


def test_a_default_that_only_the_library_knows_is_not_guessed() -> None:
    others: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 16, "hidden_size": 3072}
    configs: dict[str, dict[str, Any]] = {
        "num_key_value_heads": others | {"model_type": "mistral"},
        "head_dim": others | {"model_type": "gemma"},
        "n_heads": {"model_type": "mpt", "n_layers": 2, "d_model": 3072},
    }
    for missing, config in configs.items():
        with pytest.raises(InvalidArgumentError, match=missing):
            pool_options(config)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_a_directory_or_its_file(model: Path) -> None:
    assert read_pool_options(model) == read_pool_options(model / "config.json") == pool_options(LLAMA)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"model: .*config\.json"):
        read_pool_options(tmp_path)
    with each_row() as row:
        for content in (b"", b"[]", b'{"a": ', b"\xff", b"[" * 100_000):
            (tmp_path / "config.json").write_bytes(content)
            with row(content[:20]), pytest.raises(InvalidArgumentError, match=r"model: .*config\.json"):
                read_pool_options(tmp_path)


def test_what_is_named_wins_over_the_model(model: Path, tmp_path: Path) -> None:
    config = load_config({"model": str(model)}, {})
    assert (config.num_layers, config.num_kv_heads, config.head_size, config.dtype) == (32, 8, 128, "bfloat16")
    file = tmp_path / "kvservice.toml"
    file.write_text(f'model = "{model}"\nnum_layers = 2\n')
    config = load_config({"num_kv_heads": 4}, {"KVSERVICE_DTYPE": "float16"}, file)
    assert (config.num_layers, config.num_kv_heads, config.head_size, config.dtype) == (2, 4, 128, "float16")


def test_a_model_that_the_daemon_has_no_kernels_for(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(LLAMA | {"head_dim": 16}))
    with pytest.raises(InvalidArgumentError) as caught:
        load_config({"model": str(model)}, {})
    assert caught.value.field == "head_size"
    assert str(model) in caught.value.message
    assert load_config({"model": str(model), "head_size": 32}, {}).head_size == 32


def test_a_model_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"model: .*No such file"):
        load_config({"model": str(tmp_path / "none")}, {})
