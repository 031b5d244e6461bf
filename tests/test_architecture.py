"""Rules for all code: packages import each other in one direction, and the contract is complete."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor

import kvservice
from kvservice.config import ServeConfig
from kvservice.environment import GRPC_ENVIRONMENT
from kvservice.server.calls import session_handlers
from kvservice.server.contract import SERVICES, call_name, is_of_session
from kvservice.server.handlers import Handler, OpenHandler, SessionHandler, WhileDraining
from kvservice.server.open_calls import OpenCalls
from kvservice.server.saved_sessions import SavedSessions
from kvservice.v1 import session_pb2

PACKAGE = Path(kvservice.__file__).parent
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "v1" not in path.relative_to(PACKAGE).parts)

# A package may import itself and these packages of kvservice. All packages must be listed here.
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "attention_options": {"errors"},
    "environment": set(),
    "auth": {"errors"},
    # What daemon and routers compute alike.
    "chain_hash": set(),
    "blocks": {"_ext", "chain_hash", "errors"},
    "scheduler": {"blocks", "errors"},
    # The bookkeeping of the block store: its events go to the journal of `blocks`.
    "store": {"blocks", "errors"},
    # Processes with Mooncake's library, and the messages that the daemon exchanges with them.
    "mooncake": {"_ext"},
    # Tiers below the block store. They read and write its memory.
    "tiers": {"_ext", "logs", "mooncake", "store"},
    "ops": {"attention_options", "errors", "_cuda", "_ext", "pool.layout"},
    # Shapes, which both ends of the wire know. The rest of the package is for the daemon.
    "pool.layout": set(),
    # Memory files, which the daemon uses not only for the pool.
    "pool.available": {"errors"},
    "pool.sealed": {"pool.available"},
    "pool": {"_cuda", "errors", "ops", "pool.available", "pool.layout", "pool.sealed"},
    # Sessions on disk: bookkeeping as values, and the bytes of blocks from and to the device.
    "saved": {"blocks", "devices", "errors", "logs"},
    # State that outlives the daemon's process.
    # What a start found of the process before: the server fills it, the observer shows it.
    "kept.report": set(),
    "kept": {"kept.report", "pool.available", "pool.sealed", "telemetry.arrays"},
    "model_shape": {"errors"},
    # How large tiers should be. It reads traces and config.json, and asks no daemon.
    "planning": {"config_sources", "errors", "model_shape", "pool.layout"},
    "config": {"pool.layout"},
    "config_sources": {"config", "errors", "model_shape"},
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
    "wire": {"auth", "errors", "pool.layout", "v1"},
    # Arrays in memory files, which the daemon uses not only for the observer.
    "telemetry.arrays": {"pool.available"},
    # Data that daemon and observer share.
    "telemetry": {"blocks", "kept.report", "pool.available", "scheduler", "store", "telemetry.arrays", "tiers"},
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
        "scheduler",
        "store",
        "telemetry",
        "telemetry.arrays",
        "tiers",
        "transfer",
        "pool.available",
        "pool.sealed",
        "v1",
        "wire",
    },
    # Runs Mooncake's Transfer Engine, at both ends.
    "transfer": {"errors", "mooncake"},
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
    "launch": {"config", "environment", "errors", "health", "keeper"},
    "integrations": {"client", "config_sources", "errors", "model_shape", "ops"},
    "engines": {"client", "errors", "integrations", "launch"},
    "demo": {"auth", "client", "errors", "integrations", "launch", "pool.layout", "top"},
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
        "integrations",
        "keeper",
        "launch",
        "mooncake",
        "ops",
        "planning",
        "pool.layout",
        "pool.sealed",
        "scheduler",
        "tiers",
        "transfer",
        "v1",
        "wire",
    },
    "health": {"auth", "config", "environment", "wire"},
    "top": {"auth", "client", "environment", "errors", "v1", "wire"},
    "commands": {"auth", "config", "config_sources", "demo", "engines", "errors", "keeper", "planning"},
    "cli": {
        "",
        "bench",
        "commands",
        "config",
        "config_sources",
        "demo",
        "environment",
        "errors",
        "health",
        "keeper",
        "server",
        "top",
    },
    "__main__": {"cli"},
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
    "bench/flashinfer_peer.py",
    "bench/lane_cuda.py",
    "bench/serve",
    "bench/spill.py",
    "bench/swap.py",
    "client/decode_graph.py",
    "client/pools/decode.py",
)
THIRD_PARTY_OF_BOOKKEEPING = {"blocks": {"numpy"}, "scheduler": {"numpy"}, "store": {"numpy"}, "keeper": set()}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


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


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    assert room(path) in ROOMS, "a new room: say here what it may import"
    assert imported_rooms(path) <= ROOMS[room(path)]


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
    {"batches", "cuda", "process", "requests", "scheduler_values", "sequences", "tensors", "tracing", "values"},
    {"channel", "connection", "fd_passing", "messages", "tasks", "threads", "waiting"},
    {"calls", "context", "region_memory", "regions", "remote", "remote_tensors"},
    {"pools"},
    {"transports"},
    {"contents", "events", "scheduler", "selection", "session", "session_calls", "step", "store"},
    {"client_core"},
    {"aio", "blocking"},
    {"steps_ahead"},
    {"decode_graph"},
    {"cluster"},
]


def test_the_client_is_built_in_layers() -> None:
    layer_of = {name: layer for layer, names in enumerate(CLIENT_LAYERS) for name in names}
    for module, imports in import_graph().items():
        parts = module.split(".")
        if parts[1:2] == ["client"] and len(parts) > 2:
            inside = {name.split(".")[2] for name in imports if name.startswith("kvservice.client.")}
            assert max((layer_of[name] for name in inside), default=0) <= layer_of[parts[2]], module


TRANSPORTS = "kvservice.client.transports."


def test_only_sessions_know_which_transports_there_are() -> None:
    """Others see `transports.base`. The bench measures each of them."""
    knows = {
        name
        for name, imports in import_graph().items()
        if any(module.startswith(TRANSPORTS) and module != f"{TRANSPORTS}base" for module in imports)
        and not name.startswith((TRANSPORTS, "kvservice.bench."))
    }
    assert knows == {"kvservice.client.selection"}


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
    assert names["SessionRegistry"] == ["server/sessions.py"]
    assert {name: paths for name, paths in names.items() if len(paths) > 1} == {}


def test_rules_see_what_they_forbid() -> None:
    tree = ast.parse(
        "from typing import TYPE_CHECKING\nimport a\nif TYPE_CHECKING:\n    import b\nelse:\n    import c\n"
        "try:\n    import d\nexcept ImportError:\n    import e\ndef f():\n    import g\nclass H:\n    import i\n"
    )
    assert set(imports_at_load(tree)) == {"typing", "typing.TYPE_CHECKING", "a", "c", "d", "e", "i"}
    assert {"b", "g"} <= set(imported_modules(tree))


@pytest.mark.parametrize(
    "path",
    sorted(path for name in THIRD_PARTY_OF_BOOKKEEPING for path in (PACKAGE / name).glob("*.py")),
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_bookkeeping_knows_neither_tensors_nor_messages(path: Path) -> None:
    for name in imported_modules(tree_of(path)):
        top = name.split(".")[0]
        assert top in {"kvservice"} | THIRD_PARTY_OF_BOOKKEEPING[path.parent.name] | set(sys.stdlib_module_names), name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_messages_stop_at_the_codec(path: Path) -> None:
    names = set(imported_modules(tree_of(path)))
    knows = any(name.startswith(("kvservice.v1", "google.protobuf", "google.rpc")) for name in names)
    assert not knows or room(path) in PROTOBUF_ROOMS


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_torch_is_imported_only_where_it_is_the_subject(path: Path) -> None:
    uses = any(name.split(".")[0] in {"torch", "transformers"} for name in imports_at_load(tree_of(path)))
    assert not uses or str(path.relative_to(PACKAGE)).startswith(TORCH_MODULES)


@pytest.mark.parametrize("module", ["kvservice.client", "kvservice.server.daemon", "kvservice.cli", "kvservice.ops"])
def test_importing_it_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'transformers', 'jax'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60, check=False).returncode == 0


def test_the_command_line_sets_the_environment_before_grpc() -> None:
    code = "import sys, kvservice.cli; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60, check=False).returncode == 0


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


RPCS = [
    method
    for service in SERVICES
    for method in service.methods
    if not (method.client_streaming or method.server_streaming)
]
SESSION_RPCS = [method for method in RPCS if is_of_session(method)]
# Messages of a stream other than the calls of a session.
OTHER_STREAM_CALLS = {"attach", "ping"}


@pytest.fixture(scope="module")
def handlers() -> dict[str, Handler]:
    engine: Any = SimpleNamespace(manager=None, device=SimpleNamespace(num_blocks=1, num_swap_blocks=0))
    open_calls = OpenCalls(ServeConfig(), engine, sessions=None, store_bytes=0, snapshot=None)  # type: ignore[arg-type]
    saved = SavedSessions(ServeConfig(), manager=None, sessions=None, files=None)  # type: ignore[arg-type]
    made = [*session_handlers(ServeConfig(), engine, None, saved), *open_calls.handlers()]
    assert len({handler.method for handler in made}) == len(made)
    return {handler.method: handler for handler in made}


@pytest.mark.parametrize("method", RPCS, ids=lambda method: method.full_name)
def test_every_rpc_has_a_handler(method: MethodDescriptor, handlers: dict[str, Handler]) -> None:
    handler = handlers[call_name(method)]
    assert isinstance(handler, SessionHandler if method in SESSION_RPCS else OpenHandler)
    assert handler.request_type.DESCRIPTOR is method.input_type


def test_there_are_no_other_handlers(handlers: dict[str, Handler]) -> None:
    assert set(handlers) == {call_name(method) for method in RPCS}


@pytest.mark.parametrize("method", SESSION_RPCS, ids=lambda method: method.full_name)
def test_every_rpc_of_a_session_can_go_over_its_stream(method: MethodDescriptor) -> None:
    name = call_name(method)
    call = session_pb2.Call.DESCRIPTOR.fields_by_name[name]
    reply = session_pb2.Reply.DESCRIPTOR.fields_by_name[name]
    assert call.message_type is method.input_type
    assert reply.message_type is method.output_type
    assert call.containing_oneof is not None
    assert reply.containing_oneof is not None
    assert call.number == reply.number


def test_the_stream_carries_nothing_else() -> None:
    names = {call_name(method) for method in SESSION_RPCS} | OTHER_STREAM_CALLS
    assert {field.name for field in session_pb2.Call.DESCRIPTOR.fields} == names | {"call_id", "traceparent"}
    assert {field.name for field in session_pb2.Reply.DESCRIPTOR.fields} == names | {"call_id", "error"}


@pytest.mark.parametrize("method", SESSION_RPCS, ids=lambda method: method.full_name)
def test_requests_of_a_session_name_it(method: MethodDescriptor) -> None:
    token = method.input_type.fields_by_name["session_token"]
    # Triton's messages keep their own numbers.
    number = 15 if method.containing_service.name == "SharedMemoryService" else 1
    assert (token.number, token.type) == (number, FieldDescriptor.TYPE_BYTES)


# Calls that have the same effect when they are repeated.
REPEATED_WITHOUT_AN_ID = {
    "create_remote_region", "remove_remote_region",
    "store_lookup", "store_renew", "store_release", "store_abort", "store_batch_get", "store_batch_put", "store_touch",
    "detach",
}  # fmt: skip
READ_ONLY = {
    "can_allocate", "can_append", "can_swap_out", "can_swap_in", "describe", "match_prefix", "common_prefix",
    "describe_requests",    "system_shared_memory_status", "cuda_shared_memory_status",
}  # fmt: skip


def test_every_change_but_of_tensors_can_be_repeated() -> None:
    methods = [method for method in SESSION_RPCS if method.containing_service.name != "AttentionService"]
    repeatable = {call_name(method) for method in methods if "request_id" in method.input_type.fields_by_name}
    assert repeatable == {call_name(method) for method in methods} - READ_ONLY - REPEATED_WITHOUT_AN_ID


def test_while_the_daemon_drains_no_work_begins(handlers: dict[str, Handler]) -> None:
    rules = {handler.method: handler.while_draining for handler in handlers.values()}
    refused = {method for method, rule in rules.items() if rule is WhileDraining.REFUSED}
    assert refused == {
        "open", "allocate", "append", "open_step", "open_ahead", "fork", "swap_out", "swap_in", "pin",
        "create_region", "open_lane", "create_remote_region",
        "map_pool", "open_scheduler", "add_requests", "schedule",
        "store_open_namespace", "store_reserve", "store_batch_put", "store_map_store",
    }  # fmt: skip
    continued = {method for method, rule in rules.items() if rule is WhileDraining.FOR_BEGUN_STEPS}
    assert continued == {"decode", "extend", "write"}


def test_requests_that_can_be_repeated_are_answered_by_no_coroutine(handlers: dict[str, Handler]) -> None:
    """The reply of a coroutine could not be remembered."""
    repeatable = [
        handler for handler in handlers.values() if "request_id" in handler.request_type.DESCRIPTOR.fields_by_name
    ]
    assert repeatable
    assert not [handler.method for handler in repeatable if inspect.iscoroutinefunction(handler.start)]


# ---- tests


def checks(test: ast.AST) -> bool:
    """Whether a test has an assertion of its own: assert, pytest.raises, pytest.fail, np.testing, ..."""
    calls = (ast.unparse(node.func) for node in ast.walk(test) if isinstance(node, ast.Call))
    return any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(test)) or any(
        re.search(r"assert|testing|\b(raises|warns|fail)$", name) for name in calls
    )


def test_tests_without_an_assertion_say_what_would_fail() -> None:
    silent = []
    for path in sorted(Path(__file__).parent.rglob("test_*.py")):
        for node in tree_of(path).body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith("test_"):
                continue
            if not ast.get_docstring(node) and not checks(node):
                silent.append(f"{path.name}: {node.name}")
    assert silent == []
