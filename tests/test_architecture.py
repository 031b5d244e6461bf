"""Rules for all code: packages import each other in one direction, and tests ask packages over their faces."""

from __future__ import annotations

import ast
import functools
import math
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import kvservice
from kvservice import plain_json
from kvservice.environment import GRPC_ENVIRONMENT

PACKAGE = Path(kvservice.__file__).parent
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "v1" not in path.relative_to(PACKAGE).parts)
TESTS_ROOT = Path(__file__).parent
TESTS = sorted(TESTS_ROOT.rglob("*.py"))
# Limits over all tests together: on modules that they import by path, and on private names that they use.
MAX_INSIDES, MAX_PRIVATE_NAMES = 98, 80

# Every package may import this in place of Python's own `json`, for writing.
EVERYWHERE = {"plain_json"}
# A package may import itself and these packages of kvservice. All packages must be listed here.
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "attention_options": {"errors"},
    "environment": set(),
    # Processes and folders that end with this process. The guard runs alone.
    "owned": {"owned_guard"},
    "owned_guard": set(),
    "plain_json": set(),
    "auth": {"errors"},
    # What daemon and routers compute alike.
    "chain_hash": set(),
    "blocks": {"_ext", "chain_hash", "errors"},
    "scheduler": {"blocks", "errors"},
    # The bookkeeping of the block store: its events go to the journal of `blocks`.
    "store": {"blocks", "errors"},
    # Processes with Mooncake's library, and the messages that the daemon exchanges with them.
    "mooncake": {"_ext", "environment"},
    # Tiers below the block store. They read and write its memory.
    "tiers": {"_ext", "errors", "logs", "mooncake", "owned", "store"},
    "ops": {"attention_options", "errors", "_cuda", "_ext", "pool.layout"},
    # Shapes, which both ends of the wire know. The rest of the package is for the daemon.
    "pool.layout": set(),
    # Memory files, which the daemon uses not only for the pool.
    "pool.sealed": {"_ext", "errors"},
    "pool": {"_cuda", "errors", "ops", "pool.layout", "pool.sealed"},
    # Sessions on disk: bookkeeping as values, and the bytes of blocks from and to the device.
    "saved": {"blocks", "devices", "errors", "logs"},
    # State that outlives the daemon's process.
    # What a start found of the process before: the server fills it, the observer shows it.
    "kept.report": set(),
    "kept": {"errors", "kept.report", "pool.sealed", "telemetry.arrays"},
    "model_shape": {"errors"},
    # How large tiers should be. It reads traces and config.json, and asks no daemon.
    "planning": {"config_sources", "errors", "model_shape", "pool.layout"},
    "config": {"pool.layout"},
    "config_sources": {"auth", "config", "errors", "model_shape"},
    "devices": {
        "_cuda",
        "_ext",
        "attention_options",
        "blocks",
        "config",
        "errors",
        "kept",
        "ops",
        "pool",
        "pool.layout",
        "pool.sealed",
    },
    "engine": {"attention_options", "blocks", "config", "devices", "errors", "pool.layout", "scheduler"},
    "wire": {"_ext", "auth", "errors", "pool.layout", "v1"},
    # Arrays in memory files, which the daemon uses not only for the observer.
    "telemetry.arrays": {"pool.sealed"},
    # Data that daemon and observer share.
    "telemetry": {"blocks", "kept.report", "pool.sealed", "scheduler", "store", "telemetry.arrays", "tiers"},
    "metrics": {"blocks", "kept.report", "scheduler", "telemetry", "tiers"},
    "observer": {
        "auth",
        "errors",
        "kept.report",
        "logs",
        "metrics",
        "scheduler",
        "store",
        "telemetry",
        "telemetry.arrays",
        "tiers",
        "v1",
    },
    "server": {
        "",
        "_ext",
        "attention_options",
        "auth",
        "blocks",
        "config",
        "devices",
        "engine",
        "environment",
        "errors",
        "keeper",
        "kept",
        "kept.report",
        "logs",
        "saved",
        "mooncake",
        "owned",
        "scheduler",
        "store",
        "telemetry",
        "telemetry.arrays",
        "tiers",
        "transfer",
        "pool.sealed",
        "v1",
        "wire",
    },
    # Runs Mooncake's Transfer Engine, at both ends.
    "transfer": {"errors", "mooncake", "owned"},
    # On the daemon's host it computes on the pool itself, or uses the native end of a lane.
    "client": {
        "_cuda",
        "_ext",
        "attention_options",
        "auth",
        "chain_hash",
        "environment",
        "errors",
        "ops",
        "pool.layout",
        "transfer",
        "v1",
        "wire",
    },
    "logs": set(),
    # The process that outlives the daemon. Its modules use the standard library only.
    "keeper": set(),
    "launch": {"config", "environment", "errors", "health", "keeper", "owned"},
    "integrations": {"client", "config_sources", "errors", "model_shape", "ops"},
    "engines": {"client", "errors", "integrations", "launch"},
    "demo": {"auth", "client", "errors", "integrations", "launch", "owned", "pool.layout", "top"},
    # It measures the packages from inside.
    "bench": {
        "",
        "_ext",
        "auth",
        "blocks",
        "client",
        "config",
        "engines",
        "environment",
        "errors",
        "health",
        "integrations",
        "keeper",
        "launch",
        "mooncake",
        "ops",
        "owned",
        "planning",
        "pool.layout",
        "pool.sealed",
        "scheduler",
        "tiers",
        "transfer",
        "v1",
        "wire",
    },
    "health": {"auth", "config", "environment", "keeper", "wire"},
    "top": {"auth", "client", "environment", "errors", "v1", "wire"},
    "commands": {"auth", "bench", "config", "config_sources", "demo", "engines", "environment", "errors"},
    "cli": {
        "",
        "auth",
        "commands",
        "config",
        "demo",
        "environment",
        "errors",
        "health",
        "keeper",
        "planning",
        "server",
        "top",
    },
    "__main__": {"cli", "environment"},
    "": set(),
}
PROTOBUF_ROOMS = {"server", "observer", "client", "wire", "bench", "top"}
TORCH_MODULES = (
    "ops/torch_",
    "integrations/",
    "demo.py",
    "demo/",
    "engines/",
    "bench/attention",
    "bench/cuda_",
    "bench/serve",
    "bench/spill.py",
    "client/decode_graph.py",
)
THIRD_PARTY_OF_BOOKKEEPING = {"blocks": {"numpy"}, "scheduler": {"numpy"}, "store": {"numpy"}, "keeper": set()}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else room_of(parts)


