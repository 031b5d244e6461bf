"""The documents say what is true: generated tables are fresh, references complete, links lead somewhere, the program of
the README runs. The table of metrics is also compared with what a daemon exposes, in metrics/."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import yaml
from tiny_llama import save_tiny_llama

from kvservice import errors
from kvservice.config import ENV_PREFIX, ServeConfig
from kvservice.config_sources import OTHER_ENV
from kvservice.launch import Daemon

Array = npt.NDArray[np.float32]

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROTO = (ROOT / "proto" / "README.md").read_text()
MAP = (ROOT / "kvservice" / "README.md").read_text()
CLIENT = (ROOT / "kvservice" / "client" / "README.md").read_text()
ENGINES = (ROOT / "kvservice" / "engines" / "README.md").read_text()
FIGURES = (ROOT / "kvservice" / "bench" / "README.md").read_text()
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", ".github/*.md", "csrc/*.md", "deploy/*.md", "proto/*.md", "kvservice/**/*.md")
    for path in ROOT.glob(pattern)
)


# ---- generated tables


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_references", ROOT / "deploy" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_tables_are_fresh(generator: ModuleType) -> None:
    for name in ("options", "metrics"):
        stored = (ROOT / "deploy" / f"{name.upper()}.md").read_text()
        assert stored == getattr(generator, name)(), f"{name}; run: python deploy/generate.py"


def test_options_are_listed_with_default_and_range(generator: ModuleType) -> None:
    rows = {row.split(" | ")[0]: row for row in generator.options().splitlines() if row.startswith("| `")}
    assert rows["| `head_size`"].startswith("| `head_size` | `128` | 32 to 256, multiples of 8 | ")
    assert rows["| `watermark`"].startswith("| `watermark` | `0.01` | 0 to below 1 | ")
    assert rows["| `pool_gib`"].startswith("| `pool_gib` | `1.0` | above 0 to 65,536 | ")
    assert rows["| `share_pool`"].startswith("| `share_pool` | `off` | `off`, `read`, `write` | ")
    assert rows["| `insecure`"].startswith("| `insecure` | `false` | `true`, `false` | ")
    assert rows["| `num_blocks`"].startswith("| `num_blocks` |  | 1 to 16,777,216 | ")


# ---- references


def test_every_error_that_is_raised_is_explained() -> None:
    bases = {errors.KVServiceError, errors.NotFoundError}
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type)} - bases
    raised = [kind for kind in kinds if issubclass(kind, errors.KVServiceError)]
    rows = {kind.__name__: f"| `{kind.__name__}` | {kind.status} | {kind.reason} |" for kind in raised}
    assert rows
    assert [name for name, row in rows.items() if row not in PROTO] == []


def defined(path: Path) -> set[str]:
    """Classes and functions of a module, methods as Class.method; of C++ all that is followed by a parenthesis."""
    if path.suffix == ".cpp":
        return set(re.findall(r"([\w:]+)\(", path.read_text()))
    tree = ast.parse(path.read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = {node.name for node in tree.body if isinstance(node, (*functions, ast.ClassDef))}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{method.name}" for method in node.body if isinstance(method, functions)}
    return names


def named_functions(text: str) -> Iterator[tuple[str, str]]:
    """`file.py` `name` and `name` ...: file and name of each, from one file's name to the next."""
    for file, rest in re.findall(r"`([\w./]+\.(?:py|cpp))`((?:(?!`[\w./]+\.(?:py|cpp)`).)*)", text, re.DOTALL):
        for name in re.findall(r"^(?:\s+|\s+and\s+)?`([A-Z]\w*(?:\.|::)\w+|[a-z_]+)`", rest):
            yield file, name


STEPS = {"five": 5, "six": 6, "seven": 7, "eight": 8}
FLOWS = {section.split("\n")[0]: section for section in MAP.split("\n## ") if section.split("\n")[0].endswith(" steps")}


def test_the_way_of_a_call_names_functions_that_exist() -> None:
    """And has as many steps as its title says."""
    assert len(FLOWS) == 5
    common = next(section for section in MAP.split("\n## ") if section.startswith("What every call passes\n"))
    for title, flow in [*FLOWS.items(), ("", common)]:
        steps = [int(number) for number in re.findall(r"(?m)^(\d)\. ", flow)]
        assert steps == list(range(1, (STEPS[title.split()[-2]] if title else 9) + 1)), title
        named = list(named_functions(flow))
        assert len(named) >= len(steps), title
        assert [f"{file} has no {name}" for file, name in named if name not in defined(ROOT / "kvservice" / file)] == []


