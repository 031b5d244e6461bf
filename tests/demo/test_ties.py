"""The demo compares tokens, so no token may hang on how logits are rounded."""

from __future__ import annotations

import pytest
import torch

from kvservice.demo.model import Picker, build_model, generate_alone
from kvservice.demo.runner import parts


class Watched(Picker):
    """Picks tokens, and keeps by how much each of them led."""

    leads: list[float]

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        scores = super().scores(logits)
        first, second = scores.topk(2).values
        self.leads.append(float(first - second))
        return scores


@pytest.mark.slow
def test_the_tokens_are_far_from_ties() -> None:
    """Rounding changes logits by about 1e-5. The picked token leads by much more in every step of the demo."""
    model, leads = build_model(), list[float]()
    with torch.inference_mode():
        for part in parts():
            for seed in part.seeds:
                picker = Watched(seed)
                picker.leads = leads
                generate_alone(model, part.prompt, picker, part.num_tokens)
    assert len(leads) == 8 * 32
    assert min(leads) > 1e-2