def room_of(parts: Sequence[str]) -> str:
    return ".".join(parts[:2]) if ".".join(parts[:2]) in ROOMS else parts[0]


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Yield every module that is imported anywhere below `tree`; `from a import b` yields a.b and a."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which room is meant"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_at_load(tree: ast.Module) -> Iterator[str]:
    """Yield the imports at module load, without those in functions or below `if TYPE_CHECKING`."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from imported_modules(node)
        else:
            pending += ast.iter_child_nodes(node)


def imported_rooms(path: Path) -> set[str]:
    """Return the packages of kvservice that a module imports, at load time or later."""
    tree = tree_of(path)
    found = set()
    for name in imported_modules(tree):
        parts = name.split(".")
        if parts[0] == "kvservice" and len(parts) > 1:
            found.add("" if parts[1].startswith("__version") else room_of(parts[1:]))
    return found - {room(path)}


def test_imports_point_one_way() -> None:
    """A new package says in ROOMS what it may import."""
    forbidden = {name_of(path): imported_rooms(path) - ROOMS.get(room(path), set()) - EVERYWHERE for path in SOURCES}
    assert {path: rooms for path, rooms in forbidden.items() if rooms} == {}
    assert {room(path) for path in SOURCES} - ROOMS.keys() == set()


def test_the_rooms_have_no_cycle() -> None:
    settled: set[str] = {"v1", "_cuda", "_ext"}
    left = dict(ROOMS)
    while left:
        free = {name for name, imports in left.items() if imports <= settled}
        assert free, f"these import each other: {sorted(left)}"
        settled |= free
        left = {name: imports for name, imports in left.items() if name not in free}


def module_name(path: Path) -> str:
    parts = ("kvservice", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """Return the modules of kvservice that each of its modules imports, in functions and below TYPE_CHECKING too. A
    module does not count as an import of the packages that contain it."""
    trees = {module_name(path): tree_of(path) for path in SOURCES}
    graph: dict[str, set[str]] = {}
    for name, tree in trees.items():
        found: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                inside = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                found |= {module if module in trees else node.module for module in inside.values()}
        graph[name] = found & trees.keys()
    return graph


def cycles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the strongly connected components with more than one module, and modules that import themselves."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        pending = list(graph[start])
        while pending:
            if (name := pending.pop()) not in seen:
                seen.add(name)
                pending += graph[name]
        return seen

    reached = {name: reachable(name) for name in graph}
    return {
        frozenset(other for other in reached[name] if name in reached[other]) for name in graph if name in reached[name]
    }


def test_no_module_is_in_an_import_cycle() -> None:
    assert cycles(import_graph()) == set()


# The layers of the client, from the bottom; kvservice/client/README.md explains them. A module imports its own layer
# and lower ones.
CLIENT_LAYERS = [
    {"messages", "tensors", "values"},
    {"channel", "connection", "cut_calls", "threads"},
    {"regions", "remote"},
    {"mapped"},
    {"transport"},
    {"step"},
    {"transports"},
    {"events", "scheduler", "session", "store"},
    {"client_core"},
    {"aio", "blocking"},
    {"decode_graph"},
    {"cluster"},
]


# The rooms of the server, from the bottom; kvservice/README.md explains them.
SERVER_LAYERS = [
    {"loop", "tenants"}, {"memory"}, {"tiering"}, {"sessions"}, {"calls"}, {"rpc"}, {"watching"}, {"core"}, {"daemon"},
]  # fmt: skip


@pytest.mark.parametrize(("package", "layers"), [("client", CLIENT_LAYERS), ("server", SERVER_LAYERS)])
def test_client_and_server_are_built_in_layers(package: str, layers: list[set[str]]) -> None:
    layer_of = {name: layer for layer, names in enumerate(layers) for name in names}
    upwards = []
    for module, imports in import_graph().items():
        parts = module.split(".")
        if parts[1:2] == [package] and len(parts) > 2:
            inside = {name.split(".")[2] for name in imports if name.startswith(f"kvservice.{package}.")}
            upwards += [(module, name) for name in inside if layer_of[name] > layer_of[parts[2]]]
    assert upwards == []


TRANSPORTS = "kvservice.client.transports."


def test_only_sessions_know_which_transports_there_are() -> None:
    """Others see the `Transport` of `step`. The bench measures each of them."""
    knows = {
        name
        for name, imports in import_graph().items()
        if any(module.startswith(TRANSPORTS) for module in imports)
        and not name.startswith((TRANSPORTS, "kvservice.bench."))
    }
    assert {name.removeprefix("kvservice.client.") for name in knows} == {"client_core", "session"}


def test_cycles_are_found_wherever_the_import_stands() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e"}}
    assert cycles(graph) == {frozenset({"b", "c"}), frozenset({"e"})}
    assert "kvservice.config" in import_graph()["kvservice.cli"]


def class_names() -> dict[str, list[str]]:
    """Return the modules that define a class of each name at their top level."""
    found: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    return found


def test_one_name_names_one_class() -> None:
    names = class_names()
    assert names["SessionRegistry"] == ["server/sessions/registry.py"]
    assert {name: paths for name, paths in names.items() if len(paths) > 1} == {}


def test_rules_see_what_they_forbid() -> None:
    tree = ast.parse(
        "from typing import TYPE_CHECKING\nimport a\nif TYPE_CHECKING:\n    import b\nelse:\n    import c\n"
        "try:\n    import d\nexcept ImportError:\n    import e\ndef f():\n    import g\nclass H:\n    import i\n"
    )
    assert set(imports_at_load(tree)) == {"typing", "typing.TYPE_CHECKING", "a", "c", "d", "e", "i"}
    assert {"b", "g"} <= set(imported_modules(tree))


def test_bookkeeping_knows_neither_tensors_nor_messages() -> None:
    foreign = []
    for package, third_party in THIRD_PARTY_OF_BOOKKEEPING.items():
        known = {"kvservice"} | third_party | set(sys.stdlib_module_names)
        for path in (PACKAGE / package).glob("*.py"):
            names = imported_modules(tree_of(path))
            foreign += [(name_of(path), name) for name in names if name.split(".")[0] not in known]
    assert foreign == []


STARTS = re.compile(
    r"subprocess\.(run|call|check_\w+)|.*\bPopen|os\.(fork\w*|spawn\w+|posix_spawnp?|popen|system)|pty\..*"
    r"|.*\bcreate_subprocess_\w+|.*\bmkdtemp|tempfile\.\w*Temporary\w+|\w*Temporary(Directory|File)|multiprocessing\..*"
)


def started(path: Path) -> set[str]:
    """Return the calls of a module that start a process, or make something in the temporary directory."""
    calls = (ast.unparse(node.func) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))
    return {call for call in calls if STARTS.fullmatch(call)}


def test_what_is_started_ends_with_its_owner() -> None:
    """`owned.py` does that. The keeper's processes end with it, as `keeper/processes.py` says."""
    found = {name_of(path): started(path) for path in SOURCES}
    assert {name: calls for name, calls in found.items() if calls} == {
        "keeper/processes.py": {"os.fork"},
        "owned.py": {"tempfile.mkdtemp", "subprocess.Popen"},
        "owned_guard.py": {"os.fork"},
    }


