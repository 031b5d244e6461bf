"""Random operations of two clients on the block manager, compared with a model."""

from __future__ import annotations

from typing import Any

import pytest
from blocks_machine import BlockManagerMachine
from hypothesis import HealthCheck, settings

SETTINGS: dict[str, Any] = {
    "stateful_step_count": 50,
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
}


@pytest.mark.brief
class TestShortly(BlockManagerMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=60, **SETTINGS)

    def runTest(self) -> None:  # noqa: N802 (the name is unittest's)
        """Some appends went the native way, too."""
        before = BlockManagerMachine.num_decodes
        super().runTest()
        assert BlockManagerMachine.num_decodes > before


@pytest.mark.slow
class TestBlockManager(BlockManagerMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=250, **SETTINGS)
