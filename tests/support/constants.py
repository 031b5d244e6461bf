"""Constants and functions of a package with other values, wherever its modules have them."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest


def set_constants(patch: pytest.MonkeyPatch, package: str, **values: Any) -> None:
    """Give these names other values in all modules of a package that have them."""
    face = importlib.import_module(package)
    names = [found.name for found in pkgutil.walk_packages(face.__path__, f"{package}.")]
    modules = [face, *(importlib.import_module(name) for name in names if not name.endswith(".__main__"))]
    for name, value in values.items():
        having = [module for module in modules if name in vars(module)]
        assert having, f"no module of {package} has {name}"
        for module in having:
            patch.setattr(module, name, value)