def modules(folder: Path) -> set[str]:
    """The modules and packages in a folder, without what begins with an underscore, and without caches."""
    names = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/*.py")}
    return {name for name in names if not name.startswith("_")}


def test_the_map_names_every_package_room_and_file() -> None:
    """Of the server each file of a room, of the client each module of a layer."""
    package = ROOT / "kvservice"
    packages, rooms = MAP.split("\n## Glossary\n")[0].split("\n## The rooms of the server\n")
    assert modules(package) - set(re.findall(r"`(\w+)(?:\.py)?`", packages)) == set()
    for room in (path for path in (package / "server").iterdir() if modules(path) and path.is_dir()):
        (row,) = [row for row in rooms.splitlines() if row.startswith(f"| `server/{room.name}`")]
        assert modules(room) - set(re.findall(r"`(\w+)`", row)) == set(), row
    layers = CLIENT.split("\n## How it is built\n")[1]
    assert modules(package / "client") - set(re.findall(r"`(\w+)`", layers)) == set()


def code_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_examples_are_python() -> None:
    """compile() raises SyntaxError for what is no Python, and names the document."""
    for path in DOCUMENTS:
        for block in code_blocks(path.read_text()):
            compile(block, str(path), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)


def test_imports_of_examples_exist() -> None:
    absent = []
    for path in DOCUMENTS:
        imports = re.findall(r"^from (kvservice\S*) import (.*)$", "".join(code_blocks(path.read_text())), re.MULTILINE)
        for module, names in imports:
            package = ROOT / Path(*module.split("."))
            source = (package / "__init__.py" if package.is_dir() else package.with_suffix(".py")).read_text()
            for name in names.split(", "):
                if not (package / name).is_dir() and not re.search(rf"\b{name}\b", source):
                    absent.append(f"{path.name}: {module} has no {name}")
    assert absent == []


# Read by tests, not by the daemon.
TEST_ENV = {"KVSERVICE_FUZZ_SECONDS", "KVSERVICE_KILLS"}


def test_environment_variables_that_are_named_exist() -> None:
    known = {f"{ENV_PREFIX}{name.upper()}" for name in ServeConfig.model_fields} | OTHER_ENV | TEST_ENV
    named = {
        (str(path.relative_to(ROOT)), name)
        for path in DOCUMENTS
        for name in re.findall(rf"\b{ENV_PREFIX}[A-Z_]*[A-Z]\b", path.read_text())
    }
    assert named
    assert {(path, name) for path, name in named if name not in known} == set()


# ---- the ledger of claims


def test_every_figure_has_a_machine_a_command_a_commit_and_what_takes_it_down() -> None:
    """And every topic with tables has a claim that leads to it."""
    introduction, *topics = FIGURES.split("\n## The claims\n")[1].split("\n## ")
    claims = [row.strip("| ").split(" | ") for row in introduction.splitlines() if row.startswith("| ")][1:]
    assert len(claims) > 30
    machines = set(re.findall(r"(?m)^\| ([A-D]) \|", FIGURES))
    for claim, machine, command, commit, falls in claims:
        assert machine in ("2 busy cores", "any", "any: simulated") or set(machine.split(",")[0]) <= machines, claim
        assert command.startswith("`kvservice bench "), claim
        assert re.search(r"`[0-9a-f]{7}`", commit), claim
        assert falls, claim
    claimed = set(re.findall(r"\]\(#([\w-]+)\)", introduction))
    assert claimed == {anchor for topic in topics for anchor in anchors("## " + topic.split("\n")[0])}


# ---- links


def anchors(text: str) -> set[str]:
    """The fragments that GitHub makes of headings."""
    headings = re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?ms)^```.*?^```", "", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(text: str, path: Path) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        name, _, fragment = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists() or (fragment and fragment not in anchors(text if file == path else file.read_text())):
            broken.append(target)
    return broken


def test_links_lead_somewhere() -> None:
    broken = {str(path.relative_to(ROOT)): broken_links(path.read_text(), path) for path in DOCUMENTS}
    assert {path: links for path, links in broken.items() if links} == {}


def test_broken_links_are_seen() -> None:
    text = "## A `b`, c\n[1](absent.md) [2](#a-b-c) [3](#absent) [4](proto/README.md#retries) [5](proto/README.md#no)"
    assert broken_links(text, ROOT / "README.md") == ["absent.md", "#absent", "proto/README.md#no"]


def test_the_readme_leads_to_every_page() -> None:
    linked = {(ROOT / target.partition("#")[0]).resolve() for target in re.findall(r"\]\(([^)\s]+)\)", README)}
    linked |= {directory / "README.md" for directory in linked if directory.is_dir()}
    optional = {ROOT / ".github" / name for name in ("SECURITY.md", "pull_request_template.md")} | {ROOT / "README.md"}
    assert set(DOCUMENTS) - linked - optional == set()


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


# ---- the programs of the README and of the client's

ADDRESS = '"unix:///run/kvservice.sock"'


@pytest.fixture(scope="module")
def five_minutes() -> str:
    return code_blocks(README.split("## Five minutes")[1])[0]


def test_the_program_of_the_readme_runs(five_minutes: str, tmp_path: Path) -> None:
    """Twice: the second time the prefix cache has the full blocks of its prompt of 50 tokens."""
    shape: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16", "num_blocks": 32}
    assert five_minutes.count(ADDRESS) == 1
    with Daemon(**shape, swap_space_gib=0.01) as daemon:
        program = tmp_path / "engine.py"
        program.write_text(five_minutes.replace(ADDRESS, repr(daemon.address)))
        outputs = [run(program) for _ in range(2)]
    described = "(2, 8, 64) [40, 51]\n"
    assert outputs == [f"{cached} tokens need not be computed\n{described}" for cached in (0, 48)]


@pytest.mark.slow
def test_the_engines_examples_run(tmp_path: Path) -> None:
    """On a tiny model, whose texts have no meaning."""
    save_tiny_llama(tmp_path / "model")
    examples = [*code_blocks(README.split("## Generate")[1])[:1], *code_blocks(ENGINES)]
    program = "".join(examples).replace('"DIR"', repr(str(tmp_path / "model"))).replace("num_blocks", "pool_gib")
    (tmp_path / "program.py").write_text(program.replace("4096", "0.01"))
    command = [sys.executable, "-P", str(tmp_path / "program.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "2/2" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].startswith("(5, 6, 7) ['")
    assert lines[2].endswith(("length", "stop"))


def test_the_examples_of_the_client_are_one_program() -> None:
    """They run one after the other, and what they compute and read is right."""
    rng = np.random.default_rng(0)
    names: dict[str, Any] = {"prompt": list(range(100, 150)), "num_heads": 4}
    for name, heads in (("query", 4), ("key", 2), ("value", 2)):
        names[name] = rng.standard_normal((50, heads, 64), np.float32)
    shape: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 2, "head_size": 64, "dtype": "float32", "num_blocks": 32}
    examples = code_blocks(CLIENT)
    with Daemon(**shape, share_pool="write", store_gib=1 / 64) as daemon:
        results = [run_example(example.replace(ADDRESS, repr(daemon.address)), names) for example in examples]
        results[0]["client"].close()
    first, regions, mapped, ahead, graph, elsewhere, outlive, scheduled, stored, clustered, limits, waiting = results
    assert first["out"].shape == (50, 4, 64)
    assert regions["out"] is not first["out"]
    # Both attend with the last query over the prompt, to whose end the last key and value were added
    # once, twice, six and nine times.
    weight = np.exp(np.einsum("thd,thd->th", repeated(names["key"]), names["query"][-1:].repeat(50, 0)) / 8)
    weights = {times: np.concatenate([weight, *[weight[-1:]] * times]) for times in (1, 2, 6, 9)}
    values = {times: np.concatenate([names["value"], *[names["value"][-1:]] * times]) for times in weights}
    outputs = {1: regions["out"], 2: mapped["out"], 6: ahead["out"], 9: graph["attended"]}
    for times, output in outputs.items():
        total = np.einsum("th,thd->hd", weights[times], repeated(values[times]))
        np.testing.assert_allclose(output[0], total / weights[times].sum(0)[:, None], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(elsewhere["keys"][1], names["key"][:16])
    assert scheduled["ended"] == [100]
    assert stored["stored"] == 3
    assert stored["copied"].tolist() == [True, True, True, False]
    for block in (stored["pages"][:3], stored["values"]):
        np.testing.assert_array_equal(block, np.arange(3 * 4096).reshape(3, 4096) % 256)
    np.testing.assert_array_equal(stored["first"], stored["values"][0])
    assert stored["right"].all()
    assert clustered["found"] == clustered["best"].num_cached_tokens == 48
    assert [clustered["where"]] == [one.address for one in clustered["state"]]
    assert outlive["found"].length == limits["seq"].length == 50
    assert waiting["out"].shape == (2, 4, 64)
    np.testing.assert_array_equal(waiting["last"], stored["values"][2])


def repeated(heads: Array) -> Array:
    """Key or value heads, once for each of the two query heads that share one."""
    return heads.repeat(2, axis=1)


def run_example(source: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run an example with the names that earlier ones left. Returns copies of the arrays and all else it leaves."""
    code = compile(source, "example", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    running = eval(code, names)  # a coroutine if it awaits
    if running is not None:
        asyncio.run(running)
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in names.items()}


def run(program: Path) -> str:
    command = [sys.executable, "-P", "-W", "error", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


# ---- the repository's own habits


def test_style_checks_are_the_same_before_a_commit_and_in_ci() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    lines = re.findall(r"(?ms)^(ruff check.*?)^$", script)[0].splitlines()
    checks = [line for line in lines if not line.startswith("finish ")]
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"] for hook in repository["hooks"]]
    assert len(entries) == len(checks)
    for entry, check in zip(entries, checks, strict=True):
        assert check.endswith(entry)


def test_hosted_ci_runs_the_same_script() -> None:
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]


def test_the_changelog_has_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    releases = re.findall(r"(?m)^## (.*)$", (ROOT / ".github" / "CHANGELOG.md").read_text())
    assert releases[:2] == ["Unreleased", version]
    assert releases[-1] == "0.1.0"
