"""The generated code matches the contract's files, and a change that breaks clients is noticed."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
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


def test_every_contract_file_has_generated_code() -> None:
    stems = [path.stem for path in ROOT.glob("proto/kvservice/v1/*.proto")]
    names = {f"{stem}{suffix}" for stem in stems for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")}
    assert names
    assert names - {path.name for path in GENERATED.iterdir()} == set()


# ---- compatibility with the latest release


def git(repository: Path, *arguments: str) -> None:
    author = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run(["git", *author, *arguments], cwd=repository, check=True, capture_output=True)


def check(repository: Path) -> tuple[int, str]:
    command = [sys.executable, "proto/check.py"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the contract in a repository without releases."""
    repository = tmp_path_factory.mktemp("repository")
    shutil.copytree(ROOT / "proto", repository / "proto", ignore=shutil.ignore_patterns("__pycache__"))
    git(repository, "init", "--quiet")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message", "the contract")
    return repository


def test_without_a_release_the_check_says_that_it_compares_nothing(repository: Path) -> None:
    status, output = check(repository)
    assert status == 0
    assert output.startswith("buf: compatibility is not checked")


def test_a_released_field_keeps_its_number(repository: Path) -> None:
    """Also tags of other things than releases, and the latest of two releases."""
    for tag in ("v0.9.0", "v0.10.0", "nightly"):
        git(repository, "tag", tag)
    assert check(repository) == (0, "")
    tensor = repository / "proto" / "kvservice" / "v1" / "tensor.proto"
    contract = tensor.read_text()
    added = contract.replace("message Tensor {", "message Tensor {\n  // Added.\n  int64 added = 1000;\n", 1)
    tensor.write_text(added)
    assert check(repository) == (0, "")
    git(repository, "commit", "--quiet", "--all", "--message", "a new field")
    git(repository, "tag", "v0.11.0")
    tensor.write_text(contract)
    status, output = check(repository)
    assert status != 0
    assert 'Previously present field "1000" with name "added"' in output


def test_the_style_is_checked(repository: Path) -> None:
    (repository / "proto" / "kvservice" / "v1" / "odd.proto").write_text(
        'syntax = "proto3";\npackage kvservice.v1;\nmessage lower {}\n'
    )
    status, output = check(repository)
    assert status != 0
    assert 'Message name "lower" should be PascalCase' in output