def test_messages_stop_at_the_codec() -> None:
    messages = ("kvservice.v1", "google.protobuf", "google.rpc")
    knowing = {path for path in SOURCES if any(name.startswith(messages) for name in imported_modules(tree_of(path)))}
    assert [name_of(path) for path in sorted(knowing) if room(path) not in PROTOBUF_ROOMS] == []


def test_torch_is_imported_only_where_it_is_the_subject() -> None:
    def uses_torch(path: Path) -> bool:
        return any(name.split(".")[0] in {"torch", "transformers"} for name in imports_at_load(tree_of(path)))

    assert [name_of(p) for p in SOURCES if uses_torch(p) and not name_of(p).startswith(TORCH_MODULES)] == []


def test_what_needs_no_torch_does_not_import_it() -> None:
    code = (
        "import importlib, sys\n"
        "for name in ('client', 'server.daemon', 'cli', 'ops'):\n"
        "    importlib.import_module(f'kvservice.{name}')\n"
        "    print(*(f'{name} imports {one}' for one in ('torch', 'transformers', 'jax') if one in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def test_the_command_line_sets_the_environment_before_grpc() -> None:
    code = "import sys, kvservice.cli; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60, check=False).returncode == 0


# It writes no JSON for a reader: infinities in it tell configurations apart.
KEYS_OF_MODELS = {PACKAGE / "integrations/transformers" / name for name in ("code.py", "keys.py")}


def json_writers(tree: ast.AST) -> Iterator[int]:
    """Yield the lines with a function of the library that writes JSON."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "json":
            if node.attr in {"dump", "dumps", "JSONEncoder"}:
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "json":
            yield from (node.lineno for name in node.names if name.name in {"dump", "dumps", "JSONEncoder", "*"})


def test_json_is_written_by_one_function() -> None:
    """It writes no NaN and no infinity, which no reader of JSON must accept."""
    assert set(json_writers(ast.parse("import json\njson.dumps(1)\nfrom json import dump\n"))) == {2, 3}
    exempt = {PACKAGE / "plain_json.py", *KEYS_OF_MODELS}
    exempt |= {path for path in SOURCES if room(path) == "keeper"}  # it imports the standard library alone
    found = [(path, line) for path in SOURCES if path not in exempt for line in json_writers(tree_of(path))]
    assert not found


def test_json_has_only_numbers_that_are_finite() -> None:
    numbers = [1.5, math.nan, -math.inf, {"le": {math.inf: (math.inf, 2)}}]
    assert plain_json.dumps(numbers, separators=(",", ":")) == '[1.5,null,null,{"le":{"inf":[null,2]}}]'
    assert plain_json.dumps({"b": 1, "a": [True, None]}, sort_keys=True) == '{"a": [true, null], "b": 1}'


def test_a_daemon_that_restarts_imports_nothing_that_only_other_commands_need() -> None:
    """Clients wait until the imports are done."""
    spared = {"rich", "textual", "starlette", "uvicorn", "prometheus_client", "opentelemetry"}
    code = f"import sys, kvservice.cli, kvservice.server.daemon; print({spared} & set(sys.modules) or '')"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""


def test_importing_the_client_prepares_grpc() -> None:
    code = "import os, kvservice.client; print({k: v for k, v in os.environ.items() if k.startswith('GRPC')})"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert ast.literal_eval(done.stdout) == GRPC_ENVIRONMENT
    assert "-event_engine_client" in done.stdout


# ---- tests


def name_of_call(call: ast.Call) -> str:
    """Return the name of the function or method, without what it belongs to."""
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def checks(test: ast.AST) -> bool:
    """Whether a test has an assertion of its own: assert, pytest.raises, pytest.fail, np.testing, ..."""
    names = {name_of_call(node) for node in ast.walk(test) if isinstance(node, ast.Call)}
    return any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(test)) or any(
        "assert" in name or name in {"raises", "warns", "fail"} for name in names
    )


def test_tests_without_an_assertion_say_what_would_fail() -> None:
    silent = []
    for path in (path for path in TESTS if path.name.startswith("test_")):
        for node in tree_of(path).body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith("test_"):
                continue
            if not ast.get_docstring(node) and not checks(node):
                silent.append(f"{path.name}: {node.name}")
    assert silent == []


# Names that look private and are not: the native extensions, and what named tuples and os offer.
PUBLIC = {"_ext", "_cuda", "_replace", "_asdict", "_fields", "_make", "_exit", "_MEI"}
# The modules of packages. The generated code is no inside, nor are the modules that are in no package of kvservice.
INSIDES = {name for path in SOURCES if path.stem != "__init__" and (name := module_name(path)).count(".") > 1}


def imported_insides(tree: ast.AST) -> set[str]:
    """Return the modules below packages that a test imports by their path, or whose path it has as a text."""
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return (set(imported_modules(tree)) | texts) & INSIDES


def private_names(tree: ast.AST) -> set[str]:
    """Return the names with a leading underscore that a test uses, but those that it defines itself."""
    own, used = set(PUBLIC), set[object]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Attribute):
            of_itself = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
            if not of_itself:
                used.add(node.attr)
            elif isinstance(node.ctx, ast.Store):
                own.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvservice"):
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and name_of_call(node) in {"getattr", "setattr"}:
            used |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return {name for name in used - own if isinstance(name, str) and re.match("_[^_]", name)}


def test_tests_ask_packages_over_their_faces() -> None:
    """Modules can then be merged and moved. Each name is listed with the tests that use it."""
    insides: dict[str, set[str]] = defaultdict(set)
    private: dict[str, set[str]] = defaultdict(set)
    for path in TESTS:
        for found, names in ((insides, imported_insides), (private, private_names)):
            for name in names(tree_of(path)):
                found[name].add(str(path.relative_to(TESTS_ROOT)))
    assert len(insides) <= MAX_INSIDES, dict(insides)
    assert len(private) <= MAX_PRIVATE_NAMES, dict(private)


def test_what_is_counted_as_an_inside() -> None:
    tree = ast.parse(
        "from kvservice.pool import PoolLayout, layout\nfrom kvservice.v1 import pool_pb2\nimport kvservice.errors\n"
        "from kvservice.blocks import _hidden\nclass Own:\n    def _mine(self):\n        self._kept = self._inherited\n"
        "one._mine()\none._kept, one._of_another, one.__dict__, one._replace()\n"
        "monkeypatch.setattr(one, '_patched', 1)\nimport_module('kvservice.engines.loop')\n"
    )
    assert imported_insides(tree) == {f"kvservice.{name}" for name in ("pool.layout", "engines.loop")}
    assert private_names(tree) == {"_hidden", "_of_another", "_patched"}
