"""Imports of the block manager, and the results of its benchmark."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from rich.console import Console

import kvservice.blocks
from kvservice.bench import blocks as bench

MODULES = sorted(Path(kvservice.blocks.__file__).parent.glob("*.py"))


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_imports_are_plain(path: Path) -> None:
    """It imports NumPy, the standard library, the errors, the extension, the chain hashes and its own modules, but not
    torch, protobuf or grpc."""
    for name in imported(path):
        ours = name in {"kvservice._ext", "kvservice.chain_hash", "kvservice.errors"} or name.startswith(
            "kvservice.blocks"
        )
        assert ours or name.split(".")[0] in {"numpy", *sys.stdlib_module_names}, f"{path.name} imports {name}"


def test_the_benchmark() -> None:
    results = bench.run(num_blocks=2000, quick=True)
    assert results["calibration_s"] > 0
    assert set(results["scaling"]) == {"1000", "100000"}
    for figures in (results, *results["scaling"].values()):
        assert all(0 < figures[name] < 1 for name in bench.OPERATIONS)
    console = Console(record=True, width=160)
    bench.render(results, console)
    assert "fork a sequence" in console.export_text()
