"""Objects of the shape of PEFT's: a model whose adapters are layers of a model of the library, and one with a learned
prompt, where the model of the library is as it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


class _Tuner(nn.Module):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model


class PeftLike(nn.Module):
    """`get_peft_model(model, LoraConfig(...))`, or with a learned prompt `PromptTuningConfig(...)`."""

    def __init__(self, model: Any, *, learned_prompt: bool = False) -> None:
        super().__init__()
        self.base_model: nn.Module = model if learned_prompt else _Tuner(model)
        self._learned_prompt = learned_prompt

    @property
    def config(self) -> Any:
        return self.get_base_model().config

    def get_base_model(self) -> Any:
        return self.base_model if self._learned_prompt else self.base_model.model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.get_base_model()(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        tokens: torch.Tensor = self.get_base_model().generate(*args, **kwargs)
        return tokens
