"""Test modules of the CPU, whose tests also run with a pool on a GPU.

They are loaded by their path: several directories have modules of one name, so that a name does not say which.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).parents[1]


def load(path: str) -> ModuleType:
    """Return a new module with the definitions of a file, whose path is below tests."""
    spec = importlib.util.spec_from_file_location(f"cpu_{path.removesuffix('.py').replace('/', '_')}", TESTS / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
