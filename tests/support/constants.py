"""Constants and functions of a package with other values, wherever its modules have them."""

from __future__ import annotations

import sys
from typing import Any

import pytest


def set_constants(patch: pytest.MonkeyPatch, package: str, **values: Any) -> None:
    """Give these names other values in all modules of a package that have them."""
    modules = [module for name, module in sys.modules.items() if name == package or name.startswith(f"{package}.")]
    for name, value in values.items():
        having = [module for module in modules if name in vars(module)]
        assert having, f"no module of {package} has {name}"
        for module in having:
            patch.setattr(module, name, value)
