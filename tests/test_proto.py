"""The generated code matches the contract's files."""

from __future__ import annotations

import importlib.util
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ROOT / "kvservice" / "v1"


def pinned_version() -> str:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (requirement,) = (one for one in extras["test"] if one.startswith("grpcio-tools=="))
    return requirement.removeprefix("grpcio-tools==")


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    try:
        installed = version("grpcio-tools")
    except PackageNotFoundError:
        installed = "none"
    if installed != pinned_version():
        pytest.fail(
            f"generated code differs between versions: install grpcio-tools=={pinned_version()}, not {installed}"
        )
    generate(tmp_path)
    fresh = {path.name: path.read_bytes() for path in (tmp_path / "kvservice" / "v1").iterdir()}
    stored = {path.name: path.read_bytes() for path in GENERATED.glob("*_pb2*")}
    assert sorted(fresh) == sorted(stored)
    assert [name for name in fresh if fresh[name] != stored[name]] == [], "run: python proto/generate.py"


def generate(target: Path) -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "proto" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.generate(target)


@pytest.mark.parametrize("path", sorted(ROOT.glob("proto/kvservice/v1/*.proto")), ids=lambda path: path.name)
def test_every_contract_file_has_generated_code(path: Path) -> None:
    for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py"):
        assert (GENERATED / f"{path.stem}{suffix}").is_file()
