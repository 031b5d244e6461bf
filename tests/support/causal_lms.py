"""Tiny random models of every causal language model type that the installed transformers library has.

Run as a program, it writes the supported types of causal_lm_types.toml into the README of the integration.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

PATH = Path(__file__).parents[1] / "integrations" / "causal_lm_types.toml"
TABLE: dict[str, Any] = tomllib.loads(PATH.read_text())
README = PATH.parents[2] / "kvservice" / "integrations" / "transformers" / "README.md"
# Configurations accept these keys whether or not they declare them.
UNIVERSAL_OPTIONS = {"pad_token_id", "eos_token_id", "tie_word_embeddings"}


@dataclass(frozen=True)
class Case:
    """A model type of the library, or a variant of one with other options."""

    name: str
    model_type: str
    options: dict[str, Any]

    @property
    def refusal(self) -> str | None:
        """The expected part of the error message, or None if the table does not list the case as refused."""
        return next((reason for reason, names in TABLE["refused"].items() if self.name in names), None)

    @property
    def is_equal(self) -> bool:
        return self.name in TABLE["equal"]


def installed_cases() -> list[Case]:
    """Return a case per type, and per variant of the table whose type is installed."""
    types = {
        name: Case(name, name, TABLE["own_sizes"].get(name, {}) | TABLE["options"].get(name, {}))
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    }
    variants = [
        Case(
            name,
            options["type"],
            types[options["type"]].options | {key: options[key] for key in options.keys() - {"type"}},
        )
        for name, options in TABLE["variants"].items()
        if options["type"] in types
    ]
    return [*types.values(), *variants]


CASES = {case.name: case for case in installed_cases()}


def make_config(case: Case) -> PreTrainedConfig:
    """Return a configuration of 4 small layers, every other one with a sliding window if the type has layer types."""
    fields = _fields(case)
    options = {name: value for name, value in (TABLE["sizes"] | TABLE["common"]).items() if name in fields}
    if {"layer_types", "sliding_window"} <= fields:
        options["layer_types"] = ["sliding_attention", "full_attention"] * 2
    return _config(case, options | case.options)


def default_config(case: Case) -> PreTrainedConfig:
    """Return the type's own default configuration as a decoder, changed in nothing but sizes. Raises what the library
    does for types without a valid default."""
    default = CONFIG_MAPPING[case.model_type]()
    fields = _fields(case)
    sizes = {
        name: value
        for name, value in TABLE["sizes"].items()
        if name in fields and (value == "none" or getattr(default, name, None) is not None)
    }
    decoder = {"is_decoder": True} if "is_decoder" in fields else {}
    return _config(case, sizes | decoder | TABLE["own_sizes"].get(case.name, {}))


def _fields(case: Case) -> set[str]:
    cls = CONFIG_MAPPING[case.model_type]
    return inspect.signature(cls.__init__).parameters.keys() | cls.attribute_map.keys() | UNIVERSAL_OPTIONS


def _config(case: Case, options: dict[str, Any]) -> PreTrainedConfig:
    special = {"none": None}
    given = {name: special.get(str(value), value) for name, value in options.items() if value != "default"}
    return CONFIG_MAPPING[case.model_type](**given)


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    return cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])


def make_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model whose logits have a standard deviation of about 1 and which rarely repeats a token.

    Its weights preserve the scale of activations, so attention is not close to uniform and an attention error changes
    the token. Biases and norms are random too, because model families initialize them to constants.
    """
    torch.manual_seed(2)
    model = model_class(config)(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=float(parameter.mean()), std=0.1)
        elif re.search(r"embed|wte|wpe", name):
            torch.nn.init.normal_(parameter, std=1.0)
        else:
            torch.nn.init.normal_(parameter, std=1.3 * parameter.shape[-1] ** -0.5)
    return model.eval()


def supported_types() -> list[str]:
    """Return the types that the table says are equal, without the variants."""
    return sorted(set(TABLE["equal"]) - set(TABLE["variants"]))


def listed_types(text: str) -> list[str]:
    """Return the types that the README lists."""
    return re.findall(r"[\w-]+", _paragraph(text))


def _paragraph(text: str) -> str:
    return next(paragraph for paragraph in text.split("\n\n") if paragraph.startswith("`afmoe`"))


if __name__ == "__main__":
    listed = ", ".join(f"`{name}`" for name in supported_types())
    wrapped = textwrap.fill(f"{listed}.", 120, break_on_hyphens=False)
    README.write_text(README.read_text().replace(_paragraph(README.read_text()), f"{wrapped}\n"))
