"""The README's references are complete. That of the metrics is compared with what a daemon exposes, in metrics/."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvservice import errors
from kvservice.config import ServeConfig

README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.mark.parametrize("name", sorted(ServeConfig.model_fields))
def test_every_option_is_explained(name: str) -> None:
    assert f"| `{name}` |" in README


def test_every_error_that_is_raised_is_explained() -> None:
    bases = {errors.KVServiceError, errors.NotFoundError, errors.ResourceExhaustedError}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.KVServiceError) and kind not in bases:
            assert f"| `{kind.__name__}` | {kind.status} | {kind.reason} |" in README, kind.__name__
