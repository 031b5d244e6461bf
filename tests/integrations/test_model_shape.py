"""For all model types, the daemon derives from config.json the same shape as `pool_options` from the configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
from each_row import each_row
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvservice import model_shape
from kvservice.config_sources import checked_config
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.transformers import pool_options

pytestmark = pytest.mark.filterwarnings("ignore")  # Some default values cause warnings of the library.

TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
OPTIONAL = ("num_key_value_heads", "head_dim")


def default_configs() -> Iterator[tuple[str, PreTrainedConfig]]:
    """Yield each type with its default configuration. A few types have default values that are not valid."""
    for kind in TYPES:
        try:
            config = CONFIG_MAPPING[kind]()
        except Exception:  # any error of a type's own checks
            continue
        yield kind, config


def from_file(content: dict[str, Any]) -> dict[str, Any] | None:
    """None: refused."""
    try:
        options = asdict(model_shape.pool_options(content))
        checked_config(options)
    except InvalidArgumentError:
        return None
    return options


def from_library(config: PreTrainedConfig) -> dict[str, Any] | None:
    try:
        return pool_options(config)
    except InvalidArgumentError:
        return None


def test_a_file_with_default_values() -> None:
    """The text configuration of a multimodal model counts."""
    compared = 0
    with each_row() as row:
        for kind, config in default_configs():
            text = config.text_config if isinstance(getattr(config, "text_config", None), PreTrainedConfig) else config
            for use_diff in (True, False):
                with row((kind, use_diff)):
                    content = json.loads(config.to_json_string(use_diff))
                    assert from_file(content) == from_library(text)
                    compared += 1
    assert compared > 0.9 * 2 * len(TYPES)


def test_a_file_without_what_may_be_left_out() -> None:
    """A value derived for a missing key equals the library's default, or the model is refused."""
    with each_row() as row:
        for kind, config in default_configs():
            content = json.loads(config.to_json_string())
            for key in OPTIONAL:
                if key not in content:
                    continue
                with row((kind, key)):
                    less = {name: value for name, value in content.items() if name != key}
                    found = from_file(less)
                    assert found is None or found == from_library(CONFIG_MAPPING[kind].from_dict(less))


def test_not_all_types_are_refused() -> None:
    for kind in ("llama", "mistral", "qwen3", "gemma2", "gpt2", "falcon", "mpt", "gptj", "opt", "phi3", "olmo2"):
        assert from_file(json.loads(CONFIG_MAPPING[kind]().to_json_string())) is not None, kind
