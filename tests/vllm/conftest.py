"""A real vLLM needs an environment of its own: see .ci/run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tiny_llama import save_tiny_llama

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_llama(directory)
    return directory
